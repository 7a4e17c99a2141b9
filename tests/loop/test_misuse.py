"""What a user gets wrong: said at once, with what to do."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hotloop
from hotloop.errors import CheckpointError

DIGITS = Path(__file__).parents[2] / "examples" / "digits.py"


def test_a_tracker_that_is_none_is_refused_at_once():
    with pytest.raises(hotloop.HotloopError, match=r"TensorBoard\(folder\)"):
        hotloop.Loop(record=False, device="cpu", trackers=["tensorboard"])


def test_a_single_tracker_needs_no_list(make_loop):
    rows = []

    class Kept:
        def write_rows(self, new):
            rows.extend(new)

        def close(self):
            rows.append("closed")

    loop = make_loop(trackers=Kept())
    loop.log(value=1.0)
    loop.end_training()
    assert rows[0].values == {"value": 1.0}
    assert rows[-1] == "closed"


def test_a_checkpoint_of_another_optimizer_is_refused_by_name(make_loop, tmp_path):
    for make in (torch.optim.SGD, torch.optim.AdamW):
        loop = make_loop()
        model = nn.Linear(2, 1)
        loop.prepare(model, make(model.parameters(), lr=0.1))
        if make is torch.optim.SGD:
            loop.save_state(tmp_path / "checkpoint", wait=True)
    with pytest.raises(CheckpointError, match=r"AdamW.*state of a SGD"):
        loop.resume(tmp_path / "checkpoint")


def test_samples_are_counted_batch_by_batch(make_loop):
    loop = make_loop()
    loader = loop.prepare(DataLoader(TensorDataset(torch.zeros(17, 1)), batch_size=8))
    for _ in range(2):
        for _ in loader:
            pass
    assert loader.handed_out == 6
    assert loader.samples_handed_out == 34


@pytest.mark.slow
def test_the_example_goes_on_from_its_checkpoint(tmp_path):
    words = [sys.executable, str(DIGITS), "--checkpoint", "kept"]
    for more in ([], ["--resume", "kept"]):
        done = subprocess.run(
            [*words, "--epochs", "1", *more], cwd=tmp_path, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stderr
    assert "resumed update 22" in done.stderr
    assert [folder.name for folder in (tmp_path / "kept").glob("step-*")] == ["step-0000000022"]
