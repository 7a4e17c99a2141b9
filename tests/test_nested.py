"""Structures of tensors: every container keeps its type and what else it carries."""

import dataclasses
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Mapping, MutableMapping
from types import MappingProxyType
from typing import Any

import pytest
import torch

from hotloop.nested import map_tensors, rebuilt, tensors_of

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


class Attributes(dict):
    """A dict whose items are its attributes."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class Mirrored(dict):
    """A dict whose items are attributes, too."""

    def __init__(self, items):
        super().__init__(items)
        self.__dict__.update(items)


class Stored(Mapping):
    """A mapping whose items lie in an attribute, with another beside it."""

    def __init__(self, items, note="none"):
        self.items_of_mine, self.note = dict(items), note

    def __getitem__(self, key):
        return self.items_of_mine[key]

    def __iter__(self):
        return iter(self.items_of_mine)

    def __len__(self):
        return len(self.items_of_mine)


class Columns(MutableMapping):
    """A mapping whose items lie in two lists, which a copy shares."""

    def __init__(self, items=()):
        self.names, self.columns = [], []
        for name, column in dict(items).items():
            self[name] = column

    def __getitem__(self, key):
        return self.columns[self.names.index(key)]

    def __setitem__(self, key, value):
        if key not in self.names:
            self.names.append(key)
            self.columns.append(None)
        self.columns[self.names.index(key)] = value

    def __delitem__(self, key):
        self.columns.pop(self.names.index(key))
        self.names.remove(key)

    def __iter__(self):
        return iter(self.names)

    def __len__(self):
        return len(self.names)


class Itself(Sample):
    """A dataclass whose copy is the object itself."""

    def __copy__(self):
        return self


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


@pytest.mark.parametrize("kind", [UserDict, Stored, Columns, Attributes, Mirrored])
def test_a_mapping_is_built_anew_beside_the_one_given(kind):
    one = torch.ones(1)
    given = kind({"x": one, "n": 3})
    out = map_tensors(given, double)
    assert type(out) is kind
    assert dict(out) == {"x": torch.tensor([2.0]), "n": 3}
    assert given["x"] is one
    if kind in (Attributes, Mirrored):
        assert out.x is out["x"]
        assert given.x is one


def test_what_a_mapping_carries_beside_its_items_is_kept():
    given = Stored({"x": torch.ones(1)}, note="mine")
    assert map_tensors(given, double).note == "mine"


def test_an_object_that_cannot_be_copied_is_an_error_and_stays_as_it_is():
    one = torch.ones(1)
    given = Itself(one, "n")
    with pytest.raises(TypeError, match="the object itself"):
        rebuilt(given, {"x": double(one)})
    assert given.x is one
