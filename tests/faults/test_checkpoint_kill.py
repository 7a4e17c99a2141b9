"""kill -9 during save: whatever the moment, a whole checkpoint loads, no older than the last durable one.

One interpreter forks all the victims, so that torch is imported once; it is a child of its own, so that
pytest's threads and captured streams are not forked with them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

COMMON = '''
import itertools, json, os, random, signal, sys, time
import torch
from pathlib import Path
from hotloop.loop.checkpoint import Checkpoints, Snapshot

torch.set_num_threads(1)
folder, tries = Path(sys.argv[1]), int(sys.argv[2])

def snapshot(step):
    def part():
        return {f"t{i}": torch.full((50 + 300 * i,), float(step)) for i in range(4)}
    parts = {"model": part(), "optimizer": part()}
    return Snapshot(step, parts, {"state": {"step": step, "t": torch.full((100,), float(step))}})

def check():
    """Step of the checkpoint that loads, all of whose content must say the same step; None without one."""
    loaded = Checkpoints().load(folder)
    if loaded is None:
        return None
    values = [t for part in loaded.tensors.values() for t in part.values()] + [loaded.objects["state"]["t"]]
    assert len(values) == 9, len(values)
    assert all((value == loaded.step).all() for value in values), "mixed content"
    assert loaded.objects["state"]["step"] == loaded.step
    return loaded.step
'''

AT_RANDOM = (
    COMMON
    + """
def victim(first, pipe):
    checkpoints = Checkpoints()
    for step in itertools.count(first):
        for _ in range(2 if step % 3 == 0 else 1):  # every third step is saved twice, as after a resume
            checkpoints.save(folder, snapshot(step), keep=1 + step % 2)
            os.write(pipe, b"b%d " % step)
        checkpoints.wait()
        os.write(pipe, b"d%d " % step)

random.seed(int(sys.argv[3]))
durable, began, seen = -1, 0, []
for attempt in range(tries):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            victim(durable + 1, writing)
        finally:
            os._exit(1)
    os.close(writing)
    # Wait for its first save so that every kill hits a save or the gap between two.
    said = os.read(reading, 1 << 20)
    time.sleep(random.uniform(0, 0.03))
    os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status), status
    while chunk := os.read(reading, 1 << 20):
        said += chunk
    os.close(reading)
    reports = [int(word[1:]) for word in said.split() if word.startswith(b"d")]
    began = max([began, *(int(word[1:]) for word in said.split() if word.startswith(b"b"))])
    durable = max([durable, *reports])
    left = sorted(path.name for path in folder.iterdir() if path.name.startswith((".saving", ".deleted")))
    found = check()
    assert found is None or found <= began + 1, (found, began)
    assert (found if found is not None else -1) >= durable, (attempt, found, durable, left)
    durable = max(durable, found if found is not None else -1)
    seen.append([len(reports), left])
Checkpoints().save(folder, snapshot(durable + 1), wait=True)
names = sorted(path.name for path in folder.iterdir())
print(json.dumps({"seen": seen, "names": names, "last": durable + 1}))
"""
)

AT_EVERY_CALL = (
    COMMON
    + """
# The victim kills itself at its n-th call that touches files, for every n: no moment is left to chance.
WATCHED = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "os.truncate"}

OURS = (str(folder), ".", "step", "model")

def victim(at, step, keep):
    count = 0
    def hook(event, args):
        nonlocal count
        if event in WATCHED and (event != "open" or str(args[0]).startswith(OURS)):
            count += 1
            if count > at:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)
    Checkpoints().save(folder, snapshot(step), keep=keep, wait=True)

report = []
for same in (False, True):
    for at in itertools.count():
        if at % 7 == 0:
            Checkpoints().save(folder, snapshot(at), keep=1 + at % 2, wait=True)
        before = check()
        step = before if same else before + 1
        child = os.fork()
        if child == 0:
            status = 1
            try:
                victim(at, step, 1)
                status = 0
            finally:
                os._exit(status)
        status = os.waitpid(child, 0)[1]
        found = check()
        assert found in (before, step), (at, before, step, found)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            assert found == step
            break
    report.append(at)
print(json.dumps(report))
"""
)


def run(script: str, *arguments: object) -> str:
    command = [sys.executable, "-W", "error", "-c", script, *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert ended.stderr == ""
    return ended.stdout


@pytest.mark.slow
def test_killed_at_a_hundred_random_moments(tmp_path: Path) -> None:
    result = json.loads(run(AT_RANDOM, tmp_path, 100, 0))
    assert len(result["seen"]) == 100
    # The kills did hit the middle of saves, not only the gaps between them.
    assert sum(bool(left) for _, left in result["seen"]) >= 20
    assert result["names"] == [".lock", f"step-{result['last']:010d}"]


def test_killed_at_every_file_operation(tmp_path: Path) -> None:
    fresh, again = json.loads(run(AT_EVERY_CALL, tmp_path, 0))
    assert fresh >= 12
    assert again >= 12
