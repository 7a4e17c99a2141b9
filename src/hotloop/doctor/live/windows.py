"""The windows that a watch recorded, read: prices from the one without Python stacks, lines from the other."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hotloop.doctor.recorded import Trace, read
from hotloop.doctor.rules.diagnose import make_verdict
from hotloop.doctor.rules.finding import Finding
from hotloop.doctor.trace.stream import TraceError
from hotloop.stalls import Sync

__all__ = ["Notes", "read_windows"]


@dataclass
class Notes:
    """What a watch knows besides its traces.

    Attributes:
        step_us, event_us, kernel_us, mark_us, link_bytes_us: as in `Pace`.
        syncs: waits for the device and pageable copies, with their exact lines.
    """

    step_us: float | None = None
    event_us: float | None = None
    kernel_us: float | None = None
    mark_us: float | None = None
    link_bytes_us: float | None = None
    syncs: list[Sync] = field(default_factory=list)

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Notes:
        """What `write` wrote."""
        content = json.loads(path.read_text())
        syncs = [Sync(**sync) for sync in content.pop("syncs")]
        return cls(**content, syncs=syncs)


def read_windows(files: Sequence[Path], notes: Notes, name: str) -> Trace | None:
    """The window without stacks, its findings placed by the one with them; None if there is none.

    Args:
        files: the window for prices, and the one for lines if it was recorded.
        notes: of the same watch. name: for the report.
    """
    found: list[Trace | None] = []
    for path in files:
        try:
            found.append(read(path))
        except TraceError:
            found.append(None)
    priced, placed = (*found, None, None)[:2]
    if priced is not None:
        priced.name = name
        priced.header["hotloop"] = {k: v for k, v in vars(notes).items() if k != "syncs"}
        if placed is not None:
            _place_findings(priced, placed, notes.syncs)
    return priced


def _place_findings(priced: Trace, placed: Trace, syncs: list[Sync]) -> None:
    """Give the findings of the window without stacks the lines that the window with them shows."""
    others = [*placed.findings(), *placed.diagnosis.harmless, *placed.diagnosis.dropped]
    quiet = {other.rule for other in placed.diagnosis.silenced} - {other.rule for other in others}
    for kind in (priced.diagnosis.findings, priced.diagnosis.harmless):
        # the trace for prices has no lines, so that what a line silences is known here only
        for finding in [finding for finding in kind if finding.rule in quiet]:
            kind.remove(finding)
            finding.place = next(o.place for o in placed.diagnosis.silenced if o.rule == finding.rule)
            priced.diagnosis.silenced.append(finding)
            priced.diagnosis.verdict = make_verdict(priced.diagnosis)
    for finding in [*priced.findings(), *priced.diagnosis.harmless]:
        same = [other for other in others if other.rule == finding.rule and other.place is not None]
        known = [other for other in same if other.place is not None and other.place.known]
        if known:
            finding.place = known[0].place
            for other in known[1:6]:
                finding.evidence.append(f"also {other.place}")
        if finding.rule in ("host-sync", "blocking-copy"):
            _sharpen(finding, syncs)


def _sharpen(finding: Finding, syncs: list[Sync]) -> None:
    """The exact line of a wait, where the hooks saw it: a trace has the function's `def` line only."""
    # a pageable copy is seen by its own hook or, if it blocks in so many words, as any wait
    seen = sorted({(s.file, s.line) for s in syncs if finding.rule == "blocking-copy" or not s.pageable})
    place = finding.place
    if place is not None and place.known and not place.exact:
        mine = [line for file, line in seen if file.endswith(place.file) and line >= place.line]
        mine = [line for line in mine if not place.candidates or line in place.candidates]
        if len(mine) == 1:
            place.line, place.exact = mine[0], True
    if seen:
        finding.evidence.append("seen waiting: " + ", ".join(f"{file}:{line}" for file, line in seen[:8]))
