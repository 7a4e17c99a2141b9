"""tensor-cores: matrix products and convolutions run in full precision, beside the tensor cores."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hotloop.doctor.replay.simulate import Edit
from hotloop.doctor.rules.finding import Case, Finding, Rule
from hotloop.doctor.rules.operands import find_operands
from hotloop.doctor.trace.kernels import COMMUNICATION, FULL_PRECISION, TENSOR_CORES

__all__ = ["RULE", "judge", "product_rate"]

SPEEDUP = 2.0  # where a kernel's operands are not known
MOST = 16.0

# Multiply-adds and such of 16-bit numbers with sums in 32 bits, a cycle and multiprocessor; and the clock in GHz:
# from NVIDIA's architecture white papers (V100, T4, A100, GA102, AD102, H100, B200).
_RATES: dict[tuple[int, int], tuple[float, float]] = {
    (7, 0): (1024, 1.53),
    (7, 5): (1024, 1.59),
    (8, 0): (2048, 1.41),
    (8, 6): (512, 1.70),
    (8, 9): (512, 2.40),
    (9, 0): (4096, 1.75),
    (10, 0): (8192, 1.85),
}
REACHED = 0.75  # of that rate, by a large matrix product (an H200 reaches 0.78 to 0.83)


def product_rate(case: Case) -> float | None:
    """Floating-point operations a microsecond of matrix products on this GPU's tensor cores; None if unknown."""
    timeline = case.timeline
    major, minor, units = (
        timeline.device_property(key) for key in ("computeMajor", "computeMinor", "numSms")
    )
    rate = _RATES.get((int(major or 0), int(minor or 0)))
    return None if rate is None or not units else REACHED * rate[0] * rate[1] * 1e3 * units


def _factors(case: Case, work: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """[work] what is left of each kernel's time: its operations at the tensor cores' rate, else 1 / `SPEEDUP`."""
    factors = np.full(len(work), 1 / SPEEDUP)
    rate = product_rate(case)
    if rate is None:
        return factors
    for position, operands in enumerate(find_operands(case, work)):
        took = float(case.work_us[work[position]])
        flop = operands.product_flop if operands is not None else 0.0
        # small products are not bound by arithmetic
        if flop >= 1e9 and took > 0:
            factors[position] = min(max(flop / rate / took, 1 / MOST), 1.0)
    return factors


def judge(case: Case) -> list[Finding]:
    """fp32 matrix and convolution kernels >= 10 % of the device's busy time, on a GPU that has tensor cores.

    Priced by replaying with the time that the tensor cores need for a product of that size, if the trace has shapes and
    the GPU is known, else with durations divided by `SPEEDUP`; what such a kernel gains in truth lies between nothing
    (bound by memory) and sixteen times. It changes the numbers, so the result must be verified.
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
    factors = _factors(case, work)
    told = spent / max(float((case.work_us[work] * factors).sum()), 1e-9)
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
                f"priced with {told:.3g} x; it changes the numbers: verify",
            ],
            fix,
            case.place(int(timeline.call_rows[call])) if call >= 0 else None,
            edit=Edit(work=(work, factors)),
            weight_us=spent,
            trust=0.7,
        )
    ]


RULE = Rule("tensor-cores", "matrix products run in fp32 beside the tensor cores", judge)
