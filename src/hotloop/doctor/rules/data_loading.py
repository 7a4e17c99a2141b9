"""data-loading: the device has nothing to do because the loop waits for its next batch."""

from __future__ import annotations

from hotloop.doctor.replay.simulate import Edit
from hotloop.doctor.rules.finding import Case, Finding, Rule

__all__ = ["RULE", "judge"]

# What a loader with workers still costs the loop: receiving the batch. Two public traces of one training each with
# 0 and 4 workers (ResNet-50) give 2 % and 10 % of the loading time, other work slowed down by the workers included.
HANDOVER = 0.07


def judge(case: Case) -> list[Finding]:
    """Idle time that lies inside a data loader's `__next__`, if it is >= 3 % of the window.

    The fix is priced by replaying the window with all host time inside `__next__` multiplied by `HANDOVER`: what
    workers that keep up would leave. Waiting that was hidden behind device work saves nothing by itself.
    """
    timeline = case.timeline
    idle = case.idle.parts.get("loader", 0.0)
    if not len(timeline.loader) or case.idle.share("loader") < 0.03:
        return []
    if timeline.steps >= 2 and case.in_steps(timeline.loader.start) < 0.5:
        return []
    events = timeline.events
    rows = [
        row
        for row in timeline.loader_rows
        if timeline.window[0] <= events.start_us[row] <= timeline.window[1]
    ]
    if not rows:
        return []
    longest = max(rows, key=lambda row: float(events.duration_us[row]))
    total = timeline.loader.clipped(*timeline.window).total
    name = events.name_of(longest)
    many = "MultiProcessing" in name
    fix = (
        "- DataLoader(dataset, num_workers=N)\n"
        "+ DataLoader(dataset, num_workers=2 * N, prefetch_factor=4, persistent_workers=True)"
        if many
        else "- DataLoader(dataset)\n+ DataLoader(dataset, num_workers=4, pin_memory=True, persistent_workers=True)"
    )
    return [
        Finding(
            RULE.id,
            "The device waits for the data loader"
            + ("; its workers do not keep up." if many else ", which loads in the training process."),
            [
                f"{_ms(total)} in the loader, during {_ms(idle)} of which the device was idle",
                f"{case.idle.share('loader'):.0%} of the window",
                name[:100],
            ],
            fix,
            case.place(longest),
            edit=Edit(host=(timeline.loader, HANDOVER)),
            weight_us=idle,
        )
    ]


def _ms(us: float) -> str:
    return f"{us / 1000:.4g} ms"


RULE = Rule("data-loading", "the device waits for the next batch", judge)
