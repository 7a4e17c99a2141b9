"""The keeper of one rank, alone: what reaches its rank, and when."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from hotloop.parallel import keeper

# The launcher passes a signal on in the very moment in which the rank's process comes to be.
PROGRAM = """
import json, os, runpy, signal, sys
file, folder = sys.argv[1:]
fork = os.fork

def fork_and_tell():
    pid = fork()
    if pid:
        with open(folder + "/attempt0/rank0/keeper.pid") as noted:
            os.kill(int(noted.read()), signal.SIGUSR1)
    return pid

os.fork = fork_and_tell
with open(folder + "/job.json") as job:
    sys.exit(runpy.run_path(file)["Keeper"](folder, json.load(job)).run())
"""


EXITING = """
import atexit, os, time

def leave():
    while not os.path.exists("go"):
        time.sleep(0.01)

atexit.register(leave)
raise KeyError("the cause")
"""


def prepare(folder: Path, script: str) -> dict[str, str]:
    """Everything that a keeper of the only rank finds in `folder`; returns its environment."""
    (folder / "script.py").write_text(script)
    job = {"launcher": os.getpid(), "target": str(folder / "script.py"), "module": False, "arguments": []}
    job |= {"grace_s": 60, "output": "main", "logs": None}
    (folder / "job.json").write_text(json.dumps(job))
    return {**os.environ, "RANK": "0", "WORLD_SIZE": "1"}


def end_of(folder: Path) -> tuple[int, int]:
    """How the rank ended, and by which signal it was asked to."""
    end = json.loads((folder / "attempt0" / "rank0" / "end.json").read_text())
    return end["code"], end["stopped_by"]


def test_a_signal_reaches_a_rank_as_soon_as_there_is_one(tmp_path: Path) -> None:
    environment = prepare(tmp_path, "import time\ntime.sleep(600)\n")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, keeper.__file__, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 128 + signal.SIGUSR1, done.stderr
    assert end_of(tmp_path) == (-signal.SIGUSR1, signal.SIGUSR1)


def test_a_rank_that_fails_is_left_to_its_end_when_the_others_fail_of_it(tmp_path: Path) -> None:
    """They may be seen to end first, and the agent then ends all."""
    running = subprocess.Popen(
        [sys.executable, keeper.__file__, str(tmp_path)], env=prepare(tmp_path, EXITING), cwd=tmp_path
    )
    try:
        failed = tmp_path / "attempt0" / "rank0" / "failure.json"
        while running.poll() is None and not failed.exists():
            time.sleep(0.01)
        running.terminate()
        time.sleep(1.0)  # more than it takes to pass a signal on
        (tmp_path / "go").touch()
        assert running.wait(240) == 1
    finally:
        running.kill()
        running.wait()
    assert end_of(tmp_path) == (1, signal.SIGTERM)
