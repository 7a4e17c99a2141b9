from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.multi
RunRanks = Callable[..., list[Any]]
CPU = {"ACCELERATE_USE_CPU": "true"}


def _train_both(rank: int) -> Any:
    import importlib

    import torch
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, TensorDataset

    found = []
    for package in ("hotloop.accelerate", "accelerate"):
        module: Any = importlib.import_module(package)
        states: Any = importlib.import_module(package + ".state")
        for kind in (states.AcceleratorState, states.PartialState, states.GradientState):
            kind._reset_state()
        accelerator = module.Accelerator(cpu=True, gradient_accumulation_steps=2)
        torch.manual_seed(rank)  # ranks differ: the model of rank 0 has to reach the others
        model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(26, 3, generator=generator)
        data = TensorDataset(x, x.sum(1, keepdim=True))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.95**n)
        torch.manual_seed(9)
        loader = DataLoader(data, batch_size=4, shuffle=True)
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        losses, rates, norms, seen = [], [], [], []
        for _ in range(2):
            for inputs, targets in loader:
                with accelerator.accumulate(model):
                    loss = F.mse_loss(model(inputs), targets)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                losses.append(accelerator.gather(loss.detach()).mean().item())
                rates.append(scheduler.get_last_lr()[0])
                seen.append(accelerator.gather_for_metrics(targets))
        weights = torch.cat([p.detach().flatten() for p in accelerator.unwrap_model(model).parameters()])
        found.append((losses, rates, norms, torch.cat(seen), weights))
    return found


def test_training_on_two_ranks_is_that_of_accelerate(run_ranks: RunRanks) -> None:
    pytest.importorskip("accelerate")
    ranks = run_ranks(2, _train_both, env=CPU)
    assert torch.equal(ranks[0][0][-1], ranks[1][0][-1])
    for mine, theirs in ranks:
        assert mine[1] == theirs[1]
        assert len(mine[3]) == 2 * 26
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(torch.as_tensor(a), torch.as_tensor(b), rtol=1e-5, atol=1e-6)


def _loaders(rank: int) -> Any:
    from typing import Any

    import numpy as np
    import torch
    from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler

    from hotloop.accelerate import Accelerator
    from hotloop.accelerate.utils import DataLoaderConfiguration

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            for i in range(5):
                yield torch.full((i + 1,), i)

    class Shuffled(Sampler[int]):
        def __iter__(self) -> Any:
            yield from np.random.permutation(12).tolist()

        def __len__(self) -> int:
            return 12

    accelerator = Accelerator()
    np.random.seed(rank)
    torch.manual_seed(rank)
    found: dict[str, Any] = {}
    ragged = accelerator.prepare(DataLoader(Stream(), batch_size=1))
    found["ragged"] = [tuple(batch.shape) for batch in ragged]
    own = DistributedSampler(range(8), shuffle=False)  # type: ignore[arg-type]
    once = accelerator.prepare(DataLoader(range(8), batch_size=2, sampler=own))
    found["once"] = torch.cat(list(once)).tolist()
    agreed = accelerator.prepare(DataLoader(range(12), batch_size=3, sampler=Shuffled()))
    found["agreed"] = [torch.cat(list(agreed)).tolist() for _ in range(2)]
    found["own random numbers"] = np.random.rand()
    nested = accelerator.prepare(DataLoader(range(12), batch_sampler=BatchSampler(Shuffled(), 3, False)))
    found["nested"] = torch.cat(list(nested)).tolist()
    shuffled = accelerator.prepare(DataLoader(range(12), batch_size=3, shuffle=True))
    found["shuffled"] = torch.cat(list(shuffled)).tolist()
    config = DataLoaderConfiguration(use_seedable_sampler=True)
    seeded = Accelerator(dataloader_config=config).prepare(DataLoader(range(12), batch_size=3, shuffle=True))
    found["seeded"] = torch.cat(list(seeded)).tolist()
    short = accelerator.prepare(DataLoader(range(9), batch_size=2))
    skipped = accelerator.skip_first_batches(short, 1)
    found["skipped"] = torch.cat([accelerator.gather_for_metrics(batch) for batch in skipped]).tolist()
    uneven = Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=False))
    rest = uneven.prepare(DataLoader(range(7), batch_size=2))
    found["uneven"] = torch.cat([uneven.gather_for_metrics(batch) for batch in rest]).tolist()
    found["objects"] = [uneven.gather_for_metrics([f"{rank}"]) for _ in rest]
    return found


def test_loaders_on_two_ranks(run_ranks: RunRanks) -> None:
    first, second = run_ranks(2, _loaders, env=CPU)
    assert first["ragged"] == [(1, 1), (1, 3), (1, 5)]
    assert second["ragged"] == [(1, 2), (1, 4), (1, 5)]
    assert sorted(first["once"] + second["once"]) == list(range(8))
    for a, b in zip(first["agreed"], second["agreed"], strict=True):
        assert sorted(a + b) == list(range(12))
    assert first["agreed"][0] != first["agreed"][1]
    assert first["own random numbers"] != second["own random numbers"]
    for name in ("nested", "shuffled", "seeded"):
        assert sorted(first[name] + second[name]) == list(range(12)), name
    assert first["skipped"] == second["skipped"] == list(range(4, 9))
    assert first["uneven"] == second["uneven"] == list(range(7))
    assert first["objects"] == [["0", "1"]] * 2


def _weigh(rank: int) -> Any:
    import torch
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, TensorDataset

    from hotloop.accelerate import Accelerator
    from hotloop.accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin

    x = torch.randn(13, 3, generator=torch.Generator().manual_seed(0))
    y = x.sum(1, keepdim=True)
    accelerator = Accelerator(
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2, weighting="samples"),
        dataloader_config=DataLoaderConfiguration(even_batches=False),
    )
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # 4 + 4, 4 + 1: one window of 13 samples, the last batch of rank 1 holds a single one
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(TensorDataset(x, y), batch_size=4)
    )
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(F.mse_loss(model(inputs), targets))
            optimizer.step()
    torch.manual_seed(1)
    plain = torch.nn.Linear(3, 1)
    step = torch.optim.SGD(plain.parameters(), lr=0.1)
    F.mse_loss(plain(x), y).backward()
    step.step()
    return model.weight.detach(), plain.weight.detach()


def test_updates_weighted_by_samples_are_those_of_the_whole_batch(run_ranks: RunRanks) -> None:
    for weight, expected in run_ranks(2, _weigh, env=CPU):
        torch.testing.assert_close(weight, expected)


def _average(rank: int) -> Any:
    import torch

    from hotloop.accelerate import Accelerator
    from hotloop.accelerate.local_sgd import LocalSGD

    accelerator = Accelerator()
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    with torch.no_grad():
        model.weight.zero_()
    seen = []
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2) as local:
        for _ in range(3):
            accelerator.backward(model(torch.ones(1, 1)).sum() * (rank + 1))
            optimizer.step()
            optimizer.zero_grad()
            local.step()
            seen.append(model.weight.item())
    return seen, model.weight.item()


def test_local_updates_are_averaged(run_ranks: RunRanks) -> None:
    (first, last), (second, other) = run_ranks(2, _average, env=CPU)
    # rank r moves by -(r + 1): after two steps -2 and -4 are averaged to -3
    assert first == [-1.0, -3.0, -4.0]
    assert second == [-2.0, -3.0, -5.0]
    assert last == other == -4.5


def _save(rank: int, world: int) -> Any:
    import os

    import torch

    from hotloop.accelerate import Accelerator
    from hotloop.errors import HotloopError

    folder = os.environ["FOLDER"]
    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    accelerator.save_state(folder)
    kept = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.add_(1)

    def fail(*_: Any) -> None:
        if rank == 1:
            raise RuntimeError("rank 1 cannot")

    handle = accelerator.register_save_state_pre_hook(fail)
    text = ""
    try:
        accelerator.save_state(folder)
    except (HotloopError, RuntimeError) as error:
        text = str(error)
    handle.remove()
    torch.manual_seed(rank + 100)
    drawn = torch.rand(1).item()
    accelerator.load_state(folder)
    return text, torch.equal(model.weight, kept), sorted(os.listdir(folder)), torch.rand(1).item() != drawn


def test_a_rank_that_fails_in_a_save_leaves_the_last_one(run_ranks: RunRanks, tmp_path: Path) -> None:
    ranks = run_ranks(2, _save, env={**CPU, "FOLDER": str(tmp_path / "state")})
    assert "rank 1: RuntimeError('rank 1 cannot')" in ranks[0][0]
    assert ranks[1][0] == "rank 1 cannot"
    for _, same, files, _ in ranks:
        assert same
        assert files == ["hotloop.json", "model.safetensors", "random_states_0.pkl", "random_states_1.pkl"]


def _fail_to_read(rank: int) -> Any:

    from torch.utils.data import DataLoader, IterableDataset

    from hotloop.accelerate import Accelerator

    class Broken(IterableDataset[int]):
        def __iter__(self) -> Any:
            yield from (0, 1)
            raise ValueError("row 2 is unreadable")

    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(Broken(), batch_size=1))
    try:
        for _ in loader:
            pass
    except (ValueError, RuntimeError) as error:
        return str(error)
    return None


def test_a_batch_that_cannot_be_read_is_an_error_on_every_rank(run_ranks: RunRanks) -> None:
    first, second = run_ranks(2, _fail_to_read, env=CPU)
    assert first == "row 2 is unreadable"
    assert "row 2 is unreadable" in second


def _control(rank: int) -> Any:
    import torch

    from hotloop.accelerate import Accelerator
    from hotloop.accelerate.utils import DistributedOperationException, gather, pad_across_processes

    accelerator = Accelerator(mixed_precision="bf16")
    found: dict[str, Any] = {}
    if rank == 1:
        accelerator.set_trigger()
    found["trigger"] = (accelerator.check_trigger(), accelerator.check_trigger())
    found["mine"] = accelerator.on_process(lambda: rank, process_index=1)()
    found["last"] = accelerator.on_last_process(lambda: rank)()
    with accelerator.split_between_processes(["a", "b", "c"], apply_padding=True) as share:
        found["share"] = share
    try:
        gather(torch.ones(rank + 1))
    except DistributedOperationException as error:
        found["error"] = str(error)
    found["padded"] = gather(pad_across_processes(torch.ones(rank + 1))).tolist()
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    out = model(torch.ones(1, 2))
    accelerator.backward(out.sum() * (rank + 1))
    found["gradient"] = model.bias.grad.tolist()
    found["dtype"] = str(out.dtype)
    accelerator.end_training()
    return found


def test_processes_are_told_apart(run_ranks: RunRanks) -> None:
    for rank, found in enumerate(run_ranks(2, _control, env=CPU)):
        assert found["trigger"] == (True, False)
        assert found["mine"] == found["last"] == (1 if rank == 1 else None)
        assert found["share"] == (["a", "b"] if rank == 0 else ["c", "c"])
        assert "rank 0: [1] float32; rank 1: [2] float32" in found["error"]
        assert found["padded"] == [1, 0, 1, 1]
        assert found["gradient"] == [1.5, 1.5]
        assert found["dtype"] == "torch.float32"
