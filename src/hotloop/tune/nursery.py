"""A process that has imported what trials import, and forks one for each: seconds saved every time.

It reads one JSON object a line from its standard input, `{"fork": specification}`, and tells on its standard output
`{"ready": …}`, `{"forked": number, "pid": …}` and `{"ended": number, "status": …}`. It uses no thread and no device,
so that a fork is whole. When its input ends it ends, and so do all trials.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import sys
from typing import Any

__all__ = ["main"]

_LOOK_EVERY_S = 0.02


def main() -> None:
    """Serve until standard input ends. `argv[1]` is a JSON list of modules to import first."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    names = json.loads(sys.argv[1])
    for name in names:
        try:
            importlib.import_module(name)
        except Exception:
            # the script will say it better
            continue
        if "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
            # a forked process could not use the device: begin again without what made a context here
            rest = json.dumps([other for other in names if other != name])
            os.execv(sys.executable, [sys.executable, "-m", "hotloop.tune.nursery", rest])
    import hotloop.tune.probe  # noqa: F401 (forked with it)

    _tell({"ready": True})
    alive: dict[int, int] = {}
    pending = b""
    while True:
        for pid, number in list(alive.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del alive[pid]
                _tell({"ended": number, "status": os.waitstatus_to_exitcode(status)})
        if not select.select([0], [], [], _LOOK_EVERY_S)[0]:
            continue
        data = os.read(0, 1 << 16)
        if not data:
            for pid in alive:
                _kill(pid)
            return
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            specification = json.loads(line)["fork"]
            pid = os.fork()
            if pid == 0:
                _begin(specification)
            alive[pid] = specification["number"]
            _tell({"forked": specification["number"], "pid": pid})


def _begin(specification: dict[str, Any]) -> None:
    """Become a trial: own session, output to a file, no input."""
    status = 1
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        log = os.open(specification["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        from hotloop.tune.probe import run_trial

        status = run_trial(specification)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _kill(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        # the fork is so young that it has no session of its own yet, or it is gone
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return


def _tell(message: dict[str, Any]) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main()
