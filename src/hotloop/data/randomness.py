"""Random streams of fetching: one per batch, the same with any number of workers, and no trace left behind.

A dataset that draws random numbers (augmentation) gets streams of python, numpy and torch that depend on
the epoch's base seed and on the number of the batch in the global order, not on the process that fetches
it. In the main process the user's own streams are put back after each batch.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

__all__ = ["FetchStreams", "GlobalStreams", "batch_seed", "plain", "seed_streams", "unplain"]

_MASK = (1 << 64) - 1
_numpy: Any = np.random  # its stubs leave the two functions out that swap the generator
_KEY_WORDS = 624  # of the Mersenne Twister; its position follows them in memory


def _mix(value: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): every input bit moves every output bit."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def batch_seed(base: int, ordinal: int) -> int:
    """A 64-bit seed for batch `ordinal` (counted from 0 in the epoch's global order) under `base`."""
    return _mix((_mix(base & _MASK) + (ordinal + 1) * 0x9E3779B97F4A7C15) & _MASK)


def seed_streams(seed: int) -> None:
    """Seed the global streams of python, numpy and the CPU generator of torch from one 64-bit `seed`.

    numpy and torch use the same generator with 32-bit seeds, so each gets other bits of it.
    """
    random.seed(seed)
    np.random.seed(seed >> 32)
    torch.default_generator.manual_seed(seed & 0xFFFFFFFF)


class GlobalStreams:
    """The state of the three global CPU streams at one moment, cheap to take and to put back.

    `torch_only` leaves python and numpy out: torch's own samplers draw from torch alone.
    """

    __slots__ = ("numpy", "python", "torch")

    def __init__(self, torch_only: bool = False) -> None:
        self.torch: torch.Tensor = torch.default_generator.get_state()
        self.python: Any = None if torch_only else random.getstate()
        self.numpy: Any = None if torch_only else np.random.get_state(legacy=False)

    def put_back(self) -> None:
        """Make the global streams what they were."""
        torch.default_generator.set_state(self.torch)
        if self.python is not None:
            random.setstate(self.python)
        if self.numpy is not None:
            np.random.set_state(self.numpy)

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers and strings only."""
        state: dict[str, Any] = {"torch": self.torch}
        if self.python is not None:
            version, words, gauss = self.python
            state["python"] = [version, torch.tensor(words, dtype=torch.int64), gauss]
        if self.numpy is not None:
            state["numpy"] = plain(self.numpy)
        return state

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> GlobalStreams:
        """What `state_dict` described."""
        streams = cls.__new__(cls)
        streams.torch = state["torch"]
        python = state.get("python")
        streams.python = None if python is None else (python[0], tuple(python[1].tolist()), python[2])
        found = state.get("numpy")
        streams.numpy = None if found is None else unplain(found)
        return streams

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Within the block the global streams are these; after it, what they were before it."""
        before = GlobalStreams(torch_only=self.python is None and self.numpy is None)
        self.put_back()
        try:
            yield
        finally:
            before.put_back()


def plain(value: Any) -> Any:
    """`value` with numpy arrays as tagged tensors and wide integers as text, loadable with `weights_only`."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return {"__array__": str(value.dtype), "data": torch.from_numpy(value.astype(np.int64))}
    if isinstance(value, np.integer):
        value = int(value)
    if isinstance(value, np.floating):
        return float(value)
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 63:
        return {"__integer__": str(value)}
    return value


def unplain(value: Any) -> Any:
    """The inverse of `plain`."""
    if isinstance(value, dict):
        if "__array__" in value:
            return value["data"].numpy().astype(value["__array__"])
        if "__integer__" in value:
            return int(value["__integer__"])
        return {key: unplain(item) for key, item in value.items()}
    return value


class FetchStreams:
    """Runs a fetch under the streams of its batch in the main process, whose own ones are left as they were.

    Costs about 15 microseconds, most of it python's `getstate`. numpy's generator is swapped, not copied.
    The swap loses one thing, numpy's cached second normal value; whether there is one is asked for only if
    numpy's state moved since it was last known that there is none.
    """

    def __init__(self) -> None:
        self._own = np.random.MT19937(0)
        self._theirs: Any = None
        self._words: Any = None
        self._seen: tuple[int, int, int] | None = None

    def run(self, seed: int, function: Callable[..., Any], *arguments: Any) -> Any:
        """`function(*arguments)` with the global streams that `seed_streams(seed)` gives."""
        theirs = _numpy.get_bit_generator()
        cached = self._cached_normal(theirs)
        python = random.getstate()
        before = torch.default_generator.get_state()
        _numpy.set_bit_generator(self._own)
        try:
            seed_streams(seed)
            return function(*arguments)
        finally:
            torch.default_generator.set_state(before)
            random.setstate(python)
            _numpy.set_bit_generator(theirs)
            if cached is not None:
                np.random.set_state(cached)

    def _cached_normal(self, theirs: Any) -> Any:
        """numpy's whole state if it holds a cached normal value, which a swap would lose; else None."""
        if theirs is not self._theirs:
            self._theirs, self._seen, self._words = theirs, None, None
            if type(theirs) is np.random.MT19937:
                words = ctypes.c_uint32 * (_KEY_WORDS + 1)
                self._words = words.from_address(theirs.ctypes.state_address)
        words = self._words
        now = None if words is None else (words[_KEY_WORDS], words[0], words[1])
        if now is not None and now == self._seen:
            return None
        state: Any = np.random.get_state(legacy=False)
        if state["has_gauss"]:
            self._seen = None
            return state
        self._seen = now
        return None
