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


@pytest.mark.parametrize("given", ["started", 0.5, [("loss", 1.0)]])
def test_a_logged_value_without_a_name_is_told_how(make_loop, given):
    with pytest.raises(hotloop.HotloopError, match=r"log\(loss=\.\.\.\)"):
        make_loop().log(given)


@pytest.mark.parametrize("given", ["tensorboard", 3])
def test_a_tracker_that_is_none_is_named_whole(given):
    with pytest.raises(hotloop.HotloopError, match=f"trackers={given!r} is no tracker"):
        hotloop.Loop(record=False, device="cpu", trackers=given)


def test_a_loader_without_batches_is_told(make_loop, capsys):
    loop = make_loop()
    data = TensorDataset(torch.zeros(5, 1))
    loop.prepare(DataLoader(data, batch_size=5, drop_last=True), DataLoader(data, batch_size=6))
    assert "no batches" not in capsys.readouterr().err
    loop.prepare(DataLoader(data, batch_size=6, drop_last=True), DataLoader(data, batch_sampler=[]))
    assert [line for line in capsys.readouterr().err.splitlines() if "no batches" in line] == [
        "hotloop: loader 3 has no batches: its samples are fewer than a batch, and drop_last=True leaves them out",
        "hotloop: loader 4 has no batches",
    ]


def test_a_dataset_in_place_of_its_loader_is_told(make_loop, capsys):
    loop = make_loop()
    data = TensorDataset(torch.zeros(5, 1))
    loop.prepare(DataLoader(data, batch_size=5))
    assert "is no DataLoader" not in capsys.readouterr().err
    bare = loop.prepare(data)
    assert "TensorDataset is no DataLoader: each of its items is taken for a batch" in capsys.readouterr().err
    assert [x.shape for (x,) in bare] == [(1,)] * 5


@pytest.mark.parametrize("course", ["epochs", "steps"])
@pytest.mark.parametrize("prepared", [False, True])
def test_an_optimizer_that_was_not_prepared_is_told(make_loop, capsys, course, prepared):
    loop = make_loop()
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, loader = loop.prepare(model, DataLoader(TensorDataset(torch.ones(4, 1)), batch_size=2))
    if prepared:
        loop.prepare(optimizer)
    for _ in getattr(loop, course)(1):
        for (x,) in loader:
            loop.backward(model(x).mean())
            optimizer.step()
            optimizer.zero_grad()
    assert loop.updates == (2 if prepared else 0)
    assert ("no optimizer was given to prepare" in capsys.readouterr().err) is not prepared


@pytest.mark.parametrize("prepared", [False, True])
def test_a_model_that_was_not_prepared_is_told(make_loop, capsys, prepared):
    loop = make_loop(precision="bf16")
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop.prepare(optimizer, model) if prepared else loop.prepare(optimizer)
    said = "SGD updates no parameter of a prepared module" in capsys.readouterr().err
    assert said is not prepared
    with torch.profiler.profile() as seen:
        model(torch.ones(1, 1))
    # in the loop's precision, the input at least is cast
    assert any(event.name == "aten::_to_copy" for event in seen.events()) is prepared


def test_evaluation_alone_needs_no_optimizer(make_loop, capsys):
    loop = make_loop()
    model, loader = loop.prepare(nn.Linear(1, 1), DataLoader(TensorDataset(torch.ones(4, 1)), batch_size=2))
    for _ in loop.epochs(1):
        with torch.no_grad():
            for (x,) in loader:
                loop.mean("value", model(x))
    assert loop.mean("value") == pytest.approx(model(torch.ones(1, 1)).item())
    assert "no optimizer" not in capsys.readouterr().err


def test_epochs_that_are_done_are_counted_in_words(make_loop, capsys):
    loop = make_loop()
    assert [list(loop.epochs(n)) for n in (1, 1, 2, 2)] == [[0], [], [1], []]
    said = [line for line in capsys.readouterr().err.splitlines() if "none is left" in line]
    assert said == [
        "hotloop: epochs(1): 1 epoch is done already, none is left to do",
        "hotloop: epochs(2): 2 epochs are done already, none is left to do",
    ]


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
