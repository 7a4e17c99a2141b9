"""What a step is given and what it returns: may a recording stand for calls with the like of it?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from hotloop.capture.arguments import Opened
from hotloop.capture.entry import only_objects, only_tensors
from hotloop.capture.frozen import Frozen
from hotloop.capture.identities import SCALARS
from hotloop.capture.noting import noting
from hotloop.errors import CaptureError
from hotloop.nested import tensors_of

__all__ = ["Given", "Values", "why_not_taken"]

_NEW_NUMBERS_IN_A_ROW = 8
_FORMS = "its tensors, or a tuple, a mapping, a NamedTuple or a dataclass of them"


def why_not_taken(opened: Opened, frozen: Frozen) -> str | None:
    """Why a step cannot be recorded for such arguments; None if it can."""
    leaves = opened.leaves
    tensors = only_tensors(leaves)
    closed = next((o for o in only_objects(leaves) if _holds_tensors(o) or not frozen.watch(o)), None)
    if closed is not None:
        return (
            f"an argument is an object of type {type(closed).__name__}, which a replay would not look into: pass "
            f"{_FORMS}"
        )
    if any(tensor.requires_grad for tensor in tensors):
        return "an argument requires a gradient, which a replay would not hand on"
    if odd := next((t.layout for t in tensors if t.layout is not torch.strided), None):
        return f"an argument is a tensor of layout {odd}, which cannot be written anew"
    if (kind := opened.unfit()) is not None:
        return f"an argument of type {kind.__name__} cannot be built anew around other tensors"
    if not all(frozen.watch(type(thing)) for thing in opened.objects):
        return "arguments of so many types came that not all of them are looked into"
    others = opened.others()
    try:
        with noting([thing for thing, _ in others]):
            return None
    except (TypeError, AttributeError):
        # what is read of its objects will not be seen
        return _carried(type(others[0][0]), next(iter(others[0][1])))


class Values:
    """Python values among the arguments that a recording freezes: are they others in each call?

    Args:
        name: the step's.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._numbers: list[Any] = []
        self._within: list[Any] = []
        self._changes = self._changes_within = 0

    def settle(self) -> None:
        """There is a recording for those of this call."""
        self._changes = self._changes_within = 0

    def look(self, opened: Opened) -> str | None:
        """Those of a call that there is no recording for.

        Returns why the step has to run eagerly, where objects that it is given hold others each time.

        Raises:
            CaptureError: plain numbers are others each time.
        """
        loose, within = opened.parted()
        numbers = [leaf for leaf in loose if isinstance(leaf, int | float)]
        if numbers != self._numbers:
            self._numbers = numbers
            self._changes += 1
            if self._changes > _NEW_NUMBERS_IN_A_ROW:
                raise CaptureError(
                    f"{self._name}: an argument that is a Python number was another one in each of the last "
                    f"{_NEW_NUMBERS_IN_A_ROW} calls; a captured step freezes it. Pass it as a tensor, or keep it in "
                    "`loop.scalar(name)`"
                )
        values = [leaf for leaf in within if isinstance(leaf, SCALARS)]
        before, self._within = self._within, values
        if values == before:
            return None
        self._changes_within += 1
        if self._changes_within <= _NEW_NUMBERS_IN_A_ROW:
            return None
        new = next((b for a, b in zip(before, values, strict=False) if a != b), None)
        shown = "" if new is None else f", now {new!r},"
        return (
            f"what an argument of type {type(opened.objects[0]).__name__} holds beside tensors{shown} was something "
            f"else in each of the last {_NEW_NUMBERS_IN_A_ROW} calls, and a recording freezes it: pass it as a tensor, "
            "or leave it out"
        )


class Given:
    """Arguments of one call, and what it does to objects among them.

    Args:
        arguments: what the step is about to be called with.
    """

    def __init__(self, arguments: Any) -> None:
        self._opened = Opened(arguments)
        self._before = self._opened.seen()
        self._others = self._opened.others()
        self._reads: list[set[str]] = []

    @contextmanager
    def noting(self) -> Iterator[None]:
        """While it is open, it is noted what is read of objects beside their items or fields."""
        with noting([thing for thing, _ in self._others]) as self._reads:
            yield

    def why_not_replayed(self, result: Any, *, clone: bool) -> str | None:
        """Why a replay would not do to these objects, or not return, what the step has just done and returned.

        `clone`: each call is to get results of its own.
        """
        if (kind := self._opened.changed(self._before)) is not None:
            return (
                f"it changes an argument of type {kind.__name__}, its items or attributes, which a replay would not "
                "repeat: read it, or change a copy"
            )
        for (thing, others), read in zip(self._others, self._reads, strict=False):
            for name in others:
                if name in read or "__dict__" in read:
                    return _carried(type(thing), name)
        returned = Opened(result)
        further = returned.others()
        if clone:
            closed = [o for o in only_objects(returned.leaves) if _holds_tensors(o, 3)]
            closed += [thing for thing, others in further if _holds_tensors(list(others.values()), 3)]
            if closed:
                return (
                    f"it returns an object of type {type(closed[0]).__name__}, whose tensors the next replay would "
                    f"overwrite: return {_FORMS}"
                )
        if (kind := returned.unfit()) is not None:
            return f"what it returns, of type {kind.__name__}, cannot be built anew around other tensors"
        # it may be the argument itself, or a copy that carries what that of the recording's call carried
        alike = {type(thing) for thing, _ in self._others} & {type(thing) for thing, _ in further}
        if alike:
            return (
                f"it returns an object of type {alike.pop().__name__}, as an argument is: return its tensors"
            )
        return None


def _holds_tensors(thing: Any, depth: int = 1) -> bool:
    """Whether an object, one that is no module, holds tensors, or objects that do, `depth` of them deep."""
    if isinstance(thing, torch.nn.Module | type):
        return False
    values = list(getattr(thing, "__dict__", {}).values())
    if isinstance(thing, Mapping):
        values += thing.values()
    try:
        if any(True for _ in tensors_of(values)) or any(True for _ in tensors_of(thing)):
            return True
    except RecursionError:
        # one that holds itself: how far it was looked into says nothing
        return True
    inner = [i for v in values for i in (v if isinstance(v, list | tuple) else (v,))] if depth > 1 else []
    return any(_holds_tensors(i, depth - 1) for i in inner if hasattr(i, "__dict__"))


def _carried(kind: type, name: str) -> str:
    return (
        f"it may read the attribute {name!r} of an argument of type {kind.__name__}, which is no item and no field of "
        "it and which a recording would freeze: pass it beside it"
    )
