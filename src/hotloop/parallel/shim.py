"""The shim around the user's script in each rank: runs it as `python` would and keeps its traceback.

Run as a file (`python shim.py FOLDER script|module TARGET ARGUMENT...`), with the standard library alone:
what the script sets before it imports torch (thread counts, visible devices) must still take effect.

On an uncaught exception the traceback goes, through the script's own `sys.excepthook`, to
`FOLDER/traceback.txt` instead of stderr, and `FOLDER/failure.json` says when, and whether the exception is
likely the echo of another rank's end. `hotloop.parallel.failures` reads both and shows the first one alone.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.machinery
import importlib.util
import io
import json
import os
import signal
import sys
import time
import traceback
from types import CodeType, ModuleType, TracebackType

__all__ = ["is_echo", "prepare_module", "prepare_script"]

_INTERRUPT_CODES = tuple(
    128 + number
    for number in (
        signal.SIGTERM,
        signal.SIGINT,
        signal.SIGHUP,
        signal.SIGQUIT,
        signal.SIGUSR1,
        signal.SIGUSR2,
    )
)
_ECHO_TEXTS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "remote process exited",
    "failed to recv",
    "Timed out waiting",
)


def prepare_script(path: str) -> tuple[CodeType, ModuleType]:
    """Compiled code of the script and the `__main__` module it is to run in, as `python path` sets it up."""
    full = os.path.abspath(path)
    with io.open_code(full) as file:
        code = compile(file.read(), full, "exec", dont_inherit=True)
    main = ModuleType("__main__")
    main.__file__ = full
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", full)
    main.__dict__["__cached__"] = None
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(full))
    return code, main


def prepare_module(name: str) -> tuple[CodeType, ModuleType]:
    """Compiled code of the module and the `__main__` module it is to run in, as `python -m name` sets it up.

    Raises:
        ImportError: there is no such module, or it is a package that cannot be run.
    """
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd()
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        name += ".__main__"
        spec = importlib.util.find_spec(name)
    get_code = getattr(spec.loader, "get_code", None) if spec else None
    code = get_code(name) if get_code else None
    if spec is None or code is None:
        raise ImportError(f"no code to run in module {name}")
    main = ModuleType("__main__")
    main.__file__ = spec.origin
    main.__loader__ = spec.loader
    main.__package__ = spec.parent
    main.__spec__ = spec
    main.__dict__["__cached__"] = spec.cached
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    sys.argv[0] = spec.origin or name
    return code, main


def is_echo(error: BaseException) -> bool:
    """Whether `error` tells of a lost connection or a time-out between ranks: some other rank failed before.

    Looks at the exceptions that it was raised from, too.
    """
    seen = 0
    cause: BaseException | None = error
    while cause is not None and seen < 16:
        if any(kind.__name__ == "DistError" for kind in type(cause).__mro__):
            return True
        if isinstance(cause, RuntimeError) and any(text in str(cause) for text in _ECHO_TEXTS):
            return True
        cause = cause.__cause__ or cause.__context__
        seen += 1
    return False


def _run(folder: str, kind: str, target: str) -> int:
    """Run the script to its end; returns the exit status."""
    # with a crash in native code the Python stack is all there is to show
    faulthandler.enable(_open(os.path.join(folder, "traceback.txt")))
    try:
        code, main = prepare_module(target) if kind == "module" else prepare_script(target)
        sys.modules["__main__"] = main
        exec(code, main.__dict__)
    except SystemExit as stop:
        if stop.code is None:
            return 0
        if isinstance(stop.code, int):
            if stop.code:
                _keep(folder, stop)
            return stop.code
        _keep(folder, stop)
        return 1
    except BaseException as error:
        _keep(folder, error.with_traceback(_without_shim(error.__traceback__)))
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _keep(folder: str, error: BaseException) -> None:
    """Note the failure and show it with stderr going to traceback.txt; what follows goes to late.txt."""
    try:
        _note_failure(folder, error)
        sys.stdout.flush()
        sys.stderr.flush()
        path = os.path.join(folder, "traceback.txt")
        _redirect_stderr(path)
        if not isinstance(error, SystemExit):
            sys.excepthook(type(error), error, error.__traceback__)
        elif not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
        sys.stderr.flush()
        if os.path.getsize(path) == 0 and not isinstance(error, SystemExit):  # the hook wrote elsewhere
            with open(path, "w") as file:
                traceback.print_exception(error, file=file)
        _redirect_stderr(os.path.join(folder, "late.txt"))
    except Exception:  # a full disk, a broken hook: better said twice than not at all
        traceback.print_exception(error, file=sys.__stderr__)


def _note_failure(folder: str, error: BaseException) -> None:
    note = {
        "time_ns": time.time_ns(),
        "kind": type(error).__name__,
        "echo": is_echo(error),
        "interrupt": _is_interrupt(error),
    }
    path = os.path.join(folder, "failure.json")
    with open(path + ".part", "w") as file:
        json.dump(note, file)
    os.replace(path + ".part", path)
    marker = os.path.join(os.path.dirname(folder), "failed")
    if not note["interrupt"]:
        with contextlib.suppress(FileExistsError), open(marker, "x") as file:
            file.write(os.environ.get("RANK", ""))


def _is_interrupt(error: BaseException) -> bool:
    """Whether the script ends as one does that was asked to by a signal."""
    if isinstance(error, SystemExit):
        return error.code in _INTERRUPT_CODES
    return isinstance(error, KeyboardInterrupt)


def _open(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def _redirect_stderr(path: str) -> None:
    descriptor = _open(path)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _without_shim(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the script's first frame on; whole if the script was never entered."""
    rest = trace
    while rest is not None and rest.tb_frame.f_code.co_filename == __file__:
        rest = rest.tb_next
    return rest or trace


if __name__ == "__main__":
    _folder, _kind, _target = sys.argv[1:4]
    del sys.argv[:3]
    # what a record of the command line may read: the user's command, without the shim
    sys.orig_argv[:] = [sys.executable, *(["-m"] if _kind == "module" else []), *sys.argv]
    sys.exit(_run(_folder, _kind, _target))
