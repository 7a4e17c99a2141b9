"""A recorded trace, opened: its events, what is slow in it, and what would be if something were changed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hotloop.doctor.replay.simulate import Edit
from hotloop.doctor.rules.diagnose import Diagnosis, diagnose
from hotloop.doctor.rules.finding import Case, Finding
from hotloop.doctor.trace.columns import Events
from hotloop.doctor.trace.idle import Idle
from hotloop.doctor.trace.reading import Progress, Recording, Recovery, read_recordings
from hotloop.doctor.trace.stream import TraceError
from hotloop.doctor.trace.timeline import Timeline

__all__ = ["Trace", "WhatIf", "read"]


@dataclass(frozen=True)
class WhatIf:
    """The window played again with changes.

    Attributes:
        before_s, after_s: seconds the window takes, replayed without and with the changes. steps: steps in it.
        error: how far the unchanged replay is from the measured time, as a fraction.
    """

    before_s: float
    after_s: float
    steps: int
    error: float

    @property
    def saved_s(self) -> float:
        """Seconds saved over the window."""
        return self.before_s - self.after_s

    @property
    def step_before_s(self) -> float:
        """Seconds of a step as it was, the window's if there are no steps."""
        return self.before_s / max(self.steps, 1)

    @property
    def step_after_s(self) -> float:
        """Seconds of a step with the changes."""
        return self.after_s / max(self.steps, 1)


class Trace:
    """One rank's trace.

    Attributes:
        name: the file's name. ranks: all traces of the same folder or archive, this one included.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self.name = recording.name
        self.ranks: tuple[Trace, ...] = (self,)

    @property
    def events(self) -> Events:
        """All slices as columns (numpy arrays); `events.to_arrow()` where pyarrow is installed."""
        return self._recording.events

    @property
    def header(self) -> dict[str, Any]:
        """The file's other top-level values: device properties, versions, rank."""
        return self._recording.header

    @property
    def recovery(self) -> Recovery:
        """What had to be mended in the file, and what was lost."""
        return self._recording.recovery

    @property
    def recording(self) -> Recording:
        """The file as read, with its size and how long that took."""
        return self._recording

    @cached_property
    def case(self) -> Case:
        """What the rules look at: timeline, idle partition, replay."""
        return Case(Timeline(self._recording))

    @property
    def timeline(self) -> Timeline:
        """Device work, calls, steps, window."""
        return self.case.timeline

    @property
    def idle(self) -> Idle:
        """The device's time in the window by cause; the parts sum to all of it."""
        return self.case.idle

    @cached_property
    def diagnosis(self) -> Diagnosis:
        """Verdict, findings, harmless stalls and notes."""
        return diagnose(self.case)

    def findings(self) -> list[Finding]:
        """What costs time, ranked by what its fix saves."""
        return self.diagnosis.findings

    def what_if(self, edits: Iterable[Edit | Finding | str] | Edit | Finding | str) -> WhatIf:
        """Play the window again with all of `edits` applied.

        Args:
            edits: changes of events, findings (their fixes), or ids of rules (the fixes of their findings); or one.

        Raises:
            TraceError: the trace cannot be replayed, or an id has no finding with a fix that can be replayed.
        """
        replay = self.case.replay
        if not replay.measured_us > 0 or not len(self.timeline.work_rows):
            raise TraceError(f"{self.name} cannot be replayed: {replay.why_not}")
        wanted: list[Edit] = []
        for edit in [edits] if isinstance(edits, (Edit, Finding, str)) else edits:
            if isinstance(edit, Edit):
                wanted.append(edit)
            elif isinstance(edit, Finding):
                wanted += [edit.edit] if edit.edit is not None else []
            else:
                mine = [f.edit for f in self.findings() if f.rule == edit and f.edit is not None]
                if not mine:
                    known = sorted({f.rule for f in self.findings() if f.edit is not None})
                    raise TraceError(
                        f"there is no finding {edit!r} to fix in {self.name}; there are: {', '.join(known) or 'none'}"
                    )
                wanted += mine
        before = replay.replayed_us
        return WhatIf(before / 1e6, replay.run(wanted) / 1e6, self.timeline.steps, replay.error)


def read(path: str | Path, progress: Progress | None = None) -> Trace:
    """Read a trace that torch.profiler wrote: .json, .gz, .zst, a .tar.gz or a folder of ranks.

    Damaged files are read as far as possible; `Trace.recovery` says what was mended. Of several ranks the lowest is
    returned, all of them are in its `ranks`.

    Args:
        path: the file or folder.
        progress: called now and then with (file's name, share read 0..1, events so far).

    Raises:
        TraceError: there is no such file, or it is no trace; the text names what it is.
    """
    traces = [Trace(recording) for recording in read_recordings(path, progress)]

    def order(trace: Trace) -> tuple[bool, int, str]:
        info = trace.header.get("distributedInfo")
        rank = info.get("rank") if isinstance(info, dict) else None
        return (not isinstance(rank, int), rank if isinstance(rank, int) else 0, trace.name)

    traces.sort(key=order)
    for trace in traces:
        trace.ranks = tuple(traces)
    return traces[0]
