"""Structures of tensors: every container keeps its type and what else it carries."""

import dataclasses
from collections import OrderedDict, defaultdict, namedtuple
from types import MappingProxyType
from typing import Any

import torch

from hotloop.nested import map_tensors, tensors_of

Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass(frozen=True)
class Sample:
    x: torch.Tensor
    name: str
    more: Any = None


class Batch(dict):
    """A dict that carries something of its own, as tokenizers' batches do."""

    def __init__(self, *args, note="none", **kwargs):
        super().__init__(*args, **kwargs)
        self.note = note


def double(t):
    return 2 * t


def test_every_container_keeps_its_type():
    one = torch.ones(1)
    structure = {
        "list": [one, 3],
        "tuple": (one, "text"),
        "pair": Pair(one, None),
        "ordered": OrderedDict(b=one, a=one),
        "default": defaultdict(list, k=one),
        "sample": Sample(one, "n", [one]),
        "batch": Batch(x=one, note="kept"),
        "proxy": MappingProxyType({"x": one}),
        "set": {1, 2},
    }
    out = map_tensors(structure, double)
    assert out["list"] == [torch.tensor([2.0]), 3]
    assert type(out["pair"]) is Pair
    assert list(out["ordered"]) == ["b", "a"]
    assert type(out["ordered"]) is OrderedDict
    assert out["default"].default_factory is list
    assert out["sample"].more[0].item() == 2.0
    assert type(out["batch"]) is Batch
    assert out["batch"].note == "kept"
    assert out["proxy"]["x"].item() == 2.0
    assert out["set"] is structure["set"]
    # the original is as it was
    assert all(t.item() == 1.0 for t in tensors_of(structure))
    assert len(list(tensors_of(structure))) == len(list(tensors_of(out))) == 10


def test_what_does_not_change_is_the_same_object():
    structure = {"a": [torch.ones(1)], "b": Sample(torch.ones(1), "n"), "c": Pair(1, 2)}
    assert map_tensors(structure, lambda t: t) is structure
    changed = map_tensors(structure, lambda t: t if t is structure["a"][0] else 2 * t)
    assert changed is not structure
    assert changed["a"] is structure["a"]
