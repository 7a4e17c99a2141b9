"""Trials from the tuner's side: started, spoken to, contained. Whatever one does, the tuner goes on."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import json
import os
import select
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hotloop.errors import HotloopError
from hotloop.tune.link import Link, LinkClosedError
from hotloop.tune.rung import Rung, join, write_override

__all__ = ["Nursery", "Script", "Trial", "TrialError", "TrialOverError"]

_LAST_LINES = 6
_START_LIMIT_S = 120.0
_MEMORY_WORDS = ("out of memory", "OutOfMemoryError", "MemoryError", "Cannot allocate memory", "bad_alloc")


class TrialError(Exception):
    """A trial came to nothing.

    Attributes:
        kind: "crash", "memory", "hang" or, of a script that ends too soon to be measured, "length".
        lines: the last that it wrote.
    """

    def __init__(self, kind: str, text: str, lines: list[str]) -> None:
        super().__init__(text)
        self.kind = kind
        self.lines = lines


class TrialOverError(Exception):
    """The script came to its own end; the message that told so is `message`."""

    def __init__(self, message: dict[str, Any]) -> None:
        super().__init__("the script has ended")
        self.message = message


class Script:
    """What is tuned: a script or module with its arguments."""

    def __init__(self, target: str, arguments: Sequence[str] = (), *, module: bool = False) -> None:
        self.target, self.arguments, self.module = target, list(arguments), module
        self.path = self._find()

    def _find(self) -> Path:
        if not self.module:
            path = Path(self.target)
            if not path.is_file():
                raise HotloopError(f"there is no script {self.target}")
            return path
        sys.path.insert(0, os.getcwd())
        try:
            found = importlib.util.find_spec(self.target)
        except ModuleNotFoundError as error:
            raise HotloopError(f"there is no module {self.target}: {error}") from None
        finally:
            sys.path.pop(0)
        if found is None or found.origin is None:
            raise HotloopError(f"there is no module {self.target}")
        return Path(found.origin)

    def imports(self) -> list[str]:
        """Installed packages that it imports at its top level: loaded once for all trials."""
        try:
            tree = ast.parse(self.path.read_text())
        except (OSError, SyntaxError, UnicodeDecodeError):
            return []
        names = []
        for node in tree.body:
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.append(node.module)
        return [name for name in names if _is_installed(name)]


def _is_installed(name: str) -> bool:
    """Whether a module lies among installed packages, not beside the script, where two may have one name."""
    try:
        found = importlib.util.find_spec(name.partition(".")[0])
    except (ImportError, ValueError):
        return False
    places = {sysconfig.get_paths()[kind] for kind in ("purelib", "platlib", "stdlib")}
    return found is not None and any(str(found.origin or "").startswith(place) for place in places)


class Nursery:
    """Where trials come from; a context manager that leaves no process behind.

    Attributes:
        started: trials so far. folder: where their logs are; deleted at the end.
    """

    def __init__(self, script: Script) -> None:
        self.script = script
        self.started = 0
        self._temporary = tempfile.TemporaryDirectory(prefix="hotloop-tune-")
        self.folder = Path(self._temporary.name)
        self._process: subprocess.Popen[bytes] | None = None
        self._told = b""
        self._pids: dict[int, int] = {}
        self._ended: dict[int, int] = {}
        self._live: dict[int, Trial] = {}

    def __enter__(self) -> Nursery:
        modules = ["torch", "torch._dynamo", "hotloop", *self.script.imports()]
        environment = {name: value for name, value in os.environ.items() if name != "HOTLOOP_OVERRIDE"}
        command = [sys.executable, "-m", "hotloop.tune.nursery", json.dumps(modules)]
        with (self.folder / "nursery.log").open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                # a Ctrl-C is for the tuner alone
                start_new_session=True,
            )
        deadline = time.monotonic() + _START_LIMIT_S
        while not self._hear(max(deadline - time.monotonic(), 0.0)):
            if self._process.poll() is not None or time.monotonic() > deadline:
                said = (self.folder / "nursery.log").read_text(errors="replace")[-2000:]
                self.__exit__()
                raise HotloopError(f"no trial can be started: {said}")
        return self

    def __exit__(self, *exception: object) -> None:
        for trial in list(self._live.values()):
            trial.kill()
        if self._process is not None:
            assert self._process.stdin is not None
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            try:
                self._process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            if self._process.stdout is not None:
                self._process.stdout.close()
        self._temporary.cleanup()

    def start(self, rungs: Sequence[Rung], mode: str, *, script: Script | None = None, **more: Any) -> Trial:
        """A trial with the settings of `rungs`, of another script if given; `mode` and `more` are for the probe."""
        script = script or self.script
        self.started += 1
        number = self.started
        settings, environment, setups = join(list(rungs))
        settings |= {"record": False}
        if more.get("seed") is not None:
            settings["seed"] = more["seed"]
        path = self.folder / f"{number}.sock"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(path))
        listener.listen(1)
        specification = {
            "number": number,
            "target": script.target,
            "arguments": script.arguments,
            "module": script.module,
            "cwd": os.getcwd(),
            "socket": str(path),
            "log": str(self.folder / f"{number}.log"),
            "folder": str(self.folder),
            "mode": mode,
            "environment": environment
            | {"HOTLOOP_OVERRIDE": write_override(settings), "HOTLOOP_PROGRESS": "0"},
            "setups": setups,
            **more,
        }
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"fork": specification}).encode() + b"\n")
        self._process.stdin.flush()
        trial = Trial(self, number, listener, Path(specification["log"]))
        self._live[number] = trial
        return trial

    def _hear(self, limit_s: float) -> list[dict[str, Any]]:
        """What the nursery said within `limit_s`."""
        assert self._process is not None
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], limit_s)[0]:
            return []
        data = os.read(self._process.stdout.fileno(), 1 << 16)
        if not data:
            raise HotloopError("the process that starts trials is gone")
        *lines, self._told = (self._told + data).split(b"\n")
        heard = [json.loads(line) for line in lines]
        for message in heard:
            if "forked" in message:
                self._pids[message["forked"]] = message["pid"]
            if "ended" in message:
                self._ended[message["ended"]] = message["status"]
        return heard

    def status_of(self, number: int, limit_s: float) -> int | None:
        """Exit status of a trial, negative for a signal; None if it has not ended within `limit_s`."""
        deadline = time.monotonic() + limit_s
        while number not in self._ended:
            left = deadline - time.monotonic()
            if left < 0:
                return None
            self._hear(left)
        return self._ended[number]

    def pid_of(self, number: int) -> int | None:
        """Process of a trial."""
        deadline = time.monotonic() + 10
        while number not in self._pids and time.monotonic() < deadline:
            self._hear(0.5)
        return self._pids.get(number)

    def forget(self, number: int) -> None:
        """A trial has been brought to its end."""
        self._live.pop(number, None)


class Trial:
    """One process that runs the script under the probe."""

    def __init__(self, nursery: Nursery, number: int, listener: socket.socket, log: Path) -> None:
        self._nursery = nursery
        self.number = number
        self._listener = listener
        self._log = log
        self._link: Link | None = None
        self.over = False

    def ask(self, message: dict[str, Any]) -> None:
        """Tell the probe what to do next.

        Raises:
            TrialError: it is gone.
        """
        if self._link is None:
            self._accept(time.monotonic() + _START_LIMIT_S)
        assert self._link is not None
        try:
            self._link.send(message)
        except LinkClosedError:
            raise self._failure() from None

    def hear(self, event: str, limit_s: float) -> dict[str, Any]:
        """Wait for a message of that kind.

        Raises:
            TrialOverError: the script ended instead.
            TrialError: the trial crashed, or was silent for `limit_s` and has been killed.
        """
        deadline = time.monotonic() + limit_s
        if self._link is None:
            self._accept(deadline)
        assert self._link is not None
        while True:
            try:
                message = self._link.receive(max(deadline - time.monotonic(), 0.01))
            except LinkClosedError:
                raise self._failure() from None
            if message is None:
                lines = self.last_lines()
                self.kill()
                raise TrialError("hang", f"silent for {limit_s:.0f} s, and killed", lines)
            if message["event"] == "error":
                raise self._failure(message["text"])
            if message["event"] == event:
                return message
            if message["event"] == "end":
                self.kill()
                raise TrialOverError(message)

    def _accept(self, deadline: float) -> None:
        while True:
            self._listener.settimeout(0.1)
            try:
                self._link = Link(self._listener.accept()[0])
                self._listener.close()
                return
            except TimeoutError:
                if self._nursery.status_of(self.number, 0.0) is not None:
                    raise self._failure() from None
                if time.monotonic() > deadline:
                    self.kill()
                    raise TrialError("hang", "did not start in time, and was killed", []) from None

    def _failure(self, text: str = "") -> TrialError:
        status = self._nursery.status_of(self.number, 5.0)
        lines = self.last_lines()
        self.kill()
        said = "\n".join(lines) + text
        if any(word in said for word in _MEMORY_WORDS):
            return TrialError("memory", "ran out of memory", lines)
        if status == -signal.SIGKILL:
            return TrialError("memory", "was killed by the system, as it does when memory runs out", lines)
        if status is not None and status < 0:
            return TrialError("crash", f"died by {signal.Signals(-status).name}", lines)
        last = lines[-1] if lines else f"exit status {status}, without a word"
        return TrialError("crash", text or f"ended with an error: {last}", lines)

    def last_lines(self) -> list[str]:
        """The last lines that the trial wrote."""
        try:
            text = self._log.read_text(errors="replace")[-8000:]
        except OSError:
            return []
        lines = [line.rstrip() for line in text.splitlines() if line.strip()]
        return [line[:200] for line in lines[-_LAST_LINES:]]

    def kill(self) -> None:
        """End the process and all that it started."""
        if self.over:
            return
        self.over = True
        pid = self._nursery.pid_of(self.number)
        if pid is not None:
            ended = self._nursery.status_of(self.number, 0.0) is not None
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            if not ended:
                # it may be so young that it leads no group yet
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(HotloopError):
                self._nursery.status_of(self.number, 10.0)
        if self._link is not None:
            self._link.close()
        self._listener.close()
        self._nursery.forget(self.number)
