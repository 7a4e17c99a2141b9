"""The log ring: values go in from the training thread without waiting, rows come out in a reader thread.

On an accelerator a row is a line of a device tensor that the training stream fills in its own time. On the
CPU a value is simply read: there is nothing to wait for.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from typing import Any, NamedTuple

import torch

from hotloop.errors import HotloopError

__all__ = ["DeviceRing", "HostRing", "Ring", "Row", "Value", "open_ring", "widest_float"]

Value = float | int | bool | str

_HOST_ROWS = 65_536
_FIRST_COLUMNS = 8
_READ_AS: dict[torch.dtype, type[float] | type[int] | type[bool]] = {
    torch.float16: float,
    torch.bfloat16: float,
    torch.float32: float,
    torch.float64: float,
    torch.uint8: int,
    torch.int8: int,
    torch.int16: int,
    torch.int32: int,
    torch.int64: int,
    torch.bool: bool,
}


class Row(NamedTuple):
    """One log call as its sinks see it.

    Attributes:
        step: the number given with the call.
        time_s: when the call was made, in seconds since 1970 (UTC).
        values: what was logged, as plain Python values in the order given.
    """

    step: int
    time_s: float
    values: dict[str, Value]


def open_ring(device: torch.device, capacity: int = 1024) -> Ring:
    """The ring for `device`: `HostRing` for the CPU, `DeviceRing` of `capacity` rows for all others."""
    return HostRing(max(capacity, _HOST_ROWS)) if device.type == "cpu" else DeviceRing(device, capacity)


def widest_float(device: torch.device) -> torch.dtype:
    """float64 where the device computes in it, else float32 (MPS, and XPU parts without it)."""
    if device.type == "mps":
        return torch.float32
    if device.type == "xpu" and not torch.xpu.get_device_properties(device).has_fp64:
        return torch.float32
    return torch.float64


class Ring(ABC):
    """Rows between one training thread (or several) and one reader at a time.

    A full ring refuses new rows, because the oldest may be on their way to the host already and would arrive
    torn; each refused row is counted in `dropped`.

    Attributes:
        capacity: how many rows may wait to be drained.
        dropped: how many rows were refused since the ring was made.
        lock: held by whoever makes device calls on behalf of the ring outside `write`; see `pause`.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise HotloopError(f"a log ring of {capacity} rows holds nothing; give it 1 or more")
        self.capacity = capacity
        self.dropped = 0
        self.lock = threading.RLock()
        self._write_lock = threading.Lock()
        self._pauses = 0

    @abstractmethod
    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Append the row (`step`, `values`) and return without waiting for the device.

        A value is a Python or numpy number, a bool, a string or a tensor of one element, of any real dtype
        and on any device.

        Raises:
            HotloopError: a value is none of these; the text names it.
        """

    @abstractmethod
    def drain(self) -> list[Row]:
        """All rows written before the call, oldest first; waits for the device: for a reader thread."""

    @abstractmethod
    def waiting(self) -> int:
        """How many rows wait to be drained."""

    def forget(self) -> None:
        """Empty the ring and renew its locks: for the child of a fork, whose parent owns the rows."""
        self.lock = threading.RLock()
        self._write_lock = threading.Lock()
        self._pauses = 0

    @contextmanager
    def pause(self) -> Iterator[None]:
        """No drain touches the device while the context is open; one that is under way is waited for.

        Graph capture needs this: a device call of another thread would end up in the graph or break it.
        """
        with self.lock:
            self._pauses += 1
            try:
                yield
            finally:
                self._pauses -= 1


class HostRing(Ring):
    """The ring of the CPU: tensors are read at once, rows wait in a queue of Python objects."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._rows: deque[tuple[int, float, dict[str, Value]]] = deque()

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """See `Ring.write`."""
        row: dict[str, Value] = {}
        for name, value in values.items():
            kind = type(value)
            if kind is torch.Tensor:
                try:
                    value = value.item()
                except RuntimeError:
                    raise _unloggable(name, value) from None
                kind = type(value)
            if kind is not float and kind is not int and kind is not bool and kind is not str:
                value = _to_plain(name, value)
            row[name] = value
        if len(self._rows) < self.capacity:
            self._rows.append((step, time.time(), row))
        else:
            with self._write_lock:
                self.dropped += 1

    def drain(self) -> list[Row]:
        """See `Ring.drain`; nothing is waited for."""
        rows = []
        with self.lock:
            for _ in range(len(self._rows)):
                rows.append(Row(*self._rows.popleft()))
        return rows

    def waiting(self) -> int:
        """See `Ring.waiting`."""
        return len(self._rows)

    def forget(self) -> None:
        """See `Ring.forget`."""
        super().forget()
        self._rows.clear()


class _Lines:
    """Device memory of `rows` x `columns` numbers, its pinned twin on the host, and a view of every cell."""

    def __init__(self, device: torch.device, rows: int, columns: int) -> None:
        self.columns = columns
        self.claimed = 0  # rows ever written here; the next one goes to line claimed % rows
        # Rows are written long after, and in another mode than, the moment of this call.
        with torch.inference_mode(False):
            self.data = torch.empty(rows, columns, dtype=widest_float(device), device=device)
            pinned = device.type in ("cuda", "xpu")
            self.host = torch.empty(rows, columns, dtype=self.data.dtype, pin_memory=pinned)
        self.cells = [line.unbind() for line in self.data.unbind()]


class _Pending(NamedTuple):
    """A row on its way: its host side, and where in which lines its device side will be."""

    lines: _Lines | None
    slot: int
    step: int
    time_s: float
    values: dict[str, Any]
    on_device: tuple[tuple[str, torch.dtype], ...]


class DeviceRing(Ring):
    """The ring of an accelerator: one device tensor [capacity, columns], one line for each row.

    `write` enqueues one copy kernel on the current stream (one multi-tensor copy for several values) and
    keeps names, step and whatever is on the host already beside it. Columns grow by taking new device memory
    when a row is wider than any before. Numbers travel as float64 (float32 where the device has no wider), so
    integers beyond 2^53 lose their last digits.
    """

    def __init__(self, device: torch.device, capacity: int = 1024) -> None:
        super().__init__(capacity)
        self.device = device
        self._pending: deque[_Pending] = deque()
        self._lines: _Lines | None = None
        self._in_flight = 0
        self._index = -1
        self._is_cuda = device.type == "cuda"
        self._is_cpu = device.type == "cpu"
        self._side: Any = None
        self._has_streams = device.type in ("cuda", "xpu")
        self._streams: dict[int, torch.Stream] = {}
        self._stream_key: int | None = None

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """See `Ring.write`."""
        row: dict[str, Any] = {}
        on_device: list[tuple[str, torch.dtype]] = []
        sources: list[torch.Tensor] = []
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and (not value.is_cpu or self._is_cpu):
                if value.dtype not in _READ_AS or value.numel() != 1:
                    raise _unloggable(name, value)
                source = value.detach()
                sources.append(source.reshape(()) if source.dim() else source)
                on_device.append((name, value.dtype))
                row[name] = None  # holds the place, so that values come out in the order given
            else:
                row[name] = value if type(value) in (float, int, bool, str) else _to_plain(name, value)
        with self._write_lock:
            if len(self._pending) + self._in_flight >= self.capacity:
                self.dropped += 1
                return
            lines, slot = None, 0
            if sources:
                lines = self._lines
                if lines is None or len(sources) > lines.columns:
                    lines = self._widen(len(sources))
                slot = lines.claimed % self.capacity
                cells = lines.cells[slot]
                if len(sources) == 1:
                    cells[0].copy_(sources[0], True)
                else:
                    torch._foreach_copy_(cells[: len(sources)], sources, True)
                lines.claimed += 1
                if self._has_streams:
                    self._mark_stream()
            # Last, so that a row seen by the reader has its copies on the stream already.
            self._pending.append(_Pending(lines, slot, step, time.time(), row, tuple(on_device)))

    def drain(self) -> list[Row]:
        """See `Ring.drain`: one bulk copy on a side stream, waited for without the interpreter's lock.

        In a `pause` nothing is fetched and the list is empty.
        """
        with self.lock:
            if self._pauses:
                return []
            with self._write_lock:
                taken = list(self._pending)
                self._pending.clear()
                self._in_flight = len(taken)
                streams = list(self._streams.values())
                self._streams.clear()
                self._stream_key = None
            try:
                self._fetch([pending for pending in taken if pending.lines is not None], streams)
                return [_read(pending) for pending in taken]
            except BaseException:
                self.dropped += len(taken)
                raise
            finally:
                with self._write_lock:
                    self._in_flight = 0

    def waiting(self) -> int:
        """See `Ring.waiting`."""
        return len(self._pending)

    def forget(self) -> None:
        """See `Ring.forget`."""
        super().forget()
        self._pending.clear()
        self._in_flight = 0

    def _widen(self, columns: int) -> _Lines:
        """Device memory for wider rows; rows in the old memory keep it alive until they are drained."""
        width = self._lines.columns if self._lines is not None else _FIRST_COLUMNS
        while width < columns:
            width *= 2
        self._lines = _Lines(self.device, self.capacity, width)
        self._index = self._lines.data.get_device()
        return self._lines

    def _mark_stream(self) -> None:
        """Remember the stream that the row just written is on: the reader must wait for it."""
        if self._is_cuda:
            # A tenth of the cost of building a Stream object for every row.
            key = torch._C._cuda_getCurrentRawStream(self._index)
            if key == self._stream_key:
                return
            self._stream_key = key
            self._streams[key] = torch.cuda.current_stream(self.device)
        else:
            stream = torch.accelerator.current_stream(self.device)
            self._streams[stream.stream_id] = stream

    def _fetch(self, rows: list[_Pending], streams: list[torch.Stream]) -> None:
        """Bring the lines of `rows` into pinned host memory and wait for them."""
        for _, group in groupby(rows, key=lambda pending: id(pending.lines)):
            members = list(group)
            lines = members[0].lines
            assert lines is not None
            first, last = members[0].slot, members[-1].slot
            # A span that wraps around is fetched as the whole ring: one copy of 64 KiB beats two small.
            span = slice(first, last + 1) if first <= last else slice(0, self.capacity)
            if not self._has_streams:
                lines.host[span].copy_(lines.data[span])
            else:
                self._copy_beside(lines, span, streams)

    def _copy_beside(self, lines: _Lines, span: slice, streams: list[torch.Stream]) -> None:
        """Copy `span` of `lines` on the side stream, behind all that is now on `streams`, and wait for it."""
        if self._side is None:
            self._side = torch.cuda.Stream(self.device) if self._is_cuda else torch.Stream(self.device)
        for stream in streams:
            event = self._event()
            event.record(stream)
            event.wait(self._side)
        with torch.cuda.stream(self._side) if self._is_cuda else self._side:
            lines.host[span].copy_(lines.data[span], non_blocking=True)
        event = self._event()
        event.record(self._side)
        event.synchronize()

    def _event(self) -> Any:
        """An event whose `synchronize` sleeps instead of spinning where the device offers that."""
        return torch.cuda.Event(blocking=True) if self._is_cuda else torch.Event(self.device)


def _read(pending: _Pending) -> Row:
    """The row once its lines are on the host."""
    if pending.lines is not None:
        numbers = pending.lines.host[pending.slot, : len(pending.on_device)].tolist()
        for (name, dtype), number in zip(pending.on_device, numbers, strict=True):
            pending.values[name] = _READ_AS[dtype](number)
    return Row(pending.step, pending.time_s, pending.values)


def _to_plain(name: str, value: Any) -> Value:
    """`value` as a Python number, bool or string, taken from numpy scalars and CPU tensors too."""
    if isinstance(value, str):
        return str(value)
    if hasattr(value, "item"):
        try:
            value = value.item()
        except (RuntimeError, ValueError):
            raise _unloggable(name, value) from None
    if isinstance(value, bool | int | float):
        return value
    raise _unloggable(name, value)


def _unloggable(name: str, value: Any) -> HotloopError:
    """The error for a value that is not one real number or string."""
    if isinstance(value, torch.Tensor):
        seen = f"a tensor of shape {list(value.shape)} and {value.dtype}"
        cure = "log one real number, for instance its mean()"
    elif hasattr(value, "shape"):
        seen = f"an array of shape {list(value.shape)}"
        cure = "log one real number, for instance its mean()"
    else:
        seen = f"{type(value).__name__} {value!r:.60}"
        cure = "log a number, a bool, a string or a tensor of one element"
    return HotloopError(f"the logged value {name!r} is {seen}; {cure}")
