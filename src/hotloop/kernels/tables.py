"""Many tensors for one launch: their addresses and extents in tables on the device.

A launch that takes its tensors as arguments holds a few dozen at most. With the addresses in device memory one launch
takes all of them. The tables are made anew only where an address changes, and also while a CUDA graph is being
recorded: then on another stream and in other memory, so that the graph finds them filled and never fills them again.
"""

from __future__ import annotations

import ctypes
import functools
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hotloop.errors import KernelError

__all__ = ["KINDS", "Blocks", "Table", "Tables", "beside_capture", "is_dense", "order_of"]

_KEPT = 16
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@contextmanager
def beside_capture(device: torch.device) -> Iterator[None]:
    """What is issued while this is open is done now, even while a graph is being recorded, and over when it closes.

    Memory taken inside is not the graph's. That matters: what the recording's own pool hands out may be memory that an
    earlier kernel of the graph writes to in every replay.
    """
    if not _capturing(device):
        yield
        return
    aside = _idle_stream(device)
    exchange = _exchange_mode()
    # a recording forbids its thread to allocate and to wait; this concerns another stream
    mode = ctypes.c_int(2)  # cudaStreamCaptureModeRelaxed
    exchange(ctypes.byref(mode))
    try:
        with torch.cuda.stream(aside):
            yield
        aside.synchronize()
    finally:
        exchange(ctypes.byref(mode))


def _idle_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream that is not being recorded: torch gives its 32 streams out in turn, those of the recording too."""
    for _ in range(64):
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            if not torch.cuda.is_current_stream_capturing():
                break
    return stream


@functools.cache
def _exchange_mode() -> Any:
    # the runtime library that torch has loaded: by its name the linker finds it again
    version = str(torch.version.cuda).partition(".")[0]
    return ctypes.CDLL(f"libcudart.so.{version}").cudaThreadExchangeStreamCaptureMode


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill one stretch of memory, in any order of dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def order_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides of the dimensions that have more than one element: equal for tensors with their elements in one order."""
    return tuple(stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1)


class Blocks:
    """A list of tensors cut into blocks of `size` elements, one program of a launch each.

    Attributes:
        count: blocks in all.
        extents: int64 [4, blocks] on the device: which tensor, first element in it, elements from there to its end, and
            its type: 0 float32, 1 bfloat16, 2 float16, 3 any other.
    """

    def __init__(
        self, numels: Sequence[int], dtypes: Sequence[torch.dtype], size: int, device: torch.device
    ) -> None:
        counts = [-(-numel // size) for numel in numels]
        self.count = sum(counts)
        end = 0
        with beside_capture(device):
            self.extents = torch.empty(4, max(1, self.count), dtype=torch.int64, device=device)
            # kernels take the values along: no host memory is read, and nothing is waited for
            for i, (numel, count) in enumerate(zip(numels, counts, strict=True)):
                tensor, first, left, kind = self.extents[:, end : end + count]
                end += count
                tensor.fill_(i)
                torch.arange(0, numel, size, out=first)
                left.copy_(first).neg_().add_(numel)
                kind.fill_(KINDS.get(dtypes[i], len(KINDS)))


class Table:
    """Addresses of the tensors in several roles: `pointers` int64 [roles, tensors] on the device.

    Attributes:
        aligned: every address is a multiple of 16 bytes, so that a program may load four numbers at a time.
        recorded: made while a graph was recorded, which reads it for ever.
    """

    def __init__(self, addresses: tuple[tuple[int, ...], ...], device: torch.device) -> None:
        self.aligned = not any(a % 16 for row in addresses for a in row)
        self.recorded = _capturing(device)
        if not self.recorded:
            host = torch.tensor(addresses, dtype=torch.int64, pin_memory=device.type == "cuda")
            self.pointers = host.to(device, non_blocking=True)
            return
        with beside_capture(device):
            self.pointers = torch.empty(len(addresses), len(addresses[0]), dtype=torch.int64, device=device)
            # kernels take the values along: pinning memory for a copy may look at events, which a recording forbids
            for row, values in zip(self.pointers, addresses, strict=True):
                for place, value in zip(row, values, strict=True):
                    place.fill_(value)


class Tables:
    """The tables of one list of tensors, by their addresses; the last few are kept, and all that graphs read.

    Whoever owns the tensors (an optimizer's step) holds one, and lets it live as long as graphs made with it.
    """

    def __init__(self) -> None:
        self._blocks: dict[tuple[Any, ...], Blocks] = {}
        self._tables: OrderedDict[tuple[tuple[int, ...], ...], Table] = OrderedDict()
        self._counters: dict[torch.device, torch.Tensor] = {}

    def blocks(self, tensors: Sequence[torch.Tensor], size: int) -> Blocks:
        """Blocks of `tensors`."""
        device = tensors[0].device
        numels, dtypes = tuple(t.numel() for t in tensors), tuple(t.dtype for t in tensors)
        key = (numels, dtypes, size, device)
        found = self._blocks.get(key)
        if found is None:
            found = self._blocks[key] = Blocks(numels, dtypes, size, device)
        return found

    def table(self, roles: Sequence[Sequence[torch.Tensor]]) -> Table:
        """The table of `roles`, each a list of as many tensors, which must stay where they are.

        Raises:
            KernelError: one is not dense, or the tensors of one place have their elements in different orders.
        """
        key = tuple(tuple(map(torch.Tensor.data_ptr, row)) for row in roles)
        found = self._tables.get(key)
        if found is not None:
            self._tables.move_to_end(key)
            if found.recorded or not _capturing(roles[0][0].device):
                return found
            # a graph is about to read it for ever
            found.recorded = True
            return found
        _check_memory(roles)
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


def _check_memory(roles: Sequence[Sequence[torch.Tensor]]) -> None:
    for place, tensors in enumerate(zip(*roles, strict=True)):
        orders = {order_of(t) for t in tensors if t.numel() > 1}
        if len(orders) > 1 or not all(map(is_dense, tensors)):
            raise KernelError(
                f"tensor {place} of shape {tuple(tensors[0].shape)}: its elements, those of its gradient and those of "
                f"its state must be dense and in one order; the strides are {sorted(orders)}"
            )


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
