"""A script or module run as Python would run it, under a watch."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from hotloop.doctor.live.gathering import find_gathering
from hotloop.doctor.live.stall_log import Stall
from hotloop.doctor.live.stoppers import Stopper
from hotloop.doctor.live.watch import Watch
from hotloop.doctor.live.windows import read_windows
from hotloop.doctor.recorded import Trace
from hotloop.doctor.trace.stream import TraceError
from hotloop.hardware.processes import processes_from_environment

__all__ = ["Virtual", "Watched", "run_script", "run_virtually", "run_watched", "show_exception"]


_OURS = str(Path(__file__).parent) + os.sep


@dataclass(frozen=True)
class Watched:
    """What came of a watched run.

    Attributes:
        status: the script's own exit status. steps: steps that were seen.
        trace: the recorded window, its findings placed by the window with stacks; None if the script ended before. Of
            several processes the first one has it, with all of them in its `ranks`.
        tells: False in a process whose windows another one reports.
        stoppers: what would keep a step from being captured, of this process.
        missing: ranks that left no window.
    """

    status: int
    steps: int
    trace: Trace | None
    tells: bool = True
    stoppers: tuple[Stopper, ...] = ()
    missing: tuple[int, ...] = ()


def run_watched(
    target: str,
    arguments: Sequence[str],
    *,
    module: bool = False,
    skip: int = 10,
    active: int = 5,
    folder: str | None = None,
) -> Watched:
    """Run a script (or with `module` a module) to its end in this process, and record windows of its steps.

    The script sees its own `sys.argv`, `sys.path[0]` and `__name__ == "__main__"`; what it prints is not touched. Its
    exceptions are shown as Python shows them. Under `hotloop launch`, torchrun or srun every process records the same
    steps, and the first one gathers the traces.

    Args:
        folder: where the processes of several machines leave their traces for the first one.

    Raises:
        TraceError: there is no such script.
    """
    gathering = find_gathering(processes_from_environment(), folder)
    if gathering is not None:
        gathering.open()
    with _as_script(target, arguments, module=module), Watch(skip=skip, active=active) as watch:
        status = _run(target, module=module)
    if gathering is None:
        trace = read_windows(watch.files, watch.make_notes(), target)
        return Watched(status, watch.steps, trace, stoppers=watch.stoppers())
    gathering.leave(watch.files, watch.make_notes())
    if not gathering.tells:
        return Watched(status, watch.steps, None, tells=False)
    # after a failure the others may never come to their end
    left = gathering.collect() if status == 0 else gathering.collect(3.0)
    read = {
        rank: read_windows(files, notes, f"{target}, rank {rank}") for rank, (files, notes) in left.items()
    }
    for rank, trace in read.items():
        if trace is not None and not isinstance(trace.header.get("distributedInfo"), dict):
            # torch writes it only where the script has joined a process group
            trace.header["distributedInfo"] = {"rank": rank}
    traces = [trace for trace in read.values() if trace is not None]
    missing = tuple(rank for rank in gathering.ranks if read.get(rank) is None)
    gathering.close()
    for trace in traces:
        trace.ranks = tuple(traces)
    first = traces[0] if traces else None
    return Watched(status, watch.steps, first, stoppers=watch.stoppers(), missing=missing)


@dataclass(frozen=True)
class Virtual:
    """What came of a run without a GPU.

    Attributes:
        status: the script's own exit status. stalls: lines that would wait, the most frequent first.
        on_device: whether the script used the virtual GPU; else stalls were found by following its parameters.
        broke: why the virtual GPU could not run the script, which then ran again on the CPU; "" if it could.
        steps: the script's steps. stoppers: what would keep a step from being captured.
    """

    status: int
    stalls: list[Stall]
    on_device: bool
    broke: str = ""
    steps: int = 0
    stoppers: tuple[Stopper, ...] = ()


def run_virtually(
    target: str, arguments: Sequence[str], *, module: bool = False, device: bool = True
) -> Virtual:
    """Run a script as `run_watched` does, and list the lines at which a GPU would have to be waited for.

    It runs in a process of its own that has a virtual GPU under the name "cuda". What such a device cannot run (it
    takes torch 2.11, and is experimental there) is run again on the CPU, where whatever comes from a parameter counts
    as lying on the device.

    Args:
        device: False: without the virtual GPU.

    Raises:
        TraceError: there is no such script.
    """
    if not module and not Path(target).is_file():
        raise TraceError(f"there is no script {target}")
    kind = "module" if module else "script"
    with tempfile.TemporaryDirectory(prefix="hotloop-doctor-") as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, "-m", "hotloop.doctor.live.virtual_run", str(answer)]
        words = ["device" if device else "parameters", kind, target, *arguments]
        paths = [str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
        done = subprocess.run(
            [*command, *words], check=False, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        )
        if not answer.is_file():
            # the script ended its process by itself, or was killed
            return Virtual(done.returncode if done.returncode >= 0 else 128 - done.returncode, [], False)
        told = json.loads(answer.read_text())
    if told["broke"]:
        again = run_virtually(target, arguments, module=module, device=False)
        return replace(again, broke=told["broke"])
    return Virtual(
        told["status"],
        [Stall(**stall) for stall in told["stalls"]],
        told["device"],
        "",
        told["steps"],
        tuple(Stopper(**stopper) for stopper in told["stoppers"]),
    )


def run_script(
    target: str,
    arguments: Sequence[str],
    *,
    module: bool = False,
    passes: tuple[type[BaseException], ...] = (),
) -> int:
    """Run a script (or with `module` a module) as Python would; its exceptions are shown, but for those in `passes`.

    Returns:
        The script's exit status.

    Raises:
        TraceError: there is no such script.
    """
    with _as_script(target, arguments, module=module):
        return _run(target, module=module, passes=passes)


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


def _run(target: str, *, module: bool, passes: tuple[type[BaseException], ...] = ()) -> int:
    try:
        if module:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(target, run_name="__main__")
    except passes:
        raise
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BaseException as error:
        show_exception(error)
        return 1
    return 0


def show_exception(error: BaseException) -> None:
    """Show an exception of a script as Python itself would: without the frames of this module and of runpy."""
    frames = error.__traceback__
    while frames is not None and (
        frames.tb_frame.f_code.co_filename.startswith(_OURS)
        or frames.tb_frame.f_code.co_filename in (runpy.__file__, "<frozen runpy>")
    ):
        frames = frames.tb_next
    traceback.print_exception(type(error), error, frames)
