"""Arguments and results taken apart into tensors and everything else, and put together around other tensors.

Beside the structures that torch takes apart itself (tuples, lists, dicts, NamedTuples) these are mappings of any kind
and dataclasses.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from hotloop.capture.identities import MOST_ITEMS, SCALARS, alike
from hotloop.capture.reading import slots_of
from hotloop.nested import is_store, rebuilt

__all__ = ["Opened", "carried"]

# What torch never takes apart, and what is no mapping and no dataclass.
_SINGLE = {torch.Tensor, torch.nn.Parameter, bool, int, float, str, type(None)}
_DEPTH = 8


class _Node(NamedTuple):
    """An object that was opened: equal to that of another call where a recording may serve both.

    Attributes:
        at: which of the leaves around it it is.
        kind: its type.
        names: its keys, or its fields.
        others: names of attributes that it carries beside them.
        inner: the structure of its values; their number where each is one leaf.
        size: how many leaves came of it.
        nodes: opened objects among the leaves of its values.
    """

    at: int
    kind: type
    names: tuple[Any, ...]
    others: tuple[str, ...]
    inner: Any
    size: int
    nodes: tuple[_Node, ...]


class Opened:
    """A structure taken apart.

    Attributes:
        leaves: tensors, and what is neither a tensor nor taken apart.
        key: what the structure is but for its leaves; hashable.
        objects: mappings and dataclasses that torch leaves whole and that were opened, outer ones first.
        spec: torch's own description of it, in which such an object is one leaf.
        structure: what was taken apart.
    """

    __slots__ = ("_nodes", "key", "leaves", "objects", "spec", "structure")

    def __init__(self, structure: Any) -> None:
        self.structure = structure
        leaves, self.spec = tree_flatten(structure)
        self._nodes: tuple[_Node, ...] = ()
        self.objects: list[Any] = []
        if not _SINGLE.issuperset(map(type, leaves)) and any(map(_is_openable, map(type, leaves))):
            outer, leaves = leaves, []
            self._nodes = _open_all(outer, leaves, self.objects, 0)
        self.leaves: list[Any] = leaves
        self.key = (self.spec, self._nodes)

    def around(self, leaves: list[Any], *, anew: bool = False) -> Any:
        """The structure with other leaves.

        An object of which no leaf is another one is that object itself, unless it is to be made `anew`.

        Raises:
            TypeError: an object can be neither copied nor made anew.
        """
        if not self._nodes:
            return tree_unflatten(leaves, self.spec)
        outer = _close_all(
            self._nodes, self.spec.num_leaves, None if anew else self.leaves, leaves, 0, iter(self.objects)
        )
        return tree_unflatten(outer, self.spec)

    def parted(self) -> tuple[list[Any], list[Any]]:
        """Leaves of what torch takes apart, and leaves of the objects that were opened."""
        loose: list[Any] = []
        within: list[Any] = []
        at = outer = 0
        for node in self._nodes:
            begin = at + node.at - outer
            loose += self.leaves[at:begin]
            at, outer = begin + node.size, node.at + 1
            within += self.leaves[begin:at]
        return loose + self.leaves[at:], within

    def others(self) -> list[tuple[Any, dict[str, Any]]]:
        """Objects that carry attributes beside their items or fields, each with these."""
        found = [(thing, carried(thing, _contents(thing) or {})) for thing in self.objects]
        return [(thing, others) for thing, others in found if others]

    def seen(self) -> list[tuple[Any, list[Any]]]:
        """For each object what it holds now, to be compared by `changed`."""
        found = []
        for thing in self.objects:
            now = Opened([thing])
            values = carried(thing, _contents(thing) or {})
            found.append((now.key, [*now.leaves, *values.values()]))
        return found

    def changed(self, before: list[tuple[Any, list[Any]]]) -> type | None:
        """The type of the first object that holds something else than it did `before`."""
        for thing, (key, values), (now_key, now) in zip(self.objects, before, self.seen(), strict=True):
            if key != now_key or not all(map(_is_same, values, now)):
                return type(thing)
        return None

    def unfit(self) -> type | None:
        """The type of the first object that cannot be put together around other tensors; None if all can."""
        for thing in self.objects:
            whole = Opened([thing])
            others = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in whole.leaves]
            if not all(map(operator.is_, Opened([thing]).leaves, whole.leaves)):
                # what it holds is made anew whenever it is asked for
                return type(thing)
            try:
                again = Opened(whole.around(others))
            except Exception:
                # any class of the user's own
                return type(thing)
            kept = all(map(operator.is_, Opened([thing]).leaves, whole.leaves))
            if not kept or again.key != whole.key or not all(map(operator.is_, again.leaves, others)):
                return type(thing)
        return None


@functools.lru_cache(maxsize=4096)
def _is_openable(kind: Any) -> bool:
    if issubclass(kind, torch.Tensor | torch.nn.Module | type):
        return False
    return issubclass(kind, Mapping) or dataclasses.is_dataclass(kind)


@functools.lru_cache(maxsize=4096)
def _fields_of(kind: Any) -> tuple[str, ...]:
    return () if issubclass(kind, Mapping) else tuple(f.name for f in dataclasses.fields(kind))


def _contents(thing: Any) -> dict[Any, Any] | None:
    """Items or fields of an object; None for one that is left whole."""
    if isinstance(thing, Mapping):
        return dict(thing.items()) if len(thing) <= MOST_ITEMS else None
    kind: Any = type(thing)
    try:
        return {name: getattr(thing, name) for name in _fields_of(kind)}
    except AttributeError:
        return None


def carried(thing: Any, contents: Mapping[Any, Any]) -> dict[str, Any]:
    """Attributes of a mapping or a dataclass that are not its `contents`, its items or fields, in another guise."""
    kind: Any = type(thing)
    own: Mapping[str, Any] = thing.__dict__ if kind.__dictoffset__ else {}
    if own is thing:
        return {}
    slots = [name for name in slots_of(kind) if name not in _fields_of(kind)]
    if slots:
        own = {**own, **{s: getattr(thing, s) for s in slots if hasattr(thing, s)}}
    if not isinstance(thing, Mapping):
        return {name: value for name, value in own.items() if name not in contents}
    return {
        name: value
        for name, value in own.items()
        if not (name in contents and contents[name] is value) and not is_store(value, contents)
    }


def _open_all(outer: list[Any], leaves: list[Any], objects: list[Any], depth: int) -> tuple[_Node, ...]:
    """Add to `leaves` those of `outer`, with objects among them opened; returns what was opened."""
    nodes = []
    for at, leaf in enumerate(outer):
        kind: Any = type(leaf)
        node = _open(leaf, at, leaves, objects, depth) if _is_openable(kind) else None
        if node is None:
            leaves.append(leaf)
        else:
            nodes.append(node)
    return tuple(nodes)


def _open(thing: Any, at: int, leaves: list[Any], objects: list[Any], depth: int) -> _Node | None:
    contents = _contents(thing) if depth < _DEPTH else None
    if contents is None:
        return None
    begin, before = len(leaves), len(objects)
    objects.append(thing)
    values = list(contents.values())
    inner: Any = len(values)
    if not _SINGLE.issuperset(map(type, values)):
        values, inner = tree_flatten(values)
    nodes = _open_all(values, leaves, objects, depth + 1)
    made = leaves[begin:]
    if depth == 0 and not isinstance(thing, Mapping) and not any(isinstance(m, torch.Tensor) for m in made):
        # settings: known by which object it is, and by what the step reads of it
        del leaves[begin:], objects[before:]
        return None
    others = tuple(carried(thing, contents))
    return _Node(at, type(thing), tuple(contents), others, inner, len(made), nodes)


def _close_all(
    nodes: tuple[_Node, ...],
    count: int,
    old: list[Any] | None,
    new: list[Any],
    begin: int,
    objects: Iterator[Any],
) -> list[Any]:
    """The `count` leaves around objects, from `begin` on of the leaves within them; `old` ones are looked for."""
    outer: list[Any] = []
    for node in nodes:
        plain = node.at - len(outer)
        outer += new[begin : begin + plain]
        begin += plain
        outer.append(_close(node, old, new, begin, objects))
        begin += node.size
    return outer + new[begin : begin + count - len(outer)]


def _close(node: _Node, old: list[Any] | None, new: list[Any], begin: int, objects: Iterator[Any]) -> Any:
    thing = next(objects)
    end = begin + node.size
    number = isinstance(node.inner, int)
    count = node.inner if number else node.inner.num_leaves
    values = _close_all(node.nodes, count, old, new, begin, objects)
    if old is not None and all(map(operator.is_, old[begin:end], new[begin:end])):
        return thing
    if not number:
        values = tree_unflatten(values, node.inner)
    return rebuilt(thing, dict(zip(node.names, values, strict=True)))


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (isinstance(a, SCALARS) and isinstance(b, SCALARS) and alike(a, b))
