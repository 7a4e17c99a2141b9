"""Loaders on real processes that talk through gloo."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.multi


def read_everything(rank: int, world: int) -> dict[str, Any]:
    import io
    import random

    import torch
    from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset
    from torch.utils.data.distributed import DistributedSampler

    from hotloop.data import Loader
    from hotloop.errors import DataError
    from hotloop.hardware.processes import find_processes

    processes = find_processes("cpu")
    torch.manual_seed(100 + rank)  # the ranks' streams differ, as in a real run
    random.seed(rank)
    y = torch.arange(23)

    def make(source: Any) -> Loader:
        return Loader(source, device=torch.device("cpu"), processes=processes)

    def steps(loader: Any) -> list[Any]:
        seen = []
        for batch in loader:
            batch = batch[0] if isinstance(batch, list) else batch
            facts = (loader.batch_samples, loader.global_samples, loader.is_replay, loader.at_last)
            seen.append((batch.tolist(), *facts))
        return seen

    class Drawn(Sampler):
        def __iter__(self):  # type: ignore[no-untyped-def]
            return iter(torch.randperm(23).tolist())

        def __len__(self) -> int:
            return 23

    class Words(Sampler):
        def __iter__(self):  # type: ignore[no-untyped-def]
            return iter(random.sample([f"key {i}" for i in range(5)], 5))

        def __len__(self) -> int:
            return 5

    class ByWord(Dataset):
        def __getitem__(self, key: str) -> int:
            return int(key.split()[1])

    class Noisy(IterableDataset):
        def __iter__(self):  # type: ignore[no-untyped-def]
            for _ in range(5):
                yield torch.rand(())

    class Varying(IterableDataset):
        hotloop_sharded = True

        def __iter__(self):  # type: ignore[no-untyped-def]
            for n in range(2 + 3 * rank):
                yield torch.full((n + 1,), rank)

    def sharded() -> DataLoader[Any]:
        return DataLoader(TensorDataset(y), 4, sampler=DistributedSampler(y, seed=2))

    answer: dict[str, Any] = {}
    answer["shuffle"] = steps(make(DataLoader(TensorDataset(y), 4, shuffle=True)))
    answer["custom"] = steps(make(DataLoader(TensorDataset(y), 4, sampler=Drawn())))
    answer["words"] = steps(make(DataLoader(ByWord(), 1, sampler=Words())))
    answer["workers"] = steps(make(DataLoader(TensorDataset(y), 4, sampler=Drawn(), num_workers=1)))
    answer["sharded"] = steps(make(sharded()))
    before = torch.rand(()).item() if rank else 0.0
    answer["noisy"] = [batch.item() for batch in make(DataLoader(Noisy(), 1))]
    answer["own stream"] = (before, torch.rand(()).item())
    answer["varying"] = [(batch.shape, batch[0].item()) for batch in make(DataLoader(Varying(), None))]
    answer["noisy workers"] = [batch.item() for batch in make(DataLoader(Noisy(), 1, num_workers=1))]

    # in the middle of one loader, another is looped over and left on every rank
    train, held = make(DataLoader(TensorDataset(y), 2, shuffle=True)), make(DataLoader(TensorDataset(y), 3))
    mixed = []
    for number, (batch,) in enumerate(train):
        mixed.append([] if train.is_replay else batch.tolist())
        if number == 1:
            for _ in held:
                break
    answer["mixed"] = mixed

    loader = make(DataLoader(TensorDataset(y), 2, shuffle=True))
    it = iter(loader)
    head = [next(it)[0].tolist() for _ in range(3)]
    buffer = io.BytesIO()
    torch.save(loader.state_dict(), buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    tail = [batch[0].tolist() for batch in it]
    states = processes.gather_object(state)
    again = make(DataLoader(TensorDataset(y), 2, shuffle=True))
    again.load_state_dict(states[0])
    answer["resumed"] = (head, tail, [batch[0].tolist() for batch in again])

    try:
        list(make(DataLoader(TensorDataset(y[:3]), 4)))
    except DataError as error:
        answer["never"] = str(error)
    return answer


def _order(answers: list[Any], key: str) -> list[Any]:
    found = []
    for step in zip(*(answer[key] for answer in answers), strict=True):
        for samples, _, _, replay, _ in step:
            found.extend([] if replay else samples)
    return found


def test_two_processes_read_one_order(run_ranks: Any) -> None:
    answers = run_ranks(2, read_everything)
    first, second = answers
    for key in ("shuffle", "custom", "workers"):
        assert sorted(_order(answers, key)) == list(range(23))
        assert _order(answers, key) != list(range(23))
        assert len(first[key]) == len(second[key]) == 3
        assert [s[1:] for s in first[key]] == [
            (4, 8, False, False),
            (4, 8, False, False),
            (4, 7, False, True),
        ]
    assert sorted(_order(answers, "words")) == [0, 1, 2, 3, 4]
    assert [s[3] for s in second["words"]] == [False, False, True]
    # DistributedSampler pads 23 to 24; each rank keeps its own 12 and sees each of them once
    assert set(_order(answers, "sharded")) == set(range(23))
    assert [s[1] for s in first["sharded"]] == [s[1] for s in second["sharded"]] == [4, 4, 4]
    # 5 batches of one random stream: 0, 2, 4 here and 1, 3, and a replay of 3 there
    for key in ("noisy", "noisy workers"):
        assert len({*first[key], *second[key]}) == 5
        assert second[key][1] == second[key][2]
    assert first["own stream"] != second["own stream"]
    assert first["varying"] == [((1,), 0), ((2,), 0), ((2,), 0), ((2,), 0), ((2,), 0)]
    assert second["varying"] == [((n,), 1) for n in (1, 2, 3, 4, 5)]
    assert sorted(sum(first["mixed"] + second["mixed"], [])) == list(range(23))  # noqa: RUF017
    for answer in answers:
        _, tail, rest = answer["resumed"]
        assert rest == tail
    assert first["never"] == second["never"]
    assert "rank 1 of 2 never had a batch" in first["never"]


def leave_at_different_steps(rank: int, world: int) -> str:
    import torch
    from torch.utils.data import DataLoader

    from hotloop.data import Loader
    from hotloop.errors import DataError
    from hotloop.hardware.processes import find_processes

    processes = find_processes("cpu")
    loader = Loader(list(range(40)), device=torch.device("cpu"), processes=processes)
    other = Loader(DataLoader(torch.arange(8), 2), device=torch.device("cpu"), processes=processes)
    try:
        for number, _ in enumerate(loader):
            if number == 3 + rank:
                break
        list(other)
    except DataError as error:
        return str(error)
    return "nothing"


def test_ranks_that_part_ways_get_an_error_instead_of_each_other_s_data(run_ranks: Any) -> None:
    answers = run_ranks(2, leave_at_different_steps)
    assert any("went different ways" in answer for answer in answers)
