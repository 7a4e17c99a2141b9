"""One watch over all processes of a run: rank 0 tells, names the slow rank, and the script's output stays its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.multi

SCRIPT = """
import os, pathlib, sys, time
import torch
import torch.distributed as dist

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(8):
    loss = model(torch.ones(4, 16)).square().mean()
    if rank == 0:
        pathlib.Path(f"waits-{step}").touch()
    else:
        # late by that much for rank 0, however long that took to come here itself
        while not os.path.exists(f"waits-{step}"):
            time.sleep(0.01)
        time.sleep(0.4)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
# one write each: two processes share one pipe
sys.stdout.write(" ".join(["rank", str(rank), *sys.argv[1:]]) + "\\n")
sys.exit(int(sys.argv[1]))
"""


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    clean = {k: v for k, v in os.environ.items() if k not in names}
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env={**clean, "OMP_NUM_THREADS": "1"},
        timeout=240,
    )


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def facts_of(text: str) -> dict[str, object]:
    facts: dict[str, object] = json.loads(text[text.index("\n{\n") : text.rindex("\n}") + 2])
    return facts


def test_two_processes_one_window_and_the_slow_rank_by_name(script: Path) -> None:
    options = ["-n", "2", "--device", "cpu", "--skip", "1", "--steps", "3", "--json"]
    done = run("-m", "hotloop", "doctor", *options, "train.py", "0", "-n", "9", cwd=script)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "rank 0 0 -n 9\n"
    facts = facts_of(done.stderr)
    ranks = facts["ranks"]
    assert isinstance(ranks, dict)
    assert [row["rank"] for row in ranks["rows"]] == [0, 1]
    assert ranks["straggler"] == "train.py, rank 1"
    # rank 0 has a backward to do and waits for the rest of the 400 ms, in which nothing is computed
    first, second = ranks["rows"]
    assert first["exposed_ms"] > 200
    assert first["exposed_ms"] <= first["collectives_ms"] + 1e-6
    assert second["collectives_ms"] < first["collectives_ms"] - 200
    assert second["host_ms"] > first["host_ms"] + 200
    assert ranks["matched"]
    assert str(facts["verdict"]).startswith("The other ranks wait for rank 1: up to ")
    assert "more on its host" in str(facts["verdict"])


def test_under_another_launcher(script: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    options = ["--no-python", sys.executable, "-m", "hotloop", "doctor", "--skip", "1", "--steps", "3"]
    done = run(*launcher, *options, "train.py", "0", cwd=script)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 0", "rank 1 0"]
    assert done.stderr.count("The other ranks wait for rank 1") == 1, done.stderr
