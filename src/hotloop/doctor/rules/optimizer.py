"""optimizer: the update launches kernels for every parameter by itself."""

from __future__ import annotations

from hotloop.doctor.replay.simulate import Edit
from hotloop.doctor.rules.finding import Case, Finding, Rule

__all__ = ["RULE", "judge"]

LEFT = 0.1  # host time left by an update of a few kernels; the device's work is kept


def judge(case: Case) -> list[Finding]:
    """Optimizer steps that launch >= 50 kernels each, hardly any of them over several tensors at once.

    Counted are launches inside `Optimizer.step#...` and `Optimizer.zero_grad#...`; kernels named multi_tensor_apply or
    fused are those of a `foreach` or `fused` optimizer. It must take >= 5 % of the window. Priced by replaying with a
    tenth of the host time inside.
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
    return [
        Finding(
            RULE.id,
            "The optimizer updates every parameter by itself.",
            [
                f"{each:.0f} kernels in each optimizer step, {took / len(spans) / 1000:.4g} ms of host time each",
                f"{float(together[inside].mean()):.0%} of them work on several tensors at once",
            ],
            "- torch.optim.AdamW(model.parameters())\n+ torch.optim.AdamW(model.parameters(), fused=True)",
            case.place(int(case.update_rows[0])),
            edit=Edit(host=(spans, LEFT)),
            weight_us=took,
        )
    ]


RULE = Rule("optimizer", "the optimizer updates every parameter by itself", judge)
