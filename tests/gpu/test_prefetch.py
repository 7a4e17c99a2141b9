"""Batches on their way to a real device: order, values, safe memory, and a host that never waits."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from hotloop.data import Loader
from hotloop.hardware import Processes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]

DEVICE = torch.device("cuda")


def load(source: Any, **settings: Any) -> Loader:
    return Loader(source, device=DEVICE, processes=Processes(), **settings)


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.full((1000,), float(index)), "y": (index, "text")}


SOURCES = {
    "tensors": lambda: DataLoader(TensorDataset(torch.arange(640.0).reshape(64, 10)), 4, shuffle=True),
    "pinned by the source": lambda: DataLoader(Rows(), 4, shuffle=True, pin_memory=True),
    "pageable": lambda: DataLoader(Rows(), 4, shuffle=True),
    "workers": lambda: DataLoader(Rows(), 4, shuffle=True, num_workers=2),
    "pinned by workers": lambda: DataLoader(Rows(), 4, shuffle=True, num_workers=2, pin_memory=True),
    "list": lambda: [torch.full((3,), float(i)) for i in range(10)],
}


def flatten(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    if isinstance(batch, dict):
        return {key: flatten(value) for key, value in batch.items()}
    return [flatten(item) for item in batch] if isinstance(batch, (list, tuple)) else batch


def devices(batch: Any) -> set[str]:
    if isinstance(batch, torch.Tensor):
        return {batch.device.type}
    items = batch.values() if isinstance(batch, dict) else batch
    return set().union(*(devices(item) for item in items if not isinstance(item, str)))


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("name", SOURCES)
def test_order_and_values_are_the_source_s(name: str, prefetch: int) -> None:
    torch.manual_seed(1)
    wanted = [flatten(batch) for _ in range(2) for batch in SOURCES[name]()]
    torch.manual_seed(1)
    loader = load(SOURCES[name](), prefetch=prefetch)
    got, last = [], []
    for _ in range(2):
        for batch in loader:
            assert devices(batch) == {"cuda"}
            got.append(batch)
            last.append(loader.at_last)
    assert [flatten(batch) for batch in got] == wanted
    assert sum(last) == 2


def test_memory_is_not_given_out_again_under_a_slow_consumer() -> None:
    """The host runs many batches ahead and drops each at once, while the device has not begun with it."""
    count, size = 60, 1 << 20
    loader = load([torch.full((size,), float(i)) for i in range(count)], prefetch=2)
    sums = torch.zeros(count, device=DEVICE, dtype=torch.float64)
    for i, batch in enumerate(loader):
        torch.cuda._sleep(5_000_000)
        sums[i] = batch.sum(dtype=torch.float64)
        del batch
    assert sums.tolist() == [float(i) * size for i in range(count)]


def test_host_memory_is_not_overwritten_before_it_is_copied() -> None:
    """Each batch is fetched into page-locked memory that the ones before it may have just left."""
    rows = torch.arange(256.0).repeat_interleave(1 << 16).reshape(256, -1)
    loader = load(DataLoader(TensorDataset(rows, torch.arange(256)), 4, shuffle=True), prefetch=3)
    wrong = torch.zeros((), device=DEVICE, dtype=torch.int64)
    for x, y in loader:
        torch.cuda._sleep(2_000_000)
        wrong += (x != y[:, None]).sum()
    assert wrong.item() == 0


def test_use_on_another_stream_is_safe() -> None:
    consumer = torch.cuda.Stream()
    sums = torch.zeros(30, device=DEVICE, dtype=torch.float64)
    consumer.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(consumer):
        for i, batch in enumerate(load([torch.full((1 << 18,), float(i)) for i in range(30)])):
            torch.cuda._sleep(5_000_000)
            sums[i] = batch.sum(dtype=torch.float64)
    consumer.synchronize()
    assert sums.tolist() == [float(i) * (1 << 18) for i in range(30)]


@pytest.mark.parametrize("name", ["tensors", "pageable", "list", "pinned by the source", "workers"])
def test_the_host_never_waits(name: str) -> None:
    loader = load(SOURCES[name](), prefetch=2)
    total = torch.zeros((), device=DEVICE)
    for _ in loader:  # the first epoch allocates page-locked memory
        pass
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in loader:
            found = batch["x"] if isinstance(batch, dict) else batch
            total += (found[0] if isinstance(found, list) else found).sum()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    wanted = {"tensors": sum(range(640)), "list": 3 * sum(range(10))}.get(name, 1000 * sum(range(64)))
    assert total.item() == wanted


@pytest.mark.parametrize("name", ["workers", "pinned by workers"])
def test_batches_of_workers_are_pinned_by_another_thread(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    here: list[bool] = []
    pin = torch.Tensor.pin_memory

    def pin_memory(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
        if not tensor.is_pinned():
            here.append(threading.current_thread() is threading.main_thread())
        return pin(tensor)

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    wanted = [flatten(batch) for batch in DataLoader(Rows(), 4)]
    source = DataLoader(Rows(), 4, num_workers=2, pin_memory=name != "workers")
    assert [flatten(batch) for batch in load(source)] == wanted
    assert len(here) == 2 * len(wanted)  # "x", and the numbers of "y"
    assert not any(here)


def test_no_thread_of_a_loader_touches_the_device_while_work_is_recorded() -> None:
    from hotloop.capture import CudaRecorder
    from hotloop.hardware.gate import RECORDING_GATE

    x = torch.zeros(4, device=DEVICE)

    def work() -> bool:
        x.add_(1)
        with RECORDING_GATE.passed() as free:
            return free

    _, free = CudaRecorder(DEVICE).record(work)
    assert not free
    with RECORDING_GATE.passed() as free:
        assert free


def test_the_copy_of_the_next_batch_does_not_queue_behind_the_work_on_this_one() -> None:
    it = iter(load([torch.full((4,), float(i)) for i in range(4)], prefetch=1))
    next(it)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second of work on the training stream
    busy = torch.cuda.Event()
    busy.record()
    it_batch = next(it)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        seen = it_batch.clone()
    side.synchronize()
    assert not busy.query()
    assert seen.tolist() == [1.0] * 4
    torch.cuda.synchronize()


@dataclasses.dataclass(frozen=True)
class Pair:
    x: torch.Tensor
    name: str


class Opaque:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def to(self, device: torch.device) -> Opaque:
        return Opaque(self.x.to(device))


def test_structures_and_objects() -> None:
    there = torch.ones(2, device=DEVICE)
    batches = [
        Pair(torch.ones(3), "a"),
        {"packed": pack_sequence([torch.ones(3), torch.ones(2)]), "own": Opaque(torch.ones(1)), "n": 1},
        [there],
    ]
    first, second, third = load(batches)
    assert type(first) is Pair
    assert first.x.is_cuda
    assert second["packed"].data.is_cuda
    assert second["own"].x.is_cuda
    assert third is batches[2]
    assert third[0] is there


def test_a_stream_reads_ahead_and_resumes_exactly() -> None:
    class Shuffled(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(torch.randperm(40).tolist())

    torch.manual_seed(2)
    loader = load(DataLoader(Shuffled(), 4), prefetch=3)
    seen = []
    for batch in loader:
        seen.append(batch.tolist())
        if len(seen) == 3:
            state, rng = loader.state_dict(), torch.get_rng_state()
    seen.extend(batch.tolist() for batch in loader)
    again = load(DataLoader(Shuffled(), 4), prefetch=3)
    torch.set_rng_state(rng)
    again.load_state_dict(state)
    got = [batch.tolist() for _ in range(2) for batch in again]
    assert got == seen[3:]
