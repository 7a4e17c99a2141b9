"""The keeper of one rank: passes signals on to it alone, reaps it and all it started, and notes how it ended.

torch's elastic agent signals a rank's whole process group. That would also hit the rank's loader workers,
whose sudden end would break the very checkpoint that the signal asks for. So the agent starts this small
process instead; it runs the rank in a process group of its own, out of reach of the agent's signals.

Run as a file (`python keeper.py FOLDER`), with the standard library alone and without importing hotloop, so
that a rank costs one bare interpreter more and nothing is imported before the user's script.

The folder holds `job.json` (written by `hotloop.parallel.launch`); the keeper adds, in `attempt<K>/rank<R>/`,
`keeper.pid` and `end.json`, and in `attempt<K>/` the file `failed` once any rank has failed, or `asked`
once one has ended because SIGUSR1 or 2 asked it to.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import sys
import time
from types import FrameType
from typing import Any

__all__ = ["FAILURE_GRACE_S", "Keeper"]

# After another rank has failed, the others have this long to end by themselves; most wait for the dead one.
FAILURE_GRACE_S = 5.0
# A signal to every process of a job (Slurm, docker) arrives here directly and again through the launcher.
_SAME_REQUEST_S = {signal.SIGINT: 0.2}
_SAME_REQUEST_DEFAULT_S = 1.0
_LOOK_AT_LAUNCHER_EVERY_S = 1.0

_STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)


class Keeper:
    """Starts the rank that the environment names, watches it to its end and says how it ended.

    Args:
        folder: the launch's folder, with `job.json`.
        job: its content: launcher (process id), script or module (`target`, `module`), arguments, grace_s,
            output ("main" or "all"), logs (folder or None).
    """

    def __init__(self, folder: str, job: dict[str, Any]) -> None:
        self.folder = folder
        self.job = job
        self.rank = int(os.environ["RANK"])
        self.attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self.attempt_folder = os.path.join(folder, f"attempt{self.attempt}")
        self.own_folder = os.path.join(self.attempt_folder, f"rank{self.rank}")
        os.makedirs(self.own_folder, exist_ok=True)
        for name in ("end.json", "failure.json", "traceback.txt", "late.txt"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self.own_folder, name))
        self.grace_s: float = job["grace_s"]
        self.pid = 0
        self.stopped_by = 0
        self.asked_by = 0
        self.stopped_at = 0.0
        self.deadline: float | None = None
        self.killed = False
        self.ended = False
        self.streams = _open_streams(self)
        self.selector = selectors.DefaultSelector()

    def run(self) -> int:
        """Run the rank to its end; returns the exit status for this process (128 + n for signal n)."""
        wake, waker = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(waker, False)
        handled = (*_STOPPING, *_PASSED_ON, signal.SIGCHLD, signal.SIGCONT)
        # blocked until the handlers know the rank's process id, so that none is lost in between
        signal.pthread_sigmask(signal.SIG_BLOCK, handled)
        # before there is a rank: once that lives, the launcher can pass signals on to it
        _write(os.path.join(self.own_folder, "keeper.pid"), str(os.getpid()))
        self.pid = os.fork()
        if self.pid == 0:
            self._become_rank(handled)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        for number in _STOPPING:
            signal.signal(number, self._on_stop)
        for number in _PASSED_ON:
            signal.signal(number, self._on_other)
        for number in (signal.SIGCHLD, signal.SIGCONT):
            signal.signal(number, lambda number, frame: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, handled)
        self.selector.register(wake, selectors.EVENT_READ)
        for stream in self.streams:
            os.close(stream.rank_end)
            self.selector.register(stream.keeper_end, selectors.EVENT_READ, stream)
        status = self._watch(wake)
        ended_ns = time.time_ns()
        self.ended = True
        killed = self.killed
        code = os.waitstatus_to_exitcode(status)
        if code != 0 or self.stopped_by:
            self._kill_group()
        self._close_streams()
        if self.asked_by and code in (-self.asked_by, 128 + self.asked_by):
            self.stopped_by = self.asked_by  # it took SIGUSR1 or 2 as a request to end, as under Slurm
            self._mark("asked")
        if code != 0 and not self.stopped_by:
            self._mark("failed")
        record = {
            "rank": self.rank,
            "pid": self.pid,
            "code": code,
            "time_ns": ended_ns,
            "stopped_by": self.stopped_by,
            "killed": killed,
        }
        _write(os.path.join(self.own_folder, "end.json"), json.dumps(record))
        return code if code >= 0 else 128 - code

    def _become_rank(self, handled: tuple[signal.Signals, ...]) -> None:
        """In the child: take the rank's place and never return."""
        keeper = os.getppid()
        try:
            os.setpgid(0, 0)
            _die_with_parent(signal.SIGKILL)
            if os.getppid() != keeper:
                os._exit(1)
            # a launcher in a script's background has SIGINT ignored, which would be inherited
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, handled)
            if self.rank != 0:
                _put(os.open(os.devnull, os.O_RDONLY), 0)
            if self.rank != 0 and self.job["output"] == "main" and not self.job["logs"]:
                _put(os.open(os.devnull, os.O_WRONLY), 1)
            for stream in self.streams:
                os.dup2(stream.rank_end, stream.target)
                if stream.target == 1:
                    os.environ["PYTHONUNBUFFERED"] = "1"
            shim = os.path.join(os.path.dirname(os.path.abspath(__file__)), "shim.py")
            kind = "module" if self.job["module"] else "script"
            command = [
                sys.executable,
                shim,
                self.own_folder,
                kind,
                self.job["target"],
                *self.job["arguments"],
            ]
            os.execv(sys.executable, command)
        except BaseException as error:
            os.write(2, f"hotloop launch: rank {self.rank} cannot start: {error}\n".encode())
        os._exit(127)

    def _watch(self, wake: int) -> int:
        """Forward output and keep deadlines until the rank has ended; returns its wait status."""
        exiting_since: float | None = None
        while True:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                return status
            now = time.monotonic()
            if os.getppid() != self.job["launcher"]:
                self._kill_group()
                status = os.waitpid(self.pid, 0)[1]
                _remove(self.folder)
                return status
            if self.deadline is not None and now >= self.deadline:
                self._kill_group()
            if exiting_since is None and self._failing():
                exiting_since = now
            # a rank whose script has failed may hang in its exit handlers, and with it the whole run
            if exiting_since is not None and now - exiting_since > self.grace_s:
                self._kill_group()
            wait_s = _LOOK_AT_LAUNCHER_EVERY_S
            if self.deadline is not None:
                wait_s = min(wait_s, max(0.0, self.deadline - now))
            for key, _ in self.selector.select(wait_s):
                if key.fd == wake:
                    os.read(wake, 4096)
                elif not key.data.forward():
                    self.selector.unregister(key.fd)

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.ended:
            return
        if not self.stopped_by:
            self.stopped_by, self.stopped_at = number, now
            grace_s = min(self.grace_s, FAILURE_GRACE_S) if self.other_failed() else self.grace_s
            self.deadline = now + grace_s
            # when one rank has ended as SIGUSR1 asked it to, the agent's SIGTERM to the others says nothing new
            asked = self.asked_by and os.path.exists(os.path.join(self.attempt_folder, "asked"))
            # a rank whose script has failed is on its way out; others may fail of that, and be seen to end, before it
            if not asked and not self._failing():
                self._signal(number)
        elif now - self.stopped_at > _SAME_REQUEST_S.get(
            signal.Signals(self.stopped_by), _SAME_REQUEST_DEFAULT_S
        ):
            self._kill_group()

    def _on_other(self, number: int, frame: FrameType | None) -> None:
        if not self.ended:
            self.asked_by = number
            self._signal(number)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def _kill_group(self) -> None:
        """End the rank and whatever it started that stayed in its process group."""
        self.killed = True
        self.deadline = None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def _failing(self) -> bool:
        """Whether an exception has left the rank's script."""
        return os.path.exists(os.path.join(self.own_folder, "failure.json"))

    def other_failed(self) -> bool:
        """Whether another rank of this attempt has failed already; from then on stderr is held back."""
        try:
            with open(os.path.join(self.attempt_folder, "failed")) as file:
                return file.read() != str(self.rank)
        except FileNotFoundError:
            return False

    def _mark(self, how: str) -> None:
        """Tell the other keepers how this rank has ended, unless another one was first."""
        path = os.path.join(self.attempt_folder, how)
        with contextlib.suppress(FileExistsError), open(path, "x") as file:
            file.write(str(self.rank))

    def _close_streams(self) -> None:
        for stream in self.streams:
            os.set_blocking(stream.keeper_end, False)
            with contextlib.suppress(BlockingIOError):
                while stream.forward():
                    pass
            stream.finish(self.own_folder)


class _Stream:
    """One of the rank's two output streams on its way to the terminal, a log file or both."""

    def __init__(
        self, keeper: Keeper, target: int, prefix: bytes | None, shown: bool, log: tuple[str, str] | None
    ) -> None:
        self.keeper = keeper
        self.target = target
        self.prefix = prefix
        self.shown = shown
        self.log = open(*log, buffering=0) if log else None  # noqa: SIM115, closed by finish
        self.keeper_end, self.rank_end = os.pipe()
        self.rest = b""

    def forward(self) -> bool:
        """Pass on what is there; False at the end of the stream."""
        chunk = os.read(self.keeper_end, 65536)
        if not chunk:
            return False
        if self.log:
            self.log.write(chunk)
        if self.shown and not (self.target == 2 and self.keeper.other_failed()):
            self._show(chunk)
        return True

    def finish(self, own_folder: str) -> None:
        """Show an unfinished last line; the log also gets what the shim kept from the terminal."""
        if self.rest and self.shown and not (self.target == 2 and self.keeper.other_failed()):
            self._show(b"\n")
        if self.log and self.target == 2:
            for name in ("traceback.txt", "late.txt"):
                with (
                    contextlib.suppress(FileNotFoundError),
                    open(os.path.join(own_folder, name), "rb") as file,
                ):
                    self.log.write(file.read())
        if self.log:
            self.log.close()

    def _show(self, chunk: bytes) -> None:
        if self.prefix is not None:
            *lines, self.rest = (self.rest + chunk).split(b"\n")
            # of a progress bar that redraws its line, the last drawing stands for all
            shown = [line.rstrip(b"\r").rsplit(b"\r", 1)[-1] for line in lines]
            chunk = b"".join(self.prefix + line + b"\n" for line in shown)
        try:
            while chunk:
                chunk = chunk[os.write(self.target, chunk) :]
        except OSError:
            self.shown = False


def _open_streams(keeper: Keeper) -> list[_Stream]:
    """Pipes for those streams that cannot simply be inherited; rank 0 keeps its terminal where it can."""
    job, rank = keeper.job, keeper.rank
    everything = job["output"] == "all"
    # rank 0 keeps a terminal, for its progress line; otherwise what it says of another's end is held back, too
    held = int(os.environ.get("WORLD_SIZE", "1")) > 1 and not os.isatty(2)
    streams = []
    for target, name in ((1, "out"), (2, "err")):
        shown = everything or rank == 0 or target == 2
        prefix = None if rank == 0 and not everything else f"[rank {rank}] ".encode()
        mode = "ab" if keeper.attempt else "wb"
        log = (os.path.join(job["logs"], f"rank{rank}.{name}"), mode) if job["logs"] else None
        if log or (shown and (prefix or (target == 2 and held))):
            streams.append(_Stream(keeper, target, prefix, shown, log))
    return streams


def _die_with_parent(number: int) -> None:
    """Have the kernel send this process `number` when its parent ends (Linux; the parent is polled too)."""
    if sys.platform == "linux":
        import ctypes

        set_death_signal = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>
        ctypes.CDLL(None, use_errno=True).prctl(set_death_signal, int(number), 0, 0, 0)


def _put(descriptor: int, target: int) -> None:
    os.dup2(descriptor, target)
    os.close(descriptor)


def _write(path: str, text: str) -> None:
    """Write by rename, so that a reader finds the whole text or no file."""
    part = f"{path}.{os.getpid()}.part"
    with open(part, "w") as file:
        file.write(text)
    os.replace(part, path)


def _remove(folder: str) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


def _main() -> int:
    folder = sys.argv[1]
    with open(os.path.join(folder, "job.json")) as file:
        job = json.load(file)
    _die_with_parent(signal.SIGCONT)  # only wakes the loop, which sees for itself that its parent has changed
    if os.getppid() != job["launcher"]:
        return 1
    return Keeper(folder, job).run()


if __name__ == "__main__":
    sys.exit(_main())
