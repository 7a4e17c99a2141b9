"""Many tensors for one launch: their addresses and extents in tables on the device.

A launch that takes its tensors as arguments holds a few dozen at most. With the addresses in device memory one launch
takes all of them. The tables are made anew only where an address changes, and also while a CUDA graph is being
recorded: then on another stream, so that the graph finds them filled and does not fill them again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

__all__ = ["Blocks", "Table", "Tables", "beside_capture"]

_KEPT = 16


@contextmanager
def beside_capture(device: torch.device) -> Iterator[bool]:
    """Work issued while this is open is done now, not recorded; yields whether a recording is going on.

    The recording's own stream is left alone; the work is over when the context closes.
    """
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        yield False
        return
    aside = torch.cuda.Stream(device)
    with torch.cuda.stream(aside):
        yield True
    aside.synchronize()


class Blocks:
    """A list of tensors cut into blocks of `size` elements, one program of a launch each.

    Attributes:
        count: blocks in all.
        extents: int64 [3, blocks] on the device: which tensor, first element in it, elements from there to its end.
    """

    def __init__(self, numels: Sequence[int], size: int, device: torch.device) -> None:
        counts = [-(-numel // size) for numel in numels]
        self.count = sum(counts)
        self.extents = torch.empty(3, max(1, self.count), dtype=torch.int64, device=device)
        end = 0
        # kernels take the values along: no host memory is read, and nothing is waited for
        for i, (numel, count) in enumerate(zip(numels, counts, strict=True)):
            tensor, first, left = self.extents[:, end : end + count]
            end += count
            tensor.fill_(i)
            torch.arange(0, numel, size, out=first)
            left.copy_(numel - first)


class Table:
    """Addresses of the tensors in several roles: `pointers` int64 [roles, tensors] on the device.

    Attributes:
        aligned: every address is a multiple of 16 bytes, so that a program may load four numbers at a time.
        recorded: made while a graph was recorded, which reads it for ever.
    """

    def __init__(self, addresses: tuple[tuple[int, ...], ...], device: torch.device) -> None:
        self.aligned = not any(a % 16 for row in addresses for a in row)
        with beside_capture(device) as recorded:
            if recorded:
                # again by kernels: a copy's source would have to be pinned, which a recording forbids
                self.pointers = torch.empty(
                    len(addresses), len(addresses[0]), dtype=torch.int64, device=device
                )
                for row, values in zip(self.pointers, addresses, strict=True):
                    for place, value in zip(row, values, strict=True):
                        place.fill_(value)
            else:
                host = torch.tensor(addresses, dtype=torch.int64, pin_memory=device.type == "cuda")
                self.pointers = host.to(device, non_blocking=True)
        self.recorded = recorded


class Tables:
    """The tables of one list of tensors, by their addresses; the last few are kept, and all that graphs read.

    Whoever owns the tensors (an optimizer's step) holds one, and lets it live as long as graphs made with it.
    """

    def __init__(self) -> None:
        self._blocks: dict[tuple[tuple[int, ...], int, torch.device], Blocks] = {}
        self._tables: OrderedDict[tuple[tuple[int, ...], ...], Table] = OrderedDict()
        self._counters: dict[torch.device, torch.Tensor] = {}

    def blocks(self, tensors: Sequence[torch.Tensor], size: int) -> Blocks:
        """Blocks of `tensors`."""
        device = tensors[0].device
        key = (tuple(t.numel() for t in tensors), size, device)
        found = self._blocks.get(key)
        if found is None:
            with beside_capture(device):
                found = self._blocks[key] = Blocks(key[0], size, device)
        return found

    def table(self, roles: Sequence[Sequence[torch.Tensor]]) -> Table:
        """The table of `roles`, each a list of as many tensors; they must be dense and stay where they are."""
        key = tuple(tuple(map(torch.Tensor.data_ptr, row)) for row in roles)
        found = self._tables.get(key)
        if found is not None:
            self._tables.move_to_end(key)
            if found.recorded or not _capturing(roles[0][0].device):
                return found
            # a graph is about to read it for ever
            found.recorded = True
            return found
        found = self._tables[key] = Table(key, roles[0][0].device)
        if len(self._tables) > _KEPT:
            old = next((k for k, t in self._tables.items() if not t.recorded), None)
            if old is not None and old != key:
                del self._tables[old]
        return found

    def counter(self, device: torch.device) -> torch.Tensor:
        """int32 0-d, 0 between launches: by it the last program of a launch knows that it is the last."""
        found = self._counters.get(device)
        if found is None:
            with beside_capture(device):
                found = self._counters[device] = torch.zeros((), dtype=torch.int32, device=device)
        return found


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
