"""Batches of workers are pinned by a thread of their own: torch's real one, in front of a stand-in for the device."""

import dataclasses
import threading
from collections import namedtuple
from contextlib import nullcontext

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from hotloop.data.workers import MapWorkers, StreamWorkers
from hotloop.hardware.gate import RECORDING_GATE

Named = namedtuple("Named", "x y")


@dataclasses.dataclass(frozen=True)
class Pair:
    x: torch.Tensor
    name: str


class Batches(Dataset):
    """A whole batch at each index, of many types; one of them fails."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        if index == 4:
            raise OSError("a bad sector")
        x = torch.full((3,), float(index))
        return (x, Pair(x + 1, "a"), Named(x + 2, "b"), {"x": [x + 3, ("c", x + 4)]}, index)


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(range(7))


def pair(samples):
    return Pair(torch.tensor(samples), "own")


@pytest.fixture
def pinned(monkeypatch):
    """(thread, values) of each tensor pinned, on a computer that seems to have an accelerator."""
    log = []

    def pin_memory(tensor, *_):
        log.append((threading.current_thread(), tensor.tolist()))
        return tensor.clone()

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    return log


def as_it_is(batch):
    return batch


def batches(indices, pins=True, **settings):
    source = DataLoader(Batches(), batch_size=None, num_workers=2, collate_fn=as_it_is, **settings)
    tickets = ((index, None, None) for index in indices)
    return MapWorkers(source, pins).batches(tickets, 0)


def plain(value):
    """Types and values of a batch, tensors as lists."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, Pair):
        return (Pair, plain(value.x), value.name)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return (type(value), [plain(v) for v in value]) if isinstance(value, (list, tuple)) else value


def test_another_thread_pins_every_tensor_and_types_and_order_stay(pinned):
    found = [plain(batch) for batch in batches([3, 0, 5, 1])]
    assert found == [plain(Batches()[index]) for index in (3, 0, 5, 1)]
    assert all(thread is not threading.main_thread() for thread, _ in pinned)
    wanted = [[index + add] * 3 for index in (3.0, 0.0, 5.0, 1.0) for add in range(5)]
    assert sorted(values for _, values in pinned) == sorted(wanted)


def test_nothing_is_pinned_where_that_was_not_asked_for(pinned):
    found = [plain(batch) for batch in batches([3, 0], pins=False)]
    assert found == [plain(Batches()[index]) for index in (3, 0)]
    assert pinned == []


def test_who_asked_torch_to_pin_gets_what_torch_makes_of_it(pinned):
    from torch.utils.data._utils.pin_memory import pin_memory

    (found,) = batches([2], pin_memory=True)
    assert pinned
    assert all(thread is not threading.main_thread() for thread, _ in pinned)
    assert plain(found) == plain(pin_memory(Batches()[2]))


def test_while_something_is_recorded_batches_come_as_they_are(pinned):
    with RECORDING_GATE.closed():
        it = batches([0, 1])
        assert [plain(batch) for batch in it] == [plain(Batches()[index]) for index in (0, 1)]
    assert pinned == []
    assert plain(next(batches([2]))) == plain(Batches()[2])
    assert pinned


class Whole:
    """A batch that only its own method can pin."""

    def __init__(self, x):
        self.x, self.pins = x, 0

    def pin_memory(self):
        self.pins += 1
        self.x = self.x.pin_memory()
        return self


def whole(samples):
    return Whole(torch.tensor(samples))


@pytest.mark.parametrize("recorded", [False, True], ids=["free", "recorded"])
def test_a_batch_that_pins_itself_is_asked_to_once(pinned, recorded):
    source = DataLoader(Numbers(), 3, num_workers=1, collate_fn=whole, pin_memory=True)
    with RECORDING_GATE.closed() if recorded else nullcontext():
        found = list(StreamWorkers(source, pins=True).batches(0, 0))
    assert [(batch.x.tolist(), batch.pins) for batch in found] == [([0, 1, 2], 1), ([3, 4, 5], 1), ([6], 1)]
    assert all((thread is threading.main_thread()) == recorded for thread, _ in pinned)
    assert len(pinned) == 3


@pytest.mark.filterwarnings(
    "ignore:'pin_memory' argument is set as true but not supported on MPS:UserWarning"
)
def test_batches_come_as_they_are_where_torch_pins_nothing(pinned, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device("mps"))
    found = [plain(batch) for batch in batches([3, 0], pin_memory=True)]
    assert found == [plain(Batches()[index]) for index in (3, 0)]
    assert pinned == []


def test_a_worker_s_error_comes_in_its_turn(pinned):
    it = batches([0, 4, 1])
    assert plain(next(it)) == plain(Batches()[0])
    with pytest.raises(OSError, match="a bad sector"):
        next(it)
    assert list(it) == []


def test_an_error_in_pinning_comes_in_its_turn(pinned, monkeypatch):
    before = torch.Tensor.pin_memory

    def refuse(tensor, *rest):
        if tensor.tolist() == [1.0] * 3:
            raise RuntimeError("no memory to lock")
        return before(tensor, *rest)

    monkeypatch.setattr(torch.Tensor, "pin_memory", refuse)
    it = batches([5, 1])
    assert plain(next(it)) == plain(Batches()[5])
    with pytest.raises(RuntimeError, match="no memory to lock"):
        next(it)


def test_a_stream_s_batches_keep_what_their_collate_made(pinned):
    source = DataLoader(Numbers(), 3, num_workers=1, collate_fn=pair)
    found = [plain(batch) for batch in StreamWorkers(source, pins=True).batches(0, 0)]
    assert found == [(Pair, part, "own") for part in ([0, 1, 2], [3, 4, 5], [6])]
    assert [values for _, values in pinned] == [[0, 1, 2], [3, 4, 5], [6]]
    assert all(thread is not threading.main_thread() for thread, _ in pinned)
