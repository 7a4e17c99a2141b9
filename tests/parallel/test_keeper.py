"""The keeper of one rank, alone: what reaches its rank, and when."""

import json
import os
import signal
import subprocess
import sys
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


def test_a_signal_reaches_a_rank_as_soon_as_there_is_one(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import time\ntime.sleep(600)\n")
    job = {"launcher": os.getpid(), "target": str(tmp_path / "script.py"), "module": False, "arguments": []}
    job |= {"grace_s": 30, "output": "main", "logs": None}
    (tmp_path / "job.json").write_text(json.dumps(job))
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, keeper.__file__, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 128 + signal.SIGUSR1, done.stderr
    end = json.loads((tmp_path / "attempt0" / "rank0" / "end.json").read_text())
    assert (end["code"], end["stopped_by"]) == (-signal.SIGUSR1, signal.SIGUSR1)
