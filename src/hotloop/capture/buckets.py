"""Batches of many lengths as batches of few: padded up to lengths chosen from those seen."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hotloop.capture.entry import describe
from hotloop.errors import SettingError

__all__ = ["Buckets", "Padding", "choose_lengths"]


@dataclass(frozen=True)
class Buckets:
    """How a captured step pads batches of variable length, so that few recordings serve them all.

    Every tensor argument whose size in `dim` is that of the first is padded at its end. What is padded must not count:
    give targets the value that the loss ignores (`pad=(0, -100)` for tokens and targets of a cross-entropy), or have
    the step take a mask and weigh by it. A loss that is a mean over what is not padded is then exact.

    Attributes:
        dim: the dimension whose length varies; a tensor without it is left as it is.
        pad: the value put into the padding: one for all arguments, or one for each that is padded, in order.
        most: at most so many lengths are used.
        mask: name of an argument of the step by which it is given which positions are real: a bool tensor
            [length] that is True at the first ones. None if it takes none.
        multiple: lengths are rounded up to multiples of this, but for the longest, which is never exceeded.
        longest: the longest length that there can be, if it is known: it is used from the beginning.
        after: so many calls run unpadded, to see lengths, before the lengths used are chosen.
        lengths: the lengths to use, if they are known beforehand; then none are chosen.
    """

    dim: int = 1
    pad: float | tuple[float, ...] = 0
    most: int = 6
    mask: str | None = None
    multiple: int = 8
    after: int = 32
    lengths: tuple[int, ...] = ()
    longest: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("dim", 0), ("most", 1), ("multiple", 1), ("after", 0)):
            if getattr(self, name) < least:
                raise SettingError(f"Buckets({name}={getattr(self, name)}): it has to be at least {least}")
        if any(length < 1 for length in (*self.lengths, 1 if self.longest is None else self.longest)):
            raise SettingError(
                f"Buckets(lengths={self.lengths}, longest={self.longest}): a length has to be at least 1"
            )
        if not self.lengths and self.after == 0:
            raise SettingError(
                "Buckets(after=0) has seen no lengths to choose from; give lengths=, or after >= 1"
            )


def choose_lengths(seen: Counter[int], most: int, multiple: int) -> list[int]:
    """At most `most` lengths, multiples of `multiple`, that pad the lengths `seen` by the least in sum.

    The last is the longest seen as it is: a model may take none that is longer. Exact, by dynamic programming over the
    distinct rounded lengths: O(most * n^2) for n of them.
    """
    rounded: Counter[int] = Counter()
    for length, count in seen.items():
        rounded[-(-length // multiple) * multiple] += count
    sizes = sorted(rounded)
    counts = [rounded[size] for size in sizes]
    total = [0]
    for count in counts:
        total.append(total[-1] + count)
    n = len(sizes)
    # best[k][j]: least sum of padded lengths of the first j sizes in at most k + 1 buckets, the last of which begins
    # at cut[k][j]
    best = [[0] + [sizes[j - 1] * total[j] for j in range(1, n + 1)]]
    cut = [[0] * (n + 1)]
    for _ in range(1, min(most, n)):
        last = best[-1]
        row, begins = [0], [0]
        for j in range(1, n + 1):
            cost, at = min((last[i] + sizes[j - 1] * (total[j] - total[i]), i) for i in range(j))
            row.append(cost)
            begins.append(at)
        best.append(row)
        cut.append(begins)
    chosen: list[int] = []
    j, k = n, len(best) - 1
    while j > 0:
        chosen.append(sizes[j - 1])
        j, k = cut[k][j], max(k - 1, 0)
    return [*sorted(chosen)[:-1], max(seen)]


class Padding:
    """Pads the arguments of one step.

    Attributes:
        lengths: those in use, ascending; empty until they are chosen.
        first: True until the longest has been recorded: everything is padded to it, so that the recordings of shorter
            ones find room in its memory.
    """

    def __init__(self, buckets: Buckets) -> None:
        self.buckets = buckets
        self.lengths: list[int] = sorted(set(buckets.lengths))
        self.first = True
        self.seen: Counter[int] = Counter()

    def length_of(self, leaves: Sequence[Any]) -> int | None:
        """The length of a batch: that of the first tensor that has the dimension."""
        dim = self.buckets.dim
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and leaf.dim() > dim:
                return leaf.size(dim)
        return None

    def choose(self, length: int) -> tuple[int, str | None]:
        """The length to pad to (`length` itself until lengths are chosen), and a line to say if they were just now."""
        self.seen[length] += 1
        said = None
        buckets = self.buckets
        if not self.lengths:
            if self.seen.total() <= buckets.after:
                return length, None
            # one is left for a longer batch to come
            most = buckets.most if buckets.longest is not None else max(buckets.most - 1, 1)
            self.lengths = self._choose(most)
            said = f"lengths of {self.seen.total()} batches seen are padded to {_listed(self.lengths)}"
        if length > self.lengths[-1]:
            if buckets.lengths or len(self.lengths) < buckets.most:
                self.lengths.append(length)
            else:
                self.lengths = self._choose(buckets.most)
            said = f"a batch of length {length} came: lengths are now padded to {_listed(self.lengths)}"
        if self.first:
            return self.lengths[-1], said
        return self.lengths[bisect.bisect_left(self.lengths, length)], said

    def _choose(self, most: int) -> list[int]:
        seen = self.seen
        if self.buckets.longest is not None:
            seen = seen + Counter({self.buckets.longest: 1})
        return choose_lengths(seen, most, self.buckets.multiple)

    def pad(self, leaves: Sequence[Any], length: int, to: int) -> list[Any]:
        """New tensors padded from `length` to `to`, and the mask behind them if there is one."""
        padded: list[Any] = []
        values = self._values(leaves, length)
        for leaf, value in zip(leaves, values, strict=True):
            if not self._is_padded(leaf, length) or length == to:
                padded.append(leaf)
                continue
            shape = list(leaf.shape)
            shape[self.buckets.dim] = to
            room = leaf.new_full(shape, value)
            room.narrow(self.buckets.dim, 0, length).copy_(leaf, non_blocking=True)
            padded.append(room)
        if self.buckets.mask is not None:
            device = next(leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor))
            padded.append(torch.arange(to, device=device) < length)
        return padded

    def fill(self, statics: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], length: int) -> None:
        """Write `tensors` and the padding behind them, and the mask, into `statics`, which are of one longer length."""
        dim = self.buckets.dim
        values = self._values(tensors, length)
        for static, tensor, value in zip(statics, tensors, values, strict=False):
            if not self._is_padded(tensor, length):
                static.copy_(tensor, non_blocking=True)
                continue
            static.narrow(dim, 0, length).copy_(tensor, non_blocking=True)
            if (rest := static.size(dim) - length) > 0:
                static.narrow(dim, length, rest).fill_(value)
        if self.buckets.mask is not None:
            statics[-1].narrow(0, 0, length).fill_(True)
            if (rest := statics[-1].size(0) - length) > 0:
                statics[-1].narrow(0, length, rest).fill_(False)

    def describe(self, leaf: Any, length: int, to: int) -> Any:
        """What of an argument a recording is for once it is padded."""
        if not self._is_padded(leaf, length):
            return describe(leaf)
        dim = self.buckets.dim
        return ((*leaf.shape[:dim], to, *leaf.shape[dim + 1 :]), leaf.dtype, leaf.device, leaf.requires_grad)

    def _is_padded(self, leaf: Any, length: int) -> bool:
        dim = self.buckets.dim
        return isinstance(leaf, torch.Tensor) and leaf.dim() > dim and leaf.size(dim) == length

    def _values(self, leaves: Sequence[Any], length: int) -> list[float]:
        pad = self.buckets.pad
        if not isinstance(pad, tuple):
            return [pad] * len(leaves)
        values = iter(pad)
        found: list[float] = []
        for leaf in leaves:
            value = next(values, None) if self._is_padded(leaf, length) else 0
            if value is None:
                raise SettingError(
                    f"Buckets(pad={pad}): more arguments of the step are padded than there are values for"
                )
            found.append(value)
        return found


def _listed(lengths: list[int]) -> str:
    return ", ".join(map(str, lengths))
