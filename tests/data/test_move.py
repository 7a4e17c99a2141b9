import dataclasses
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from types import MappingProxyType

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from hotloop.data import count_samples, move

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
