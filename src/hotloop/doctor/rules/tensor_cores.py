"""tensor-cores: matrix products and convolutions run in full precision, beside the tensor cores."""

from __future__ import annotations

import numpy as np

from hotloop.doctor.replay.simulate import Edit
from hotloop.doctor.rules.finding import Case, Finding, Rule
from hotloop.doctor.trace.kernels import COMMUNICATION, FULL_PRECISION, TENSOR_CORES

__all__ = ["RULE", "judge"]

SPEEDUP = 2.0


def judge(case: Case) -> list[Finding]:
    """fp32 matrix and convolution kernels >= 10 % of the device's busy time, on a GPU that has tensor cores.

    Priced by replaying with their durations divided by `SPEEDUP`; what a kernel gains in truth lies between nothing
    (bound by memory) and eight times. It changes the numbers, so the result must be verified.
    """
    timeline = case.timeline
    major = timeline.device_property("computeMajor")
    if major is None:
        # old files do not say; the kernels' names carry the architecture
        known = timeline.work_named(r"volta|turing|ampere|sm[789]\d|sm1\d\d|hopper")
        if not known.any():
            return []
    elif major < 7 or any(name in timeline.device_name for name in ("GTX 16", "AMD", "Radeon", "MI2", "MI3")):
        return []
    chosen = timeline.work_named(FULL_PRECISION) & ~timeline.work_named(TENSOR_CORES)
    chosen &= ~timeline.work_named(COMMUNICATION)
    work = case.work[chosen[case.work]]
    spent = float(case.work_us[work].sum())
    busy = float(case.work_us[case.work].sum())
    if spent <= 0 or spent < 0.1 * busy:
        return []
    named: dict[str, float] = {}
    for index in work.tolist():
        name = timeline.events.name_of(int(timeline.work_rows[index]))
        named[name] = named.get(name, 0.0) + float(case.work_us[index])
    top = max(named, key=lambda name: named[name])
    longest = work[int(np.argmax(case.work_us[work]))]
    call = int(timeline.launch[longest])
    old = major == 7 or timeline.work_named(r"volta|turing").any()
    fix = (
        "+ loop = hotloop.Loop(precision='16')      # half precision with a loss scale on the device"
        if old
        else "+ torch.set_float32_matmul_precision('high')   # TF32\n+ loop = hotloop.Loop(precision='bf16')"
    )
    return [
        Finding(
            RULE.id,
            "Matrix products run in fp32 beside the tensor cores.",
            [
                f"{spent / busy:.0%} of the device's work ({spent / 1000:.4g} ms) in {len(work)} fp32 kernels",
                f"most of it: {top[:90]}",
                f"priced with {SPEEDUP:g} x; it changes the numbers: verify",
            ],
            fix,
            case.place(int(timeline.call_rows[call])) if call >= 0 else None,
            edit=Edit(work=(work, 1 / SPEEDUP)),
            weight_us=spent,
            trust=0.7,
        )
    ]


RULE = Rule("tensor-cores", "matrix products run in fp32 beside the tensor cores", judge)
