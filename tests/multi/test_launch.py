"""`hotloop launch` with real processes. Most scripts here import no torch, so that they start in no time."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.multi

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts `hotloop launch` on a script given as text; kills what is left of it at the end."""
    running: list[subprocess.Popen[str]] = []

    def run(script: str, *options: str, arguments: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        (tmp_path / "script.py").write_text(textwrap.dedent(script))
        clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS")}
        child = subprocess.Popen(
            [sys.executable, "-m", "hotloop", "launch", "--device", "cpu", *options, "script.py", *arguments],
            cwd=tmp_path,
            env=clean,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        running.append(child)
        return child

    yield run
    for child in running:
        child.kill()
        child.communicate()


def _finish(child: subprocess.Popen[str], timeout: float = 120) -> tuple[int, str, str]:
    out, err = child.communicate(timeout=timeout)
    return child.returncode, out, err


def _wait_for(condition: Callable[[], bool], what: str, timeout: float = 120) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout} s"
        time.sleep(0.02)


def _is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _pids(folder: Path) -> list[int]:
    return [int(word) for file in folder.glob("*.pids") for word in file.read_text().split()]


def _wait_for_ends(folder: Path) -> None:
    """Processes end a moment after they were killed; these would otherwise live for ten minutes."""
    _wait_for(lambda: not any(_is_alive(pid) for pid in _pids(folder)), "ranks and helpers end")


# Each rank starts a helper, notes both process ids, and then does what BODY says.
_WITH_HELPER = """
import os, pathlib, signal, subprocess, sys, time
rank = os.environ["RANK"]
got = []
def note(number, frame):
    got.append(number)
    pathlib.Path(f"{rank}.signals").write_text(" ".join(map(str, got)))
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
BODY
pathlib.Path(f"{rank}.part").write_text(f"{os.getpid()} {helper.pid}")
os.replace(f"{rank}.part", f"{rank}.pids")
"""


def test_the_script_finds_what_python_would_give_it(start: Start, tmp_path: Path) -> None:
    script = """
    import multiprocessing, os, sys

    class Local:
        pass

    def work(item):
        return type(item).__name__, type(item).__module__, os.environ["RANK"]

    if __name__ == "__main__":
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            print(*pool.map(work, [Local()])[0])
        print(sys.argv)
        print(sys.path[0], __file__)
        print("stdin", repr(sys.stdin.read()))
        print(*(os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "HOTLOOP_OVERRIDE")))
        # one write: lines of two processes go into one pipe
        sys.stderr.write(f"told by {os.environ['RANK']}\\n")
    """
    odd = ("-n", "5", "--", "--output", "$$x", "${local_rank}", "")
    code, out, err = _finish(start(script, "-n", "2", "--logs", "logs", arguments=odd))
    assert code == 0, err
    folder = str(tmp_path)
    wanted = [
        "Local __mp_main__ 0",
        str(["script.py", *odd]),
        f"{folder} {folder}/script.py",
        "stdin ''",
        "0 2 0 device=cpu",
    ]
    assert out.splitlines() == wanted
    assert err.splitlines()[0].startswith("hotloop launch: 2 processes on cpu, ")
    assert sorted(err.splitlines()[1:]) == ["[rank 1] told by 1", "told by 0"]
    assert (tmp_path / "logs/rank0.out").read_text() == out
    assert (tmp_path / "logs/rank1.out").read_text().splitlines()[-1] == "1 2 1 device=cpu"
    assert (tmp_path / "logs/rank1.err").read_text() == "told by 1\n"


def test_a_module_is_run_as_python_m_does(start: Start, tmp_path: Path) -> None:
    package = tmp_path / "project"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "part.py").write_text("answer = 42\n")
    (package / "__main__.py").write_text(
        "import sys\nfrom .part import answer\n"
        "print(answer, __name__, __package__, sys.argv[1:], sys.path[0])\n"
    )
    child = start("", "--output", "all", "-n", "1", "-m", "project", arguments=("--lr", "1"))
    code, out, err = _finish(child)
    assert code == 0, err
    # start() appends the script's name, which is the module's first argument here
    assert out == f"[rank 0] 42 __main__ project ['script.py', '--lr', '1'] {tmp_path}\n"


def test_the_first_failure_is_shown_alone_and_first(start: Start) -> None:
    script = """
    import sys, torch
    import torch.distributed as dist

    def culprit():
        raise KeyError("the cause")

    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        dist.barrier()
        culprit()
    dist.barrier()
    dist.all_reduce(torch.ones(3))  # waits for a rank that never comes
    dist.all_reduce(torch.ones(3))
    """
    code, out, err = _finish(start(script, "-n", "3"))
    assert code == 1
    assert out == ""
    head, *rest = err.splitlines()
    assert head.startswith("hotloop launch: 3 processes")
    assert rest[0] == "Traceback (most recent call last):"
    assert "shim.py" not in err
    assert rest[-2] == "KeyError: 'the cause'"
    told = r".* rank 1 of 3 failed first, with exit code 1 \(above\); then rank [02]: \S+, rank [02]: \S+"
    assert re.fullmatch(told, rest[-1])
    assert err.count("Traceback") == 1


def test_a_killed_rank_ends_the_others_and_gives_its_exit_code(start: Start, tmp_path: Path) -> None:
    body = """
if rank == "1":
    while not os.path.exists("0.pids"):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    script = _WITH_HELPER.replace("BODY", "") + body + "time.sleep(600)"
    code, _, err = _finish(start(script, "-n", "2"))
    assert code == 128 + signal.SIGKILL
    assert "rank 1 of 2 failed first, with signal SIGKILL and no traceback" in err
    assert len(_pids(tmp_path)) == 4
    _wait_for_ends(tmp_path)


def test_exit_codes_and_restarts(start: Start, tmp_path: Path) -> None:
    script = """
    import os, pathlib, sys, time
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    pathlib.Path(f"{attempt}.{os.environ['RANK']}").touch()
    if os.environ["RANK"] == "1":
        while not os.path.exists(f"{attempt}.0"):
            time.sleep(0.01)
        sys.exit(7 if attempt == "0" else "no more")
    time.sleep(600)
    """
    code, _, err = _finish(start(script, "-n", "2", "--restarts", "1"))
    assert code == 1
    lines = err.splitlines()[1:]
    assert lines[0].startswith("hotloop launch: rank 1 of 2 failed first, with exit code 7")
    assert lines[1] == "hotloop launch: starting again (1 of 1 restarts)"
    assert lines[2] == "no more"
    assert lines[3].startswith("hotloop launch: rank 1 of 2 failed first, with exit code 1 (above)")
    assert {"0.0", "0.1", "1.0", "1.1"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_is_passed_on_once_and_nothing_survives(
    number: signal.Signals, start: Start, tmp_path: Path
) -> None:
    body = f"signal.signal({int(number)}, note)"
    after = """
while not got:
    time.sleep(0.01)
time.sleep(0.5 + int(rank))  # saves
assert helper.poll() is None, "a helper of the rank, such as a loader worker, was signalled too"
print("saved", flush=True)
sys.exit(128 + got[0])
"""
    child = start(_WITH_HELPER.replace("BODY", body) + after, "-n", "2", "--output", "all")
    _wait_for(lambda: len(_pids(tmp_path)) == 4, "ranks start")
    child.send_signal(number)
    code, out, err = _finish(child)
    assert code == 128 + number
    assert sorted(out.splitlines()) == ["[rank 0] saved", "[rank 1] saved"]
    assert err.splitlines()[1:] == [f"hotloop launch: stopped by {number.name}; no process is left"]
    assert [(tmp_path / f"{rank}.signals").read_text() for rank in (0, 1)] == [str(int(number))] * 2
    _wait_for_ends(tmp_path)


def test_ctrl_c_twice_and_the_grace_time_end_the_stubborn(start: Start, tmp_path: Path) -> None:
    body = "signal.signal(signal.SIGINT, note); signal.signal(signal.SIGTERM, note)"
    script = _WITH_HELPER.replace("BODY", body) + "while True: time.sleep(0.1)"
    child = start(script, "-n", "2", "--grace", "600")
    _wait_for(lambda: len(_pids(tmp_path)) == 4, "ranks start")
    child.send_signal(signal.SIGINT)
    _wait_for(lambda: len(list(tmp_path.glob("*.signals"))) == 2, "signals arrive")
    assert all(_is_alive(pid) for pid in _pids(tmp_path))
    time.sleep(0.5)  # sooner, it counts as the same request
    child.send_signal(signal.SIGINT)
    assert _finish(child)[0] == 128 + signal.SIGINT
    _wait_for_ends(tmp_path)

    for file in tmp_path.glob("?.*"):
        file.unlink()
    child = start(script, "-n", "2", "--grace", "0.5")
    _wait_for(lambda: len(_pids(tmp_path)) == 4, "ranks start")
    child.send_signal(signal.SIGTERM)
    assert _finish(child)[0] == 128 + signal.SIGTERM
    _wait_for_ends(tmp_path)


def test_killing_the_launcher_takes_everything_with_it(start: Start, tmp_path: Path) -> None:
    child = start(_WITH_HELPER.replace("BODY", "") + "time.sleep(600)", "-n", "2")
    _wait_for(lambda: len(_pids(tmp_path)) == 4, "ranks start")
    child.kill()
    _wait_for_ends(tmp_path)
