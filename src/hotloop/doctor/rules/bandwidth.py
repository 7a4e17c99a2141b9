"""bandwidth: kernels that only move data, and do so far below what the memory gives."""

from __future__ import annotations

import numpy as np

from hotloop.doctor.rules.finding import Case, Finding, Rule
from hotloop.doctor.rules.operands import find_operands
from hotloop.doctor.trace.kernels import ELEMENTWISE, family

__all__ = ["RULE", "judge", "roof"]

# bytes a microsecond of the device's memory, from the vendors' data sheets
_ROOFS = (
    ("B200", 8.0e6), ("H200", 4.8e6), ("GH200", 4.0e6), ("H100 NVL", 3.9e6), ("H100 PCIe", 2.0e6), ("H100", 3.35e6),
    ("A100-SXM4-80", 2.04e6), ("A100", 1.55e6), ("V100", 0.9e6), ("T4", 0.32e6), ("L40S", 0.86e6), ("L4", 0.3e6),
    ("A10", 0.6e6), ("4090", 1.0e6), ("3090", 0.94e6), ("2080 Ti", 0.62e6), ("MI300X", 5.3e6), ("MI250", 1.6e6),
    ("MI210", 1.6e6),
)  # fmt: skip
FAR = 0.3
LEAST_BYTES = 1e6  # less is served by the caches and over before the memory is at its speed


def roof(case: Case) -> float | None:
    """Bytes a microsecond that the device's memory gives, by its data sheet; None for an unknown device."""
    name = case.timeline.device_name
    return next((rate for part, rate in _ROOFS if part in name), None)


def judge(case: Case) -> list[Finding]:
    """Element-wise kernels and reductions of >= 1 MB below 30 % of the memory's speed, >= 15 % of the busy time.

    Bytes are those of the operator's inputs and of a result as large as the largest of them (for reductions of the
    inputs alone), by the shapes in the trace. Told without seconds: most of them should not be there at all (see
    fusion), or read memory in an order that another layout would mend.
    """
    timeline = case.timeline
    limit = roof(case)
    if limit is None or case.busy_share < 0.6:
        return []
    moving = timeline.work_named(ELEMENTWISE)
    reducing = timeline.work_named(r"(?i)reduce_kernel|softmax|layer_?norm|batch_?norm")
    work = case.work[(moving | reducing)[case.work]]
    if not len(work):
        return []
    moved = np.zeros(len(work))
    for position, operands in enumerate(find_operands(case, work)):
        if operands is not None and operands.sizes:
            result = 0 if reducing[work[position]] else max(operands.sizes)
            moved[position] = sum(operands.sizes) + result
    took = case.work_us[work]
    rate = np.divide(moved, took, out=np.zeros(len(work)), where=took > 0)
    far = (moved >= LEAST_BYTES) & (rate < FAR * limit)
    busy = float(case.work_us[case.work].sum())
    spent = float(took[far].sum())
    if busy <= 0 or spent < 0.15 * busy:
        return []
    longest = int(np.argmax(np.where(far, took, 0.0)))
    name = timeline.events.name_of(int(timeline.work_rows[work[longest]]))
    call = int(timeline.launch[work[longest]])
    return [
        Finding(
            RULE.id,
            "Kernels that only move data reach a small part of the memory's speed.",
            [
                f"{int(far.sum())} kernels below {FAR:.0%} of {limit / 1e6:.3g} TB/s take {spent / busy:.0%} of the "
                f"device's work ({spent / 1000:.4g} ms)",
                f"the longest: {name[:80]} ({family(name)}), {rate[longest] / 1e3:.4g} GB/s",
            ],
            "contiguous layouts (a copy with .contiguous() once), fewer broadcasts, or one compiled kernel",
            case.place(int(timeline.call_rows[call])) if call >= 0 else None,
            kind="note",
            weight_us=spent,
        )
    ]


RULE = Rule("bandwidth", "kernels that move data far below the memory's speed", judge)
