from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from hotloop.accelerate import Accelerator, load_checkpoint_in_model
from hotloop.accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from hotloop.errors import CheckpointError, SettingError


class _Run:
    """A small training with dropout and shuffling, whose losses depend on every random stream."""

    def __init__(self, **options: Any) -> None:
        set_seed(7)
        self.accelerator = Accelerator(**options)
        model = torch.nn.Sequential(
            torch.nn.Linear(2, 6), torch.nn.BatchNorm1d(6), torch.nn.Dropout(), torch.nn.Linear(6, 1)
        )
        x = torch.randn(20, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True)
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            model, optimizer, loader, scheduler
        )

    def step(self, x: torch.Tensor, y: torch.Tensor) -> float:
        noise = random.random() + np.random.rand()
        loss = F.mse_loss(self.model(x), y) * (1 + 0.1 * noise)
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return loss.item()


def test_a_loaded_run_goes_on_bit_for_bit_after_skipping(tmp_path: Path) -> None:
    run = _Run()
    losses = []
    for epoch in range(3):
        for i, (x, y) in enumerate(run.loader):
            losses.append(run.step(x, y))
            if epoch == 1 and i == 2:
                run.accelerator.save_state(tmp_path / "state")
    again = _Run()
    set_seed(99)
    again.accelerator.load_state(tmp_path / "state")
    resumed = []
    for epoch in range(1, 3):
        loader = again.accelerator.skip_first_batches(again.loader, 3) if epoch == 1 else again.loader
        resumed += [again.step(x, y) for x, y in loader]
    assert resumed == losses[8:]


def test_a_stateful_loader_goes_on_by_itself(tmp_path: Path) -> None:
    config = DataLoaderConfiguration(use_stateful_dataloader=True)
    run = _Run(dataloader_config=config)
    losses = []
    for epoch in range(2):
        for i, (x, y) in enumerate(run.loader):
            losses.append(run.step(x, y))
            if epoch == 0 and i == 1:
                run.accelerator.save_state(str(tmp_path / "state"))
    again = _Run(dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
    again.accelerator.load_state(str(tmp_path / "state"))
    resumed = [again.step(x, y) for _ in range(2) for x, y in again.loader]
    assert resumed == losses[2:]


def test_between_epochs_nothing_is_skipped(tmp_path: Path) -> None:
    run = _Run()
    losses = [run.step(x, y) for x, y in run.loader]
    run.accelerator.save_state(tmp_path / "state")
    losses += [run.step(x, y) for x, y in run.loader]
    again = _Run()
    again.accelerator.load_state(tmp_path / "state")
    assert [again.step(x, y) for x, y in again.loader] == losses[5:]


def test_files_are_those_that_accelerate_writes_and_reads(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    run = _Run()
    for x, y in run.loader:
        run.step(x, y)
    run.accelerator.save_state(tmp_path / "mine")
    names = {"model.safetensors", "optimizer.bin", "scheduler.bin", "random_states_0.pkl", "hotloop.json"}
    assert set(os.listdir(tmp_path / "mine")) == names
    accelerate.state.AcceleratorState._reset_state(True)
    theirs = accelerate.Accelerator(cpu=True)
    torch.manual_seed(5)
    model = torch.nn.Sequential(
        torch.nn.Linear(2, 6), torch.nn.BatchNorm1d(6), torch.nn.Dropout(), torch.nn.Linear(6, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    model, optimizer, scheduler = theirs.prepare(model, optimizer, scheduler)
    theirs.load_state(str(tmp_path / "mine"))
    for name, value in run.model.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)
    assert scheduler.get_last_lr() == run.scheduler.get_last_lr()

    torch.manual_seed(123)
    np.random.seed(4)
    theirs.save_state(str(tmp_path / "theirs"))
    expected = (torch.rand(3), np.random.rand(), random.random())
    again = _Run()
    again.accelerator.load_state(tmp_path / "theirs")
    assert torch.equal(torch.rand(3), expected[0])
    assert (np.random.rand(), random.random()) == expected[1:]
    assert again.optimizer.state_dict()["state"][0]["step"].item() == 5
    accelerate.state.AcceleratorState._reset_state(True)


def test_automatic_names_are_counted_and_limited(tmp_path: Path) -> None:
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    run = _Run(project_config=project)
    made = [run.accelerator.save_state() for _ in range(3)]
    assert made[-1] == str(tmp_path / "checkpoints" / "checkpoint_2")
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["checkpoint_1", "checkpoint_2"]
    run.model[0].weight.data.zero_()
    run.accelerator.load_state()
    assert run.model[0].weight.abs().sum() > 0
    project.iteration = 1
    with pytest.raises(SettingError, match="already exists"):
        run.accelerator.save_state()


def test_hooks_see_and_change_what_is_saved(tmp_path: Path) -> None:
    run = _Run()
    seen: list[Any] = []

    def save_hook(models: list[Any], weights: list[Any], folder: str) -> None:
        seen.append((len(models), len(weights)))
        weights.pop()
        torch.save(models[0].state_dict(), os.path.join(folder, "own.pt"))

    def load_hook(models: list[Any], folder: str) -> None:
        models.pop().load_state_dict(torch.load(os.path.join(folder, "own.pt"), weights_only=True))

    first = run.accelerator.register_save_state_pre_hook(save_hook)
    second = run.accelerator.register_load_state_pre_hook(load_hook)
    run.accelerator.save_state(tmp_path / "state")
    assert seen == [(1, 1)]
    assert "own.pt" in os.listdir(tmp_path / "state")
    assert "model.safetensors" not in os.listdir(tmp_path / "state")
    weight = run.model[0].weight.detach().clone()
    run.model[0].weight.data.zero_()
    run.accelerator.load_state(tmp_path / "state")
    assert torch.equal(run.model[0].weight, weight)
    first.remove()
    second.remove()
    run.accelerator.save_state(tmp_path / "state")
    assert "model.safetensors" in os.listdir(tmp_path / "state")


def test_registered_objects_are_saved(tmp_path: Path) -> None:
    run = _Run()
    extra = torch.nn.Linear(1, 1)
    run.accelerator.register_for_checkpointing(extra)
    with pytest.raises(ValueError, match="Item at index 1, `int`"):
        run.accelerator.register_for_checkpointing(extra, 3)
    run.accelerator.save_state(tmp_path / "state")
    before = extra.weight.detach().clone()
    extra.weight.data.zero_()
    run.accelerator.load_state(tmp_path / "state")
    assert torch.equal(extra.weight, before)
    with pytest.raises(CheckpointError, match="does not match the number of registered objects"):
        _Run().accelerator.load_state(tmp_path / "state")


@pytest.mark.parametrize("fault", ["truncated", "altered", "missing"])
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.bin", "random_states_0.pkl"])
def test_damage_is_named(tmp_path: Path, name: str, fault: str) -> None:
    run = _Run()
    run.accelerator.save_state(tmp_path / "state")
    file = tmp_path / "state" / name
    content = bytearray(file.read_bytes())
    if fault == "truncated":
        file.write_bytes(content[:-10])
    elif fault == "altered":
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    else:
        file.unlink()
    with pytest.raises(CheckpointError, match=name):
        run.accelerator.load_state(tmp_path / "state")


def test_a_save_that_fails_leaves_the_last_one(tmp_path: Path) -> None:
    run = _Run()
    run.accelerator.save_state(tmp_path / "state")
    weight = run.model[0].weight.detach().clone()
    run.model[0].weight.data.add_(1)

    def fail(*_: Any) -> None:
        raise OSError("no space left")

    handle = run.accelerator.register_save_state_pre_hook(fail)
    with pytest.raises(CheckpointError, match=r"no space left.*untouched"):
        run.accelerator.save_state(tmp_path / "state")
    handle.remove()
    assert os.listdir(tmp_path) == ["state"]
    run.accelerator.load_state(tmp_path / "state")
    assert torch.equal(run.model[0].weight, weight)


def test_the_checkpoint_before_is_found_if_a_rename_was_the_last_thing(tmp_path: Path) -> None:
    run = _Run()
    run.accelerator.save_state(tmp_path / "state")
    os.rename(tmp_path / "state", tmp_path / ".state.previous")
    run.accelerator.load_state(tmp_path / "state")
    with pytest.raises(CheckpointError, match="folder does not exist"):
        run.accelerator.load_state(tmp_path / "other")


def test_foreign_files_in_the_folder_stay(tmp_path: Path) -> None:
    run = _Run()
    run.accelerator.save_state(tmp_path / "state")
    (tmp_path / "state" / "notes.txt").write_text("mine")
    (tmp_path / "state" / "model_1.safetensors").write_text("stale")
    run.accelerator.save_state(tmp_path / "state")
    assert (tmp_path / "state" / "notes.txt").read_text() == "mine"
    assert not (tmp_path / "state" / "model_1.safetensors").exists()


@pytest.mark.parametrize("safe", [True, False])
def test_models_are_saved_in_shards(tmp_path: Path, safe: bool) -> None:
    accelerator = Accelerator()
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    accelerator.save_model(model, tmp_path, max_shard_size="0.3KB", safe_serialization=safe)
    names = sorted(os.listdir(tmp_path))
    ending = "safetensors" if safe else "bin"
    assert next(n for n in names if n.endswith(ending)).split("-", 1)[1] == f"00001-of-00004.{ending}"
    index = json.loads((tmp_path / next(n for n in names if n.endswith("index.json"))).read_text())
    assert index["metadata"]["total_size"] == 4 * 72 * 4
    other = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    load_checkpoint_in_model(other, tmp_path, strict=True)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    accelerator.save_model(model, tmp_path, safe_serialization=safe)
    assert sorted(os.listdir(tmp_path)) == [f"{'model' if safe else 'pytorch_model'}.{ending}"]


def test_shared_weights_are_saved_once_and_come_back_shared(tmp_path: Path) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(5, 3)
            self.head = torch.nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight

    accelerator = Accelerator()
    model = accelerator.prepare(Tied())
    accelerator.save_state(tmp_path / "state")
    weight = model.head.weight.detach().clone()
    model.head.weight.data.zero_()
    accelerator.load_state(tmp_path / "state")
    assert torch.equal(model.embed.weight, weight)
    assert model.embed.weight is model.head.weight


def test_save_writes_whole_files(tmp_path: Path) -> None:
    accelerator = Accelerator()
    accelerator.save({"a": torch.ones(2)}, tmp_path / "a.pt")
    assert torch.equal(torch.load(tmp_path / "a.pt", weights_only=True)["a"], torch.ones(2))
    accelerator.save({"a": torch.ones(2)}, tmp_path / "a.safetensors", safe_serialization=True)
    from safetensors.torch import load_file

    assert torch.equal(load_file(tmp_path / "a.safetensors")["a"], torch.ones(2))
    with pytest.raises(AttributeError):
        accelerator.save({"a": lambda: 1}, tmp_path / "a.pt")
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "a.safetensors"]
    assert (tmp_path / "a.pt").stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    value = os.umask(0)
    os.umask(value)
    return value


def test_a_window_that_was_half_full_is_completed(tmp_path: Path) -> None:
    def train(run: _Run, loader: Any, losses: list[float], save_at: int | None = None) -> None:
        for i, (x, y) in enumerate(loader):
            with run.accelerator.accumulate(run.model):
                losses.append(run.step(x, y))
            if i == save_at:
                run.accelerator.save_state(tmp_path / "state")

    run, losses = _Run(gradient_accumulation_steps=3), []
    train(run, run.loader, losses, save_at=3)
    train(run, run.loader, losses)
    again, resumed = _Run(gradient_accumulation_steps=3), []
    again.accelerator.load_state(tmp_path / "state")
    train(again, again.accelerator.skip_first_batches(again.loader, 4), resumed)
    train(again, again.loader, resumed)
    assert resumed == losses[4:]
