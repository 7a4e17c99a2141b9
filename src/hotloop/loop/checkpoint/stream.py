"""Files written once and checked in pieces: each piece of up to 64 MiB has a length and a CRC-32.

CRC-32 finds every burst of up to 32 flipped bits and costs less than the write itself (4 GB/s on one core
with zlib 1.2.13; blake2b manages 0.9). Pieces are read, and checked, by several threads, straight into the
memory that keeps the result, and they say where in a large file the damage is.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hotloop.errors import CheckpointError

__all__ = ["PIECE_BYTES", "PieceWriter", "check_pieces", "read_exactly", "read_pieces", "sync_folder"]

PIECE_BYTES = 64 << 20
_SCRATCH_BYTES = 8 << 20
_BUFFER_BYTES = 1 << 20


class PieceWriter:
    """A new file, written front to back, whose pieces are checksummed on the way; a context manager.

    `write` is what `torch.save` asks of a file. A write that raises makes `torch.save` raise an error of its
    own that hides the cause, so with `quiet=True` the first fault is kept, later writes do nothing, and
    `close` raises it. Faults are OSErrors that carry the file's name.
    """

    def __init__(self, path: Path, *, quiet: bool = False) -> None:
        self.path = path
        self.pieces: list[list[int]] = []
        self._quiet = quiet
        self._fault: OSError | None = None
        self._size_bytes = 0
        self._sum = 0
        self._file = path.open("xb", buffering=_BUFFER_BYTES)

    def __enter__(self) -> PieceWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        # After `close` there is nothing left to do; before it, whatever led here is the fault to tell.
        with contextlib.suppress(OSError):
            self._file.close()

    def write(self, data: Any) -> int:
        """Append `data` (bytes or a memoryview of them)."""
        view = memoryview(data).cast("B")
        size_bytes = len(view)
        if self._fault is None:
            try:
                while len(view):
                    part = view[: PIECE_BYTES - self._size_bytes]
                    self._append(part)
                    if self._size_bytes == PIECE_BYTES:
                        self.cut()
                    view = view[len(part) :]
            except OSError as fault:
                self._fault = self._named(fault)
                if not self._quiet:
                    raise self._fault from fault
        return size_bytes

    def write_piece(self, data: bytes) -> None:
        """Append `data` as a piece of its own, of any length, so that it can be checked before the rest."""
        self.cut()
        try:
            self._append(memoryview(data))
        except OSError as fault:
            raise self._named(fault) from fault
        self.cut()

    def cut(self) -> None:
        """End the current piece here."""
        if self._size_bytes:
            self.pieces.append([self._size_bytes, self._sum])
            self._size_bytes = self._sum = 0

    def flush(self) -> None:
        """Nothing: `close` makes the file durable."""

    def close(self) -> list[list[int]]:
        """Make the file durable and return [bytes, CRC-32] of every piece."""
        if self._fault is not None:
            raise self._fault
        self.cut()
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        except OSError as fault:
            raise self._named(fault) from fault
        return self.pieces

    def _append(self, part: memoryview) -> None:
        self._file.write(part)
        self._sum = zlib.crc32(part, self._sum)
        self._size_bytes += len(part)

    def _named(self, fault: OSError) -> OSError:
        return OSError(fault.errno, fault.strerror or str(fault), str(self.path))


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable, where the file system can."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # Some network file systems have no such thing; they make names durable by themselves.
        with contextlib.suppress(OSError):
            os.fsync(handle)
    finally:
        os.close(handle)


def read_exactly(handle: int, view: memoryview, offset: int) -> None:
    """Fill `view` from the file at `offset`.

    Raises:
        EOFError: the file ends before.
    """
    while len(view):
        count = os.preadv(handle, [view], offset)
        if count == 0:
            raise EOFError
        view, offset = view[count:], offset + count


def check_pieces(handle: int, pieces: Sequence[Sequence[int]], path: Path) -> None:
    """Read the file once and compare every piece's checksum.

    Raises:
        CheckpointError: names the file and the first piece that differs.
    """
    _each_piece(pieces, 0, lambda start, size: _sum_scratch(handle, start, size), path)


def read_pieces(
    handle: int, pieces: Sequence[Sequence[int]], start: int, views: Sequence[memoryview], path: Path
) -> None:
    """Fill `views`, which lie one after the other in the file from `start` on, and check the pieces there.

    Raises:
        CheckpointError: names the file and the first piece that differs.
    """
    ends = []
    position = start
    for view in views:
        position += len(view)
        ends.append(position)

    def fill(piece_start: int, size: int) -> int:
        total = 0
        position, stop = piece_start, piece_start + size
        index = bisect_right(ends, position)
        while position < stop:
            view = views[index]
            inside = position - (ends[index] - len(view))
            part = view[inside : inside + stop - position]
            read_exactly(handle, part, position)
            total = zlib.crc32(part, total)
            position += len(part)
            index += 1
        return total

    _each_piece(pieces, start, fill, path)


def _sum_scratch(handle: int, start: int, size: int) -> int:
    scratch = memoryview(bytearray(min(size, _SCRATCH_BYTES)))
    total = 0
    for offset in range(start, start + size, _SCRATCH_BYTES):
        part = scratch[: min(_SCRATCH_BYTES, start + size - offset)]
        read_exactly(handle, part, offset)
        total = zlib.crc32(part, total)
    return total


def _each_piece(
    pieces: Sequence[Sequence[int]], start: int, measure: Callable[[int, int], int], path: Path
) -> None:
    starts = []
    position = start
    for size, _ in pieces:
        starts.append(position)
        position += size
    sizes = [size for size, _ in pieces]
    try:
        if len(pieces) < 2:
            sums = list(map(measure, starts, sizes))
        else:
            with ThreadPoolExecutor(min(8, os.cpu_count() or 1, len(pieces))) as pool:
                sums = list(pool.map(measure, starts, sizes))
    except EOFError:
        raise CheckpointError(f"{path} is truncated: it ended while it was being read") from None
    for (size, expected), piece_start, found in zip(pieces, starts, sums, strict=True):
        if found != expected:
            raise CheckpointError(
                f"{path} is altered: the checksum of bytes {piece_start} to {piece_start + size} is "
                f"{found:08x}, the manifest says {expected:08x}"
            )
