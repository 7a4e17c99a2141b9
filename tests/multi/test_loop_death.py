"""A rank dies in training under `hotloop launch`: all end, its traceback comes first and alone, work is kept."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.multi

SCRIPT = """
import os, signal, sys, time
import torch
import hotloop
loop = hotloop.Loop(device="cpu", seed=0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(800, 4))
model, optimizer, loader = loop.prepare(model, optimizer, torch.utils.data.DataLoader(data, 4))
resumed = loop.resume("checkpoint")
print("resumed" if resumed else "fresh", loop.updates, flush=True)
for _ in loop.epochs(1):
    for (x,) in loader:
        loop.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        loop.save_state("checkpoint", every="10 updates")
        if loop.updates == 57 and loop.processes.rank == 1 and not resumed:
            while not os.path.exists("checkpoint/step-0000000050"):  # its save goes on beside the training
                time.sleep(0.01)
            if sys.argv[1] == "raise":
                raise KeyError("the data is broken")
            os.kill(os.getpid(), signal.SIGKILL)
loop.end_training()
print("finished", loop.updates, flush=True)
"""


def launch(home: Path, how: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, "-m", "hotloop", "launch", "--device", "cpu", "-n", "2", "script.py", how],
        cwd=home,
        env={**clean, "HOTLOOP_PROGRESS": "0", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=240,
        check=False,
    )


@pytest.mark.parametrize("how", ["raise", "kill"])
def test_a_rank_dies(tmp_path: Path, how: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    died = launch(tmp_path, how)
    assert died.returncode != 0
    assert "fresh 0" in died.stdout
    assert "finished" not in died.stdout
    if how == "raise":
        # its traceback, and not what the other rank met because of it
        assert "KeyError: 'the data is broken'" in died.stderr
        assert died.stderr.count("Traceback") == 1
    else:
        assert "SIGKILL" in died.stderr
    again = launch(tmp_path, how)
    assert again.returncode == 0, again.stderr
    assert "resumed 50" in again.stdout
    assert "finished 100" in again.stdout
