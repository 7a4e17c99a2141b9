"""Settings that say how the machine is used: each acts, is recorded, and is refused where it is wrong."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hotloop
from hotloop.errors import SettingError
from hotloop.hardware import machine_kind


def make_loop(settings: dict[str, object], **more: object) -> hotloop.Loop:
    return hotloop.Loop(record=False, device="cpu", seed=0, settings=settings, **more)


def data(n: int = 22) -> TensorDataset:
    return TensorDataset(torch.arange(n, dtype=torch.float32).reshape(n, 1))


def train(loop: hotloop.Loop, batch_size: int, epochs: int = 2, drop_last: bool = False) -> torch.Tensor:
    """Weights after `epochs` over 22 samples."""
    torch.manual_seed(1)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = DataLoader(data(), batch_size=batch_size, shuffle=True, drop_last=drop_last)
    model, optimizer, loader = loop.prepare(model, optimizer, loader)
    for _ in loop.epochs(epochs):
        for (x,) in loader:
            loss = (model(x) - 1).square().mean()
            loop.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    loop.end_training()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("batch", "accumulation", "micro"), [(8, 1, 2), (8, 1, 8), (2, 4, 8), (2, 4, 4)])
def test_micro_batches_give_the_same_updates(
    batch: int, accumulation: int, micro: int, drop_last: bool
) -> None:
    plain = make_loop({}, accumulation=accumulation)
    split = make_loop({"micro_batch": micro}, accumulation=accumulation)
    expected = train(plain, batch, drop_last=drop_last)
    assert torch.allclose(train(split, batch, drop_last=drop_last), expected, rtol=1e-5, atol=1e-7)
    assert split.updates == plain.updates
    assert split._window.every == batch * accumulation // micro


def test_the_length_of_a_regrouped_loader_is_its_number_of_batches() -> None:
    for batch, micro, drop in [(8, 2, False), (8, 2, True), (8, 4, False), (2, 8, False), (4, 8, True)]:
        loop = make_loop({"micro_batch": micro}, accumulation=max(micro // batch, 1))
        loader = loop.prepare(DataLoader(data(), batch_size=batch, drop_last=drop))
        batches = [x for (x,) in loader]
        assert len(batches) == len(loader)
        assert torch.cat(batches).flatten().tolist() == list(
            range(20 if drop and batch == 4 else 16 if drop else 22)
        )
        loop.end_training()


def test_micro_batches_that_do_not_fit_are_refused() -> None:
    loop = make_loop({"micro_batch": 3})
    with pytest.raises(SettingError, match="neither divides the loader's batch_size=8"):
        loop.prepare(DataLoader(data(), batch_size=8))
    with pytest.raises(SettingError, match="accumulation=1 batches of 8"):
        make_loop({"micro_batch": 16}).prepare(DataLoader(data(), batch_size=8))


class Drawing(torch.utils.data.Dataset):
    """Samples that draw random numbers."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + torch.rand(1)


def test_workers_change_neither_order_nor_draws_over_epochs() -> None:
    seen = []
    for settings in ({}, {"workers": 1, "prefetch": 3}):
        loop = make_loop(settings)
        loader = loop.prepare(DataLoader(Drawing(), batch_size=4, shuffle=True))
        seen.append([batch.clone() for _ in range(3) for batch in loader])
        assert loader.num_workers == settings.get("workers", 0)
        loop.end_training()
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))
    assert len(seen[0]) == 9


def test_what_is_not_read_by_index_keeps_its_workers() -> None:
    loop = make_loop({"workers": 2})
    loader = loop.prepare([torch.ones(2), torch.zeros(2)])
    assert "stays as it is" in loader.unserved
    assert any("workers=2" in line for line in loop._session.notes.lines)
    assert len(list(loader)) == 2


def test_fused_is_set_and_steps_alike() -> None:
    weights = []
    for settings in ({"fused": True}, {"fused": False}):
        loop = make_loop(settings)
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
        loop.prepare(model, optimizer)
        assert optimizer.param_groups[0]["fused"] is settings["fused"]
        for _ in range(3):
            loop.backward(model(torch.ones(2, 3)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        weights.append(model.weight.detach().clone())
    assert torch.allclose(*weights, rtol=1e-5)
    loop = make_loop({"fused": True})
    loop.prepare(model := nn.Linear(1, 1), torch.optim.RMSprop(model.parameters()))
    assert any("RMSprop has no fused kernel" in line for line in loop._session.notes.lines)


def test_memory_format_acts_on_convolutions() -> None:
    loop = make_loop({"memory_format": "channels_last"})
    model = loop.prepare(nn.Sequential(nn.Conv2d(4, 8, 3), nn.Flatten()))
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert not model[0].weight.is_contiguous()
    loop.prepare(nn.Linear(2, 2))
    assert any("four dimensions" in line for line in loop._session.notes.lines)


def test_threads_are_set_and_recorded() -> None:
    before = torch.get_num_threads()
    try:
        loop = make_loop({"threads": 1})
        assert torch.get_num_threads() == 1
        assert loop.settings["threads"] == 1
        assert loop.settings.sources["threads"] == "argument"
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("name", "value"),
    [("threads", 0), ("workers", -1), ("prefetch", "many"), ("fused", "maybe"), ("memory_format", "nhwc"),
     ("micro_batch", 0), ("pin_memory", 3), ("cudnn_benchmark", "x")],
)  # fmt: skip
def test_wrong_values_are_refused(name: str, value: object) -> None:
    with pytest.raises(SettingError, match=name):
        make_loop({name: value})


def test_a_file_found_on_this_kind_of_machine_counts_and_on_another_does_not(tmp_path) -> None:
    path = tmp_path / "train.tuned.toml"
    lines = ["[settings]", 'precision = "bf16"', "accumulation = 3", "[machine]"]
    lines += [f"{name} = {value!r}" for name, value in machine_kind("cpu").items()]
    path.write_text("\n".join(lines))
    loop = hotloop.Loop(record=False, device="cpu", settings=path)
    assert (loop.precision.name, loop.settings["accumulation"]) == ("bf16", 3)
    path.write_text(path.read_text().replace("[machine]\n", "[machine]\nspins = 3\n"))
    loop = hotloop.Loop(record=False, device="cpu", settings=path)
    assert (loop.precision.name, loop.settings["accumulation"]) == ("fp32", 1)
    assert any("is left aside: it was found on spins 3" in line for line in loop._session.notes.lines)
