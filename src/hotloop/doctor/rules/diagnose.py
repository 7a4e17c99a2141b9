"""All rules over one trace: findings priced one on top of the other, ranked, and summed up in a sentence."""

from __future__ import annotations

from dataclasses import dataclass, field

from hotloop.doctor.replay.simulate import Edit, Replay
from hotloop.doctor.rules import (
    accumulation,
    allocator,
    bandwidth,
    blocking_copy,
    cold_start,
    communication,
    coverage,
    data_loading,
    fusion,
    host_stall,
    host_sync,
    launch_bound,
    optimizer,
    recompiles,
    small_grids,
    tensor_cores,
    unexplained,
    wave_tail,
)
from hotloop.doctor.rules.finding import Case, Finding, Rule
from hotloop.doctor.trace.places import ignored_rules

__all__ = ["RULES", "Diagnosis", "diagnose", "make_verdict"]

RULES: tuple[Rule, ...] = (
    coverage.RULE,
    cold_start.RULE,
    unexplained.RULE,
    data_loading.RULE,
    host_sync.RULE,
    blocking_copy.RULE,
    allocator.RULE,
    host_stall.RULE,
    launch_bound.RULE,
    communication.RULE,
    accumulation.RULE,
    tensor_cores.RULE,
    fusion.RULE,
    optimizer.RULE,
    recompiles.RULE,
    small_grids.RULE,
    wave_tail.RULE,
    bandwidth.RULE,
)

# A saving below this part of the window, or below this much of a step, is within what a run varies by itself.
LEAST_SHARE = 0.01
LEAST_STEP_US = 100.0


@dataclass
class Diagnosis:
    """What the doctor says about one trace.

    Attributes:
        verdict: one sentence. findings: those that cost time, ranked by what their fix saves. harmless: stalls that
            cost nothing. notes: what to know. silenced: findings switched off in the source.
        dropped: those whose fix saves next to nothing.
        case: the trace with idle partition and replay.
    """

    case: Case
    verdict: str = ""
    findings: list[Finding] = field(default_factory=list)
    harmless: list[Finding] = field(default_factory=list)
    notes: list[Finding] = field(default_factory=list)
    silenced: list[Finding] = field(default_factory=list)
    dropped: list[Finding] = field(default_factory=list)

    @property
    def saved_s(self) -> float:
        """What all fixes together save over the window, in seconds."""
        return sum(finding.seconds or 0.0 for finding in self.findings)


def diagnose(case: Case) -> Diagnosis:
    """Run all rules, price and rank what they find.

    Each fix is replayed alone; fixes that save next to nothing alone are dropped, or called harmless if their events
    take a good part of the window. The rest is applied one after the other, always the one next that saves most: a
    finding's seconds are what its fix still saves after those above it. `low` and `high` are the savings
    as the first and as the last fix.
    """
    found: list[Finding] = []
    for rule in RULES:
        found += rule.judge(case)
    diagnosis = Diagnosis(case)
    for finding in list(found):
        finding.steps = case.timeline.steps
        if finding.rule in ignored_rules(finding.place):
            diagnosis.silenced.append(finding)
            found.remove(finding)
    diagnosis.notes = [finding for finding in found if finding.kind == "note"]
    stalls = [finding for finding in found if finding.kind == "stall"]
    if not _can_judge(case, diagnosis.notes):
        stalls = [finding for finding in stalls if finding.rule == "coverage"]
    if case.replay.usable:
        _price(case, stalls, diagnosis)
    else:
        for finding in stalls:
            if len(case.timeline.work_rows):
                finding.evidence.append(f"no seconds: {case.replay.why_not}")
        diagnosis.findings = sorted(
            (f for f in stalls if f.weight_us >= LEAST_SHARE * case.timeline.window_us),
            key=lambda f: -f.weight_us,
        )
    diagnosis.verdict = make_verdict(diagnosis)
    return diagnosis


def _least_us(case: Case) -> float:
    return max(LEAST_SHARE * case.replay.replayed_us, LEAST_STEP_US * max(case.timeline.steps, 1))


def _price(case: Case, stalls: list[Finding], diagnosis: Diagnosis) -> None:
    replay = case.replay
    base = replay.replayed_us
    least = _least_us(case)
    alone: dict[int, float] = {}
    priced: list[Finding] = []
    rejected: list[Finding] = []
    for finding in _merged(case, stalls):
        if finding.edit is None:
            if finding.weight_us >= LEAST_SHARE * case.timeline.window_us:
                diagnosis.findings.append(finding)
            continue
        saved = base - replay.run([finding.edit])
        alone[id(finding)] = saved
        if saved >= least:
            priced.append(finding)
        else:
            rejected.append(finding)
    ranked, savings = _rank(replay, priced, rejected, least)
    for finding in rejected:
        if finding not in ranked and finding.weight_us >= 0.05 * replay.measured_us:
            saved = max(alone[id(finding)], 0.0)
            finding.kind, finding.seconds, finding.low, finding.high = "harmless", 0.0, 0.0, saved / 1e6
            finding.evidence.append(f"without it the replay takes {saved / 1000:.3g} ms less")
            diagnosis.harmless.append(finding)
        elif finding not in ranked:
            diagnosis.dropped.append(finding)
    everything = [finding.edit for finding in ranked if finding.edit is not None]
    final = replay.run(everything) if everything else base
    for finding, saved in zip(ranked, savings, strict=True):
        others = [edit for edit in everything if edit is not finding.edit]
        last = replay.run(others) - final if others else saved
        first = alone[id(finding)]
        if finding.optimistic is not None:
            first = max(first, base - replay.run([finding.optimistic]))
        finding.seconds = saved / 1e6
        finding.low, finding.high = max(min(saved, last), 0.0) / 1e6, max(saved, first, last) / 1e6
    diagnosis.findings = [f for f in diagnosis.findings if f.edit is None]
    kept = [finding for finding in ranked if (finding.seconds or 0.0) * 1e6 >= 0.2 * least]
    # the order in which they were priced: each is worth its seconds only after those above it
    diagnosis.findings = kept + sorted(diagnosis.findings, key=lambda f: -f.weight_us)
    # a finding without a price, such as a straggler, may still be what matters most
    for finding in [f for f in diagnosis.findings if f.seconds is None]:
        if finding.weight_us > sum((f.seconds or 0.0) * 1e6 for f in kept):
            diagnosis.findings.remove(finding)
            diagnosis.findings.insert(0, finding)


def _rank(
    replay: Replay, priced: list[Finding], rejected: list[Finding], least: float
) -> tuple[list[Finding], list[float]]:
    """(findings in order of repair, what each saves after those before it): always the one next that saves most.

    Slow device work that saves nothing alone is a candidate, too, once something is repaired: a host that no longer
    stalls leaves the device as the limit.
    """
    waiting = list(priced)
    slow = [finding for finding in rejected if finding.edit is not None and finding.edit.work is not None]
    ranked: list[Finding] = []
    savings: list[float] = []
    edits: list[Edit] = []
    now = replay.replayed_us
    while waiting or (slow and ranked):
        after: dict[int, float] = {}
        for finding in [*waiting, *(slow if ranked else [])]:
            assert finding.edit is not None
            after[id(finding)] = replay.run([*edits, finding.edit])
        late = [finding for finding in slow if id(finding) in after and now - after[id(finding)] >= least]
        if not waiting and not late:
            break
        best = max([*waiting, *late], key=lambda finding: (now - after[id(finding)]) * finding.trust)
        assert best.edit is not None
        if best in late:
            best.evidence.append("costs time only once the findings above are repaired")
            slow.remove(best)
        else:
            waiting.remove(best)
        ranked.append(best)
        edits.append(best.edit)
        savings.append(max(now - after[id(best)], 0.0))
        now = min(now, after[id(best)])
    return ranked, savings


def _merged(case: Case, stalls: list[Finding]) -> list[Finding]:
    """Sites of the same rule that save nothing one by one, but something together, become one finding.

    Two places that wait for the same work hide each other: with either one gone the other still waits.
    """
    import numpy as np

    syncs = [finding for finding in stalls if finding.rule == "host-sync" and finding.edit is not None]
    if len(syncs) < 2:
        return stalls
    replay = case.replay
    base = replay.replayed_us
    alone = [base - replay.run([finding.edit]) for finding in syncs if finding.edit is not None]
    together = Edit(unblock=np.unique(np.concatenate([f.edit.unblock for f in syncs if f.edit is not None])))
    jointly = base - replay.run([together])
    if jointly < _least_us(case) or sum(max(saved, 0.0) for saved in alone) > 0.6 * jointly:
        return stalls
    order = sorted(syncs, key=lambda finding: -finding.weight_us)
    places = [str(finding.place) for finding in order]
    merged = Finding(
        "host-sync",
        f"The host waits for the device in {len(syncs)} places, which hide one another.",
        [f"{place}: {finding.evidence[0]}" for place, finding in zip(places[:6], order, strict=False)],
        order[0].fix,
        order[0].place,
        edit=together,
        steps=order[0].steps,
        weight_us=sum(finding.weight_us for finding in syncs),
    )
    return [finding for finding in stalls if finding.rule != "host-sync"] + [merged]


def _can_judge(case: Case, notes: list[Finding]) -> bool:
    """Not where start-up fills a good part of a window without steps, or where there is hardly any device work."""
    if len(case.timeline.work_rows) and len(case.work) < coverage.FEWEST:
        return False
    return not any(note.rule == "cold-start" and _is_all(case, note) for note in notes)


def _is_all(case: Case, cold: Finding) -> bool:
    return cold.weight_us > 0.3 * case.idle.window_us and case.timeline.steps < 2


def make_verdict(diagnosis: Diagnosis) -> str:
    """One sentence that says what matters most."""
    case = diagnosis.case
    timeline = case.timeline
    busy = f"the device works {case.busy_share:.0%} of the time"
    strange = next((note for note in diagnosis.notes if note.rule == "unexplained-idle"), None)
    if (
        strange is not None
        and strange.weight_us > 0.5 * timeline.window_us
        and len(case.work) >= coverage.FEWEST
    ):
        return strange.title
    first = next((note for note in diagnosis.notes if note.rule == "coverage"), None)
    if first is not None and not any(finding.seconds for finding in diagnosis.findings):
        return first.title
    cold = next((note for note in diagnosis.notes if note.rule == "cold-start"), None)
    if cold is not None and _is_all(case, cold):
        return cold.title
    top = diagnosis.findings[0] if diagnosis.findings else None
    if top is not None and top.seconds is not None:
        share = top.seconds * 1e6 / case.replay.replayed_us if case.replay.replayed_us else 0.0
        if strange is None or top.seconds * 1e6 > strange.weight_us:
            amount = "at most " if top.at_most else ""
            return f"{top.title} Its fix saves {amount}{share:.0%} of the time; {busy}."
    if strange is not None and (top is None or strange.weight_us > top.weight_us):
        return strange.title
    if top is not None:
        return f"{top.title} {busy[0].upper()}{busy[1:]}."
    if not len(timeline.work_rows):
        return "There is no device work in this trace."
    if case.busy_share >= 0.85:
        return f"Nothing to repair was found: {busy}."
    return f"No known stall was found, though {busy} only."
