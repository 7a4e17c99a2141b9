"""What a sampler would have to remember so that the same order can be drawn again."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from hotloop.data.randomness import plain, unplain

__all__ = ["SamplerState", "samplers_of"]

_BUILT_IN = (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    DistributedSampler,
)
_SCALARS = (int, float, bool, str)


def samplers_of(source: Any) -> Iterator[tuple[str, Any]]:
    """The samplers of a loader with their paths, outermost first: batch sampler, sampler, what those wrap."""
    waiting = [("batch_sampler", getattr(source, "batch_sampler", None))]
    waiting.append(("sampler", getattr(source, "sampler", None)))
    seen: set[int] = set()
    while waiting:
        path, sampler = waiting.pop(0)
        if sampler is None or id(sampler) in seen or isinstance(sampler, (list, tuple, range)):
            continue
        seen.add(id(sampler))
        yield path, sampler
        for name in ("batch_sampler", "sampler"):
            inner = getattr(sampler, name, None)
            if inner is not None and path.count(".") < 4:
                waiting.append((f"{path}.{name}", inner))


class SamplerState:
    """The memory of a loader's samplers: their own `state_dict`, else generators and what changed in them.

    Of a sampler without `state_dict`, the generators it holds (torch, numpy, python) are remembered, and
    those plain attributes that changed since this object was made (an epoch, a counter): what was fixed at
    construction belongs to the script, which may have changed it on purpose.

    Attributes:
        built_in: all samplers are torch's own, which draw from torch's generators alone.
        stateful: some sampler has `state_dict` and `load_state_dict`.
    """

    def __init__(self, source: Any) -> None:
        self._source = source
        self._samplers = list(samplers_of(source))
        self.built_in = all(
            type(sampler) in _BUILT_IN or isinstance(sampler, (list, tuple, range))
            for _, sampler in self._samplers
        )
        self.stateful = any(_has_state(sampler) for _, sampler in self._samplers)
        self._at_first = {path: self._scalars(sampler) for path, sampler in self._samplers}

    def take(self) -> dict[str, Any]:
        """The state now: tensors, numbers, strings, and what the samplers' own `state_dict` hold."""
        state: dict[str, Any] = {}
        generator = getattr(self._source, "generator", None)
        if isinstance(generator, torch.Generator):
            state["generator"] = generator.get_state()
        for path, sampler in self._samplers:
            if _has_state(sampler):
                state[path] = {"state_dict": sampler.state_dict()}
                continue
            first = self._at_first[path]
            kept: dict[str, Any] = {}
            changed = {k: v for k, v in self._scalars(sampler).items() if k not in first or first[k] != v}
            if changed:
                kept["scalars"] = changed
            generators = {k: _generator_state(v) for k, v in _attributes(sampler) if _is_generator(v)}
            if generators:
                kept["generators"] = generators
            if kept:
                state[path] = kept
        return state

    def put(self, state: dict[str, Any]) -> None:
        """Give the samplers the state that `take` returned."""
        generator = getattr(self._source, "generator", None)
        if isinstance(generator, torch.Generator) and "generator" in state:
            generator.set_state(state["generator"])
        for path, sampler in self._samplers:
            kept = state.get(path, {})
            if "state_dict" in kept and _has_state(sampler):
                sampler.load_state_dict(kept["state_dict"])
            for name, value in kept.get("scalars", {}).items():
                setattr(sampler, name, value)
            for name, value in kept.get("generators", {}).items():
                target = getattr(sampler, name, None)
                if _is_generator(target):
                    _set_generator_state(target, value)

    def _scalars(self, sampler: Any) -> dict[str, Any]:
        if isinstance(sampler, DistributedSampler):
            return {"epoch": sampler.epoch}
        if type(sampler) in _BUILT_IN:
            return {}
        return {k: v for k, v in _attributes(sampler) if isinstance(v, _SCALARS)}


def _attributes(sampler: Any) -> list[tuple[str, Any]]:
    return list(getattr(sampler, "__dict__", {}).items())


def _has_state(sampler: Any) -> bool:
    return callable(getattr(sampler, "state_dict", None)) and callable(
        getattr(sampler, "load_state_dict", None)
    )


def _is_generator(value: Any) -> bool:
    kinds = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
    return isinstance(value, kinds)


def _generator_state(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, np.random.Generator):
        return plain(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return plain(value.get_state(legacy=False))
    version, words, gauss = value.getstate()
    return [version, torch.tensor(words, dtype=torch.int64), gauss]


def _set_generator_state(target: Any, state: Any) -> None:
    if isinstance(target, torch.Generator):
        target.set_state(state)
    elif isinstance(target, np.random.Generator):
        target.bit_generator.state = unplain(state)
    elif isinstance(target, np.random.RandomState):
        target.set_state(unplain(state))
    else:
        target.setstate((state[0], tuple(state[1].tolist()), state[2]))
