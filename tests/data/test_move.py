import dataclasses
import importlib
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from types import MappingProxyType

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from hotloop.data import count_samples, move
from hotloop.data.move import pin_tensor

Pair = namedtuple("Pair", ["x", "y"])
META = torch.device("meta")


@dataclasses.dataclass
class Open:
    x: torch.Tensor
    label: str = "a"


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    inner: Open
    made: int = dataclasses.field(default=3, init=False)


class Encoding(UserDict):
    """Like a tokenizer's output: a mapping with attributes and a `.to` of its own."""

    def __init__(self, data, note=None):
        super().__init__(data)
        self.note = note

    def to(self, device):
        raise AssertionError("its tensors are moved by us")


class Output(OrderedDict):
    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        self.__dict__[key] = value


class Named(list):
    name = None


class Own:
    def __init__(self, x):
        self.x = x

    def to(self, device):
        return Own(self.x.to(device))


class InPlace(Own):
    def to(self, device, non_blocking=False):
        self.x = self.x.to(device, non_blocking=non_blocking)


def t():
    return torch.ones(4, 2)


def test_types_and_other_attributes_are_kept():
    encoding = Encoding({"ids": t(), "text": ["a"]}, note="kept")
    named = Named([t(), 1])
    named.name = "kept"
    batch = {
        "plain": [t(), (t(), None, "text", 3.5)],
        "pair": Pair(t(), [t()]),
        "open": Open(t()),
        "frozen": Frozen(t(), Open(t(), "b")),
        "ordered": OrderedDict(a=t()),
        "default": defaultdict(list, a=t()),
        "encoding": encoding,
        "output": Output(logits=t()),
        "named": named,
        "own": Own(t()),
        "packed": pack_sequence([torch.ones(3, 2), torch.ones(2, 2)]),
        "view": MappingProxyType({"a": 1}),
    }
    moved = move(batch, META)
    assert type(moved) is dict
    assert list(moved) == list(batch)
    for key in batch:
        assert type(moved[key]) is type(batch[key]), key
    assert moved["plain"][0].device == META
    assert moved["plain"][1][1:] == (None, "text", 3.5)
    assert moved["pair"].y[0].device == META
    assert moved["open"].x.device == META
    assert moved["open"].label == "a"
    assert moved["frozen"].inner.x.device == META
    assert moved["frozen"].inner.label == "b"
    assert moved["frozen"].made == 3
    assert moved["default"].default_factory is list
    assert moved["encoding"]["ids"].device == META
    assert moved["encoding"].note == "kept"
    assert encoding["ids"].device.type == "cpu"
    assert moved["output"].logits.device == moved["output"]["logits"].device == META
    assert moved["named"].name == "kept"
    assert moved["named"][0].device == META
    assert moved["own"].x.device == META
    assert isinstance(moved["packed"], PackedSequence)
    assert moved["packed"].data.device == META
    assert moved["view"] is batch["view"]
    assert batch["plain"][0].device.type == "cpu"


def test_what_is_there_already_comes_back_as_the_same_object():
    for batch in (
        [t(), {"a": t()}],
        Pair(t(), 1),
        Frozen(t(), Open(t())),
        Encoding({"a": t()}),
        "x",
        3,
        None,
    ):
        assert move(batch, "cpu") is batch


def test_objects_that_move_themselves_in_place():
    own = InPlace(t())
    assert move([own], META)[0] is own
    assert own.x.device == META


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        (torch.ones(5, 2), 5),
        ([torch.ones(3), torch.ones(7)], 3),
        ({"scale": torch.tensor(1.0), "x": torch.ones(6, 1)}, 6),
        ({"text": ["a", "b"], "n": 3}, 2),
        ([["a", "b", "c"], ["d", "e", "f"]], 3),
        (["a", "b"], 2),
        ([torch.tensor(1.0), torch.tensor(2.0)], 2),
        (("a", torch.ones(4)), 4),
        (Pair(torch.ones(9), 0), 9),
        (Open(torch.ones(2)), 2),
        (Own(torch.ones(8)), 8),
        (torch.tensor(3.0), 1),
        ("text", 1),
        (7, 1),
    ],
    ids=str,
)
def test_samples_are_counted_on_the_first_tensor_or_list(batch, count):
    assert count_samples(batch) == count


@pytest.fixture
def page_locked(monkeypatch):
    """Page-locked memory is asked for by name, and is plain memory; what torch would pin itself is listed."""
    by_torch = []

    def new_pinned(shape, dtype, stride=None):
        made = torch.empty(shape, dtype=dtype)
        return made if stride is None else torch.empty_strided(shape, stride, dtype=dtype)

    # `hotloop.data.move` is the function
    monkeypatch.setattr(importlib.import_module("hotloop.data.move"), "new_pinned", new_pinned)
    monkeypatch.setattr("hotloop.data.fetch.new_pinned", new_pinned)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self, *_: (by_torch.append(self), self.clone())[1])
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self, *_: False)
    return by_torch


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64], ids=str
)
def test_pinning_without_torch_s_threads_copies_every_byte(dtype, page_locked):
    rows = torch.randint(0, 2**31, (40_000,)).to(dtype).reshape(200, 1, 200)
    found = pin_tensor(rows)
    assert page_locked == []
    assert torch.equal(found, rows)
    assert (found.dtype, found.stride()) == (dtype, rows.stride())
    assert found.data_ptr() != rows.data_ptr()


def test_what_one_thread_does_not_copy_torch_pins(page_locked):
    big = torch.zeros(2, 40_000)
    others = [
        torch.zeros(10),
        torch.zeros(2**20 + 1),
        torch.zeros(40_000, 2).t(),
        torch.zeros(40_000, requires_grad=True),
        torch.zeros(40_000, dtype=torch.complex64).conj(),
        nn.Parameter(big),
    ]
    for tensor in others:
        pin_tensor(tensor)
    assert len(page_locked) == len(others)
    assert all(a is b for a, b in zip(page_locked, others, strict=True))
    sparse = torch.eye(300).to_sparse()
    assert pin_tensor(sparse) is sparse
    assert len(page_locked) == len(others)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool], ids=str)
def test_rows_are_gathered_into_page_locked_memory(dtype, page_locked, monkeypatch):
    from torch.utils.data import TensorDataset, default_collate

    from hotloop.data.fetch import build_fetch

    rows = torch.randint(0, 100, (50, 20, 100)).to(dtype)
    data = TensorDataset(rows, torch.arange(50))
    fetch = build_fetch(data, default_collate, True, pinned=True)
    for indices in (list(range(20, 40)), [7] * 20, [49, 0] * 10, [-1, *range(19)]):
        wanted = default_collate([data[i] for i in indices])
        for a, b in zip(fetch(indices), wanted, strict=True):
            assert torch.equal(a, b)
            assert (a.dtype, a.stride()) == (b.dtype, b.stride())
    with pytest.raises(IndexError):
        fetch([50, *range(19)])
    selected = []
    select = torch.index_select
    monkeypatch.setattr(torch, "index_select", lambda *a, **k: (selected.append(a), select(*a, **k))[1])
    fetch(list(range(20)))
    assert [args[0].shape for args in selected] == [(50,)]
