"""Tests of several processes: `run_ranks` starts them, collects what each returned, and always reaps them."""

from __future__ import annotations

import contextlib
import inspect
import os
import pickle
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

# Runs in each rank: calls the test's function and leaves its value where the parent looks for it.
_SHELL = """
import ctypes, faulthandler, inspect, os, pickle, signal, sys
faulthandler.enable()
parent = int(os.environ.pop("RUN_RANKS_PARENT"))
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
name, script, answer = sys.argv[1:4]
sys.argv = [script]
import torch
torch.set_num_threads(1)
import runpy
namespace = runpy.run_path(script, run_name="ranks")
function = namespace[name]
arguments = (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
value = function(*arguments[: len(inspect.signature(function).parameters)])
with open(answer + ".part", "wb") as file:
    pickle.dump(value, file)
os.replace(answer + ".part", answer)
"""


class RankError(AssertionError):
    """A rank failed or the time ran out.

    Attributes: `rank` (the first that failed, -1 for a timeout), `returncode`, `stderr` and `stdout` (the
    texts of every rank, in rank order).
    """

    def __init__(
        self, message: str, rank: int, returncode: int | None, stdout: list[str], stderr: list[str]
    ) -> None:
        super().__init__(message)
        self.rank, self.returncode, self.stdout, self.stderr = rank, returncode, stdout, stderr


RunRanks = Callable[..., list[Any]]


@pytest.fixture
def run_ranks(tmp_path: Path) -> RunRanks:
    """`run_ranks(n, script, *, timeout=240, env=None, name="main") -> list`: what each of n ranks returned.

    `script` is source text that defines the function `name`, or a module-level function of the test file
    whose body imports all that it needs (its source is sent, so it sees nothing else of the file). The
    function takes nothing, or (rank), or (rank, world). It returns anything that pickles; tensors are fine.
    RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and OMP_NUM_THREADS=1 are set;
    torch.distributed is not started (call `find_processes("cpu")` or `init_process_group("gloo")`). `env` is
    added to every rank's environment; a value that is a list or tuple gives each rank its own item; None
    removes the variable.

    Raises `AssertionError` (with `.rank`, `.returncode`, `.stdout`, `.stderr`) with the first failing rank's
    stderr, or with every rank's stack when the time is up.
    """
    calls = 0

    def run(
        n: int,
        script: str | Callable[..., Any],
        *,
        timeout: float = 240,
        env: Mapping[str, Any] | None = None,
        name: str = "main",
    ) -> list[Any]:
        nonlocal calls
        if callable(script):
            name = script.__name__
            script = "from __future__ import annotations\n" + textwrap.dedent(inspect.getsource(script))
        for attempt in (1, 2, 3):
            calls += 1
            folder = tmp_path / f"ranks{calls}"
            folder.mkdir()
            (folder / "script.py").write_text(textwrap.dedent(script))
            try:
                return _run(n, folder, name, timeout, env or {})
            except RankError as failure:
                # another program may take the free port between finding it and listening on it
                if attempt == 3 or not any("EADDRINUSE" in text for text in failure.stderr):
                    raise
        raise AssertionError("unreachable")

    return run


def _run(n: int, folder: Path, name: str, timeout: float, env: Mapping[str, Any]) -> list[Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(n):
            variables = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(n),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(n),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "RUN_RANKS_PARENT": str(os.getpid()),
            }
            for key, value in env.items():
                chosen = value[rank] if isinstance(value, list | tuple) else value
                if chosen is None:
                    variables.pop(key, None)
                else:
                    variables[key] = str(chosen)
            with open(folder / f"{rank}.out", "wb") as out, open(folder / f"{rank}.err", "wb") as err:
                children.append(
                    subprocess.Popen(
                        [
                            sys.executable,
                            "-c",
                            _SHELL,
                            name,
                            str(folder / "script.py"),
                            str(folder / f"{rank}.answer"),
                        ],
                        env=variables,
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=err,
                        start_new_session=True,
                    )
                )
        failed = _wait(children, time.monotonic() + timeout)
    finally:
        for child in children:
            _kill_session(child)
    if failed is not None:
        stdout = [(folder / f"{rank}.out").read_text(errors="replace") for rank in range(n)]
        stderr = [(folder / f"{rank}.err").read_text(errors="replace") for rank in range(n)]
        if failed < 0:
            stacks = "\n".join(f"--- rank {rank}\n{text}" for rank, text in enumerate(stderr))
            raise RankError(f"{n} ranks not done after {timeout} s\n{stacks}", -1, None, stdout, stderr)
        code = children[failed].returncode
        raise RankError(
            f"rank {failed} of {n} ended with {code}:\n{stderr[failed]}", failed, code, stdout, stderr
        )
    return [pickle.loads((folder / f"{rank}.answer").read_bytes()) for rank in range(n)]


def _wait(children: list[subprocess.Popen[bytes]], deadline: float) -> int | None:
    """None once all ended well, the number of the first that failed, or -1 when the time is up."""
    while True:
        codes = [child.poll() for child in children]
        bad = [rank for rank, code in enumerate(codes) if code]
        if bad:
            # of two seen dead at once, one whose peer vanished is the consequence; a killed one is the cause
            return min(bad, key=lambda rank: ((codes[rank] or 0) > 0, rank))
        if all(code == 0 for code in codes):
            return None
        if time.monotonic() > deadline:
            for child in children:
                if child.poll() is None:
                    child.send_signal(signal.SIGABRT)  # faulthandler writes every thread's stack
            time.sleep(0.5)
            return -1
        time.sleep(0.02)


def _kill_session(child: subprocess.Popen[bytes]) -> None:
    """End the rank and everything it started, such as loader workers; it leads a session of its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
