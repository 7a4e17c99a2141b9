"""optimizer: the update launches kernels for every parameter by itself."""

from __future__ import annotations

import numpy as np

from hotloop.doctor.replay.simulate import Edit
from hotloop.doctor.rules.finding import Case, Finding, Rule
from hotloop.doctor.trace.places import Place

__all__ = ["RULE", "judge"]

# Of a kernel's host time for each parameter, what lists of parameters for a few kernels cost: a loop of Adam has 8
# kernels a parameter in 140 us, fused=True costs 6 us a parameter (H200, 240 parameters).
LEFT = 0.4
# Values that a fused update moves for each parameter: Adam reads p, g, m, v and writes p, m, v. A kernel of a loop
# moves two and a half on average: one or two operands and its result.
FUSED_VALUES, KERNEL_VALUES = 7.0, 2.5
# which of torch's optimizers have which option
_FUSED = frozenset({"Adam", "AdamW", "SGD", "Adagrad"})
_FOREACH = frozenset({"Adadelta", "Adafactor", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop"})


def judge(case: Case) -> list[Finding]:
    """Optimizer steps that launch >= 50 kernels each, hardly any of them over several tensors at once.

    Counted are launches inside `Optimizer.step#...` and `Optimizer.zero_grad#...`; kernels named multi_tensor_apply or
    fused are those of a `foreach` or `fused` optimizer. It must take >= 5 % of the window. Priced by replaying with the
    host time inside divided by the number of kernels for each parameter, times `LEFT`, and the device's work inside
    reduced to the values that a fused update moves.
    """
    timeline = case.timeline
    low, high = timeline.window
    spans = case.updates.clipped(low, high)
    if not len(spans):
        return []
    asked = timeline.asked[case.work]
    inside = case.work[spans.within(asked, asked + 0.001) > 0]
    together = timeline.work_named(r"multi_tensor_apply|[Ff]used|foreach")
    each = len(inside) / len(spans)
    took = spans.total
    if each < 50 or together[inside].mean() > 0.2 or took < 0.05 * case.idle.window_us:
        return []
    _, counts = np.unique(timeline.events.name[timeline.work_rows[inside]], return_counts=True)
    # most kinds of kernel run once for each parameter
    kernels = max(len(inside) / float(np.median(counts)), 1.0)
    left = min(LEFT / kernels, 0.5)
    shorter = min(FUSED_VALUES / (KERNEL_VALUES * kernels), 1.0)
    return [
        Finding(
            RULE.id,
            "The optimizer updates every parameter by itself.",
            [
                f"{each:.0f} kernels in each optimizer step, {took / len(spans) / 1000:.4g} ms of host time each",
                f"{float(together[inside].mean()):.0%} of them work on several tensors at once",
            ],
            _fix(case),
            _place(case),
            edit=Edit(host=(spans, left), work=(inside, shorter)),
            weight_us=took,
        )
    ]


def _fix(case: Case) -> str:
    """For the optimizer that the trace names: `fused=True` where it has that, else `foreach=True`."""
    low, high = case.timeline.window
    events = case.timeline.events
    row = next(row for row in case.update_rows.tolist() if low <= events.start_us[row] <= high)
    name = events.name_of(row).removeprefix("Optimizer.step#").partition(".")[0]
    if name not in _FUSED | _FOREACH:
        return f"give {name} a foreach or fused update: one kernel over many parameters"
    option = "fused" if name in _FUSED else "foreach"
    made = f"torch.optim.{name}(model.parameters()"
    return f"- {made})\n+ {made}, {option}=True)"


def _place(case: Case) -> Place:
    """Where the optimizer steps: of the updates in the window the first whose line is known."""
    low, high = case.timeline.window
    start = case.timeline.events.start_us
    rows = [row for row in case.update_rows.tolist() if low <= start[row] <= high]
    places = [case.place(row, "step") for row in rows[:10]]
    return next((place for place in places if place.known), places[0])


RULE = Rule("optimizer", "the optimizer updates every parameter by itself", judge)
