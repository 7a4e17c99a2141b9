"""A script or module run as Python would run it, under a watch."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hotloop.doctor.live.virtual import Stall, VirtualDevice
from hotloop.doctor.live.watch import Watch
from hotloop.doctor.recorded import Trace
from hotloop.doctor.rules.finding import Finding
from hotloop.doctor.trace.stream import TraceError
from hotloop.stalls import Sync

__all__ = ["Watched", "run_virtually", "run_watched"]


@dataclass(frozen=True)
class Watched:
    """What came of a watched run.

    Attributes:
        status: the script's own exit status. steps: optimizer steps that were seen.
        trace: the recorded window, its findings placed by the window with stacks; None if the script ended before.
    """

    status: int
    steps: int
    trace: Trace | None


def run_watched(
    target: str, arguments: Sequence[str], *, module: bool = False, skip: int = 10, active: int = 5
) -> Watched:
    """Run a script (or with `module` a module) to its end in this process, and record windows of its steps.

    The script sees its own `sys.argv`, `sys.path[0]` and `__name__ == "__main__"`; what it prints is not touched. Its
    exceptions are shown as Python shows them.

    Raises:
        TraceError: there is no such script.
    """
    with _as_script(target, arguments, module=module), Watch(skip=skip, active=active) as watch:
        status = _run(target, module=module)
    priced, placed = watch.traces()
    if priced is not None:
        priced.name = target
    if priced is not None and placed is not None:
        _place_findings(priced, placed, watch.syncs)
    return Watched(status, watch.steps, priced)


def run_virtually(target: str, arguments: Sequence[str], *, module: bool = False) -> tuple[int, list[Stall]]:
    """Run a script as `run_watched` does, and list the lines at which a GPU would have to be waited for.

    Returns:
        The script's exit status, and the lines, the most frequent first.

    Raises:
        TraceError: there is no such script.
    """
    with _as_script(target, arguments, module=module), VirtualDevice() as device:
        status = _run(target, module=module)
    return status, device.stalls()


@contextmanager
def _as_script(target: str, arguments: Sequence[str], *, module: bool) -> Iterator[None]:
    if not module and not Path(target).is_file():
        raise TraceError(f"there is no script {target}")
    before = sys.argv, sys.path[0]
    sys.argv = [target, *arguments]
    sys.path[0] = os.getcwd() if module else str(Path(target).resolve().parent)
    try:
        yield
    finally:
        sys.argv, sys.path[0] = before


def _run(target: str, *, module: bool) -> int:
    try:
        if module:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(target, run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BaseException as error:
        # without the frames of this module and of runpy, as Python itself would show it
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename in (
            __file__,
            runpy.__file__,
            "<frozen runpy>",
        ):
            frames = frames.tb_next
        traceback.print_exception(type(error), error, frames)
        return 1
    return 0


def _place_findings(priced: Trace, placed: Trace, syncs: list[Sync]) -> None:
    """Give the findings of the window without stacks the lines that the window with them shows."""
    others = [*placed.findings(), *placed.diagnosis.harmless]
    for finding in [*priced.findings(), *priced.diagnosis.harmless]:
        same = [other for other in others if other.rule == finding.rule and other.place is not None]
        known = [other for other in same if other.place is not None and other.place.known]
        if known:
            finding.place = known[0].place
            for other in known[1:6]:
                finding.evidence.append(f"also {other.place}")
        if finding.rule == "host-sync":
            _sharpen(finding, syncs)


def _sharpen(finding: Finding, syncs: list[Sync]) -> None:
    """The exact line of a wait, where the hooks saw it: a trace has the function's `def` line only."""
    seen = sorted({(sync.file, sync.line) for sync in syncs})
    place = finding.place
    if place is not None and place.known and not place.exact:
        mine = [line for file, line in seen if file.endswith(place.file) and line >= place.line]
        mine = [line for line in mine if not place.candidates or line in place.candidates]
        if len(mine) == 1:
            place.line, place.exact = mine[0], True
    if seen:
        finding.evidence.append("seen waiting: " + ", ".join(f"{file}:{line}" for file, line in seen[:8]))
