"""Is it still the same training? One check for each way in which a run can differ, each with its own reason."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hotloop.tune.run import Run
from hotloop.tune.tolerance import Tolerance

__all__ = ["EARLY", "Fault", "check_constants", "check_data", "check_early", "check_growth", "check_length",
           "check_rates", "check_repeat", "check_updates"]  # fmt: skip

EARLY = 10  # steps in which trajectories of the same seed may differ by rounding alone
_GROWTH_BYTES = 8 * 2**20


@dataclass(frozen=True)
class Fault:
    """How a run differs from the reference.

    Attributes:
        kind: "data", "length", "updates", "schedule", "constants", "arithmetic", "loss", "metric", "memory",
            "repeatability", "bits", "crash", "hang" or "out of memory".
        text: what was seen. step: where; None if it has no step.
    """

    kind: str
    text: str
    step: int | None = None

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


def check_data(run: Run, reference: Run) -> Fault | None:
    """Each update saw the same samples in the same order."""
    for i, (mine, theirs) in enumerate(zip(run.updates, reference.updates, strict=False), 1):
        if mine == theirs:
            continue
        if mine[0] != theirs[0]:
            return Fault("data", f"update {i} saw {mine[0]} samples, the reference {theirs[0]}", i)
        return Fault("data", f"update {i} saw other samples than the reference, or another order", i)
    if run.finished and reference.finished and run.evaluated != reference.evaluated:
        mine_n, theirs_n = run.evaluated[0], reference.evaluated[0]
        seen = f"{mine_n} samples, the reference {theirs_n}" if mine_n != theirs_n else "other samples"
        return Fault("data", f"evaluation saw {seen}", run.steps)
    return None


def check_length(run: Run, reference: Run) -> Fault | None:
    """A run that ends by itself ends at the same update."""
    if run.finished and (not reference.finished or run.steps != reference.steps):
        if run.steps < reference.steps:
            return Fault(
                "length", f"the script ended after {run.steps} updates, the reference went on", run.steps
            )
        if reference.finished:
            return Fault(
                "length",
                f"the script made {run.steps} updates, the reference {reference.steps}",
                reference.steps,
            )
    if reference.finished and run.steps > reference.steps:
        return Fault("length", f"more updates than the reference's {reference.steps}", reference.steps)
    return None


def check_updates(run: Run, reference: Run) -> Fault | None:
    """Every update that moved the reference's weights moved these.

    A scaled format may skip a few while it finds its scale.
    """
    still = [
        i + 1
        for i in range(1, min(len(run.marks), len(reference.marks)))
        if run.marks[i] == run.marks[i - 1] and reference.marks[i] != reference.marks[i - 1]
    ]
    allowed = max(3, len(run.marks) // 50) if run.precision == "fp16" else 0
    if len(still) <= allowed:
        return None
    return Fault(
        "updates", f"{len(still)} of {len(run.marks)} updates left the weights as they were", still[0]
    )


def check_rates(run: Run, reference: Run) -> Fault | None:
    """The learning rate after each update is the reference's."""
    for i, (mine, theirs) in enumerate(zip(run.rates, reference.rates, strict=False), 1):
        if math.isfinite(mine) and math.isfinite(theirs) and not math.isclose(mine, theirs, rel_tol=1e-5):
            return Fault("schedule", f"the learning rate is {mine:.4g}, the reference's {theirs:.4g}", i)
    return None


def check_constants(run: Run, reference: Run) -> Fault | None:
    """Weight decay, momenta, epsilons, rates of dropout and all that is of their kind are the reference's.

    A name that only one of the two has is passed over: another kernel may come with a layer of its own.
    """
    mine: dict[str, float] = {}
    theirs: dict[str, float] = {}
    for step in sorted(run.constants.keys() | reference.constants.keys()):
        if step > min(run.steps, reference.steps):
            break
        mine |= run.constants.get(step, {})
        theirs |= reference.constants.get(step, {})
        for name in mine.keys() & theirs.keys():
            if not math.isclose(mine[name], theirs[name], rel_tol=1e-5, abs_tol=1e-12):
                kind = "schedule" if name.startswith("lr") else "constants"
                return Fault(kind, f"{name} is {mine[name]:.4g}, the reference's {theirs[name]:.4g}", step)
    return None


def check_early(run: Run, reference: Run, loss: str | None, allowed: Tolerance, name: str) -> Fault | None:
    """The first gradient and the first losses agree as far as the number format rounds.

    Both runs must have drawn the same random numbers, or none. `name` is the format, for the text.
    """
    fault = None
    if run.gradient is not None and reference.gradient is not None:
        fault = _compare_gradients(run.gradient, reference.gradient, allowed, name)
    if fault is None and loss is not None:
        mine, theirs = run.values.get(loss, {}), reference.values.get(loss, {})
        steps = [step for step in sorted(mine.keys() & theirs.keys()) if step <= EARLY]
        for step in steps:
            away = abs(mine[step] - theirs[step]) / max(abs(theirs[step]), 1e-6)
            bound = allowed.loss * max(step, 1) ** 2
            if not away <= bound:
                text = f"the loss is {away:.2%} from the reference's; {name} rounds by less than {bound:.2g}"
                return Fault("arithmetic", text, step)
    return fault


def _compare_gradients(
    mine: npt.NDArray[np.float32], theirs: npt.NDArray[np.float32], allowed: Tolerance, name: str
) -> Fault | None:
    if mine.shape != theirs.shape:
        text = f"gradients of {mine.size} parameters instead of {theirs.size}"
        return Fault("arithmetic", text, 1)
    a, b = mine.astype(np.float64), theirs.astype(np.float64)
    norm = float(np.linalg.norm(b))
    if not np.isfinite(a).all():
        return Fault("arithmetic", "the first gradient is not finite", 1)
    if norm == 0.0:
        return None
    away = float(np.linalg.norm(a - b)) / norm
    scale = abs(float(a @ b) / norm**2 - 1)
    if away > allowed.gradient or scale > allowed.scale:
        text = f"the first gradient is {away:.2%} from the reference's, {scale:.2%} along it; {name} rounds by less"
        return Fault("arithmetic", text, 1)
    return None


def check_repeat(
    rows: Sequence[Sequence[object]], run: Run, loss: str | None, allowed: Tolerance
) -> Fault | None:
    """A second run with the same settings and seed logged the same losses, or such as rounding explains.

    Args:
        rows: [step, {name: value}] of the second run.
    """
    again = Run()
    again.take({"event": "block", "rows": rows, "step": 0, "memory_bytes": 0})
    if loss is None:
        return None
    mine, first = again.values.get(loss, {}), run.values.get(loss, {})
    for step in sorted(mine.keys() & first.keys()):
        if step > EARLY:
            break
        away = abs(mine[step] - first[step]) / max(abs(first[step]), 1e-6)
        if not away <= allowed.loss * max(step, 1) ** 2:
            return Fault(
                "repeatability", f"two runs with the same seed differ by {away:.2%} in the loss", step
            )
    return None


def check_growth(run: Run, reference: Run) -> Fault | None:
    """Memory in use does not climb steadily where the reference's does not.

    Judged are the last three quarters: a straight line must explain nine tenths of the variance, and climb by 8 MB and
    1 % or more, twice as much as the reference's.
    """
    mine, theirs = _climb(run.memory), _climb(reference.memory)
    if mine is None or mine[1] < 0.9 or mine[0] < max(_GROWTH_BYTES, 0.01 * run.memory[0][1]):
        return None
    if theirs is not None and mine[0] < 2 * theirs[0]:
        return None
    steps = run.memory[-1][0] - run.memory[len(run.memory) // 4][0]
    each = mine[0] / max(steps, 1) * 100 / 2**20
    return Fault("memory", f"memory in use grows by {each:.3g} MB every 100 steps", run.memory[-1][0])


def _climb(memory: Sequence[tuple[int, int]]) -> tuple[float, float] | None:
    """(bytes that a fitted line climbs by over the last three quarters, share of variance that it explains)."""
    late = memory[len(memory) // 4 :]
    if len(late) < 5:
        return None
    x = np.array([step for step, _ in late], dtype=np.float64)
    y = np.array([held for _, held in late], dtype=np.float64)
    if y.var() == 0:
        return 0.0, 0.0
    slope, start = np.polyfit(x, y, 1)
    explained = 1 - float(((y - slope * x - start) ** 2).mean() / y.var())
    return float(slope * (x[-1] - x[0])), explained
