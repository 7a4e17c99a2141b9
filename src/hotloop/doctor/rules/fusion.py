"""fusion: chains of element-wise kernels that read and write the same data again and again."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hotloop.doctor.replay.simulate import Edit
from hotloop.doctor.rules.finding import Case, Finding, Rule
from hotloop.doctor.rules.operands import find_operands
from hotloop.doctor.trace.kernels import ELEMENTWISE

__all__ = ["RULE", "find_chains", "judge"]

Ints = npt.NDArray[np.int64]


def find_chains(case: Case) -> list[Ints]:
    """Runs of three or more element-wise kernels in a row on one stream."""
    timeline = case.timeline
    element = timeline.work_named(ELEMENTWISE)
    stream = timeline.events.stream[timeline.work_rows]
    chains = []
    for number in np.unique(stream[case.work]):
        mine = case.work[stream[case.work] == number]
        mine = mine[np.argsort(timeline.work_start[mine], kind="stable")]
        flags = np.concatenate(([False], element[mine], [False]))
        edges = np.flatnonzero(flags[1:] != flags[:-1])
        chains += [
            mine[low:high] for low, high in zip(edges[::2], edges[1::2], strict=True) if high - low >= 3
        ]
    return chains


def judge(case: Case) -> list[Finding]:
    """Chains that take >= 15 % of the device's busy time, on a device that is busy at least half of the time.

    A fused chain reads each of its inputs once and writes its result once. With input shapes in the trace the saving
    of a chain is its time minus those bytes at the best rate that any of the trace's element-wise kernels reached;
    each of its kernels is replayed shorter by that share. Without shapes only the share of time is told.
    """
    timeline = case.timeline
    chains = [chain for chain in find_chains(case) if not _in_optimizer(case, chain)]
    busy = float(case.work_us[case.work].sum())
    spent = float(sum(case.work_us[chain].sum() for chain in chains))
    if not chains or busy <= 0 or spent < 0.15 * busy or case.busy_share < 0.5:
        return []
    kernels = sum(len(chain) for chain in chains)
    evidence = [
        f"{kernels} element-wise kernels in {len(chains)} chains take {spent / busy:.0%} of the device's work "
        f"({spent / 1000:.4g} ms)"
    ]
    traffic = _traffic(case, np.concatenate(chains))
    edit = None
    if traffic is not None:
        moved, inputs, rate = traffic
        place = {int(index): position for position, index in enumerate(np.concatenate(chains))}
        factors = np.ones(kernels)
        for chain in chains:
            at = np.array([place[int(index)] for index in chain])
            largest = inputs[at].max()
            needed = largest * 2 + np.maximum(moved[at] - inputs[at] - inputs[at], 0).sum()
            took = float(case.work_us[chain].sum())
            factors[at] = min(1.0, (needed / rate) / took) if took > 0 else 1.0
        edit = Edit(work=(np.concatenate(chains), factors))
        evidence.append(
            f"priced by bytes at {rate / 1000:.4g} GB/s, the best rate of this trace's own kernels"
        )
    else:
        evidence.append("without input shapes (record_shapes=True) the saving cannot be told")
    longest = max(chains, key=lambda chain: float(case.work_us[chain].sum()))
    call = int(timeline.launch[longest[0]])
    return [
        Finding(
            RULE.id,
            "Chains of element-wise kernels move the same data several times.",
            evidence,
            "+ model.compile()        # or torch.compile the function: a chain becomes one kernel",
            case.place(int(timeline.call_rows[call])) if call >= 0 else None,
            edit=edit,
            weight_us=spent,
        )
    ]


def _in_optimizer(case: Case, chain: Ints) -> bool:
    """Kernels of an update are a chain by chance: each works on a parameter of its own (see optimizer)."""
    asked = case.timeline.asked[chain]
    return float(case.updates.within(asked, asked + 0.001).max()) > 0


def _traffic(
    case: Case, kernels: Ints
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], float] | None:
    """([kernels] bytes moved, [kernels] bytes of the largest operand, best rate in bytes/us); None without shapes."""
    moved, largest = np.zeros(len(kernels)), np.zeros(len(kernels))
    for position, operands in enumerate(find_operands(case, kernels)):
        if operands is not None and operands.sizes:
            # inputs, and a result as large as the largest of them
            largest[position] = max(operands.sizes)
            moved[position] = sum(operands.sizes) + max(operands.sizes)
    known = moved > 0
    if known.mean() < 0.5:
        return None
    # a rate needs more than a cache full of data
    took = case.work_us[kernels]
    large = known & (moved > 4e6) & (took > 0)
    if not large.any():
        return None
    rate = float(np.percentile(moved[large] / took[large], 95))
    moved[~known] = took[~known] * rate
    largest[~known] = moved[~known] / 2
    return moved, largest, rate


RULE = Rule("fusion", "chains of element-wise kernels", judge)
