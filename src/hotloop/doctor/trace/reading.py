"""A trace file read whole: header and events, through a window of a few MiB, with an account of all repairs."""

from __future__ import annotations

import gc
import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from hotloop.doctor.trace.columns import Builder, Events
from hotloop.doctor.trace.decode import Damage, Event, decode_events, walk_events
from hotloop.doctor.trace.lookalikes import name_lookalike
from hotloop.doctor.trace.stream import Source, TraceError, find_sources

__all__ = ["Recording", "Recovery", "read_recording", "read_recordings"]

_ARRAY = re.compile(rb'"traceEvents"\s*:\s*\[')
_BOUNDARY = re.compile(rb"\}\s*,\s*(?=\{)")
_END_OF_LIST = re.compile(rb"\}(\s*,?\s*\])\s*(?:,\s*\"|\}|\Z)")
_HEAD_BYTES = 64 * 2**20
_TAIL_BYTES = 32 * 2**20
_WINDOW = 2**16

Progress = Callable[[str, float, int], None]


@dataclass
class Recovery:
    """How sound the file was.

    Attributes:
        faults: sentences about the file as a whole (cut off, not compressed, no header).
        repaired: number of mended places by kind of damage.
        lost: events that could not be read. unclear: values that were no numbers, ends without a beginning.
    """

    faults: list[str] = field(default_factory=list)
    repaired: dict[str, int] = field(default_factory=dict)
    lost: int = 0
    unclear: int = 0

    @property
    def sound(self) -> bool:
        """Nothing had to be mended, and nothing is missing."""
        return not (self.faults or self.repaired or self.lost or self.unclear)

    def sentences(self) -> list[str]:
        """What a reader of the report must know, nothing if the file was sound."""
        told = list(self.faults)
        if self.repaired:
            told.append("mended: " + ", ".join(f"{count} x {kind}" for kind, count in self.repaired.items()))
        if self.lost:
            told.append(f"{self.lost} event{'s' if self.lost > 1 else ''} could not be read")
        if self.unclear:
            told.append(f"{self.unclear} values (times, phases) were missing or no numbers")
        return told


@dataclass
class Recording:
    """What one file holds.

    Attributes:
        name: the file's name. events: its slices as columns. header: the other top-level values of the file.
        recovery: what had to be mended. raw_bytes: size of the JSON text. seconds: how long reading took.
    """

    name: str
    events: Events
    header: dict[str, Any]
    recovery: Recovery
    raw_bytes: int
    seconds: float


def read_recordings(path: str | Path, progress: Progress | None = None) -> list[Recording]:
    """All traces under `path`: a file, a folder or tar archive of ranks.

    In a folder or archive, files that are no traces are left out if at least one is a trace.

    Raises:
        TraceError: nothing there is a trace; the text names what it is.
    """
    sources = find_sources(path)
    if len(sources) == 1:
        return [read_recording(sources[0], progress)]
    read, refused = [], []
    for source in sources:
        try:
            read.append(read_recording(source, progress))
        except TraceError as error:
            refused.append(str(error))
    if not read:
        raise TraceError(f"{path}: none of {len(sources)} files is a trace; the first: {refused[0]}")
    for text in refused:
        read[0].recovery.faults.append(f"left out: {text}")
    return read


def read_recording(source: Source, progress: Progress | None = None) -> Recording:
    """Read one trace.

    Args:
        source: where its bytes come from.
        progress: called now and then with (name, share of the file read 0..1, events so far).

    Raises:
        TraceError: it is no trace; the text names what it is.
    """
    began = time.perf_counter()
    with _no_collection():
        reader = _Reader(source, progress)
        reader.run()
    events = reader.builder.finish()
    recovery = Recovery(
        faults=list(source.faults) + reader.faults,
        repaired=reader.damage.repaired,
        lost=reader.damage.lost,
        unclear=reader.builder.unclear + reader.builder.unfinished,
    )
    if not events.count and not reader.builder.seen and (reader.damage.lost or not reader.bracket_closed):
        raise TraceError(f"{source.name} is no profiler trace: not one event could be read from it")
    return Recording(
        source.name, events, reader.header, recovery, reader.raw_bytes, time.perf_counter() - began
    )


@contextmanager
def _no_collection() -> Iterator[None]:
    """Millions of short-lived records and no cycles: the collector would only cost time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Reader:
    def __init__(self, source: Source, progress: Progress | None) -> None:
        self.source = source
        self.progress = progress
        self.builder = Builder()
        self.damage = Damage()
        self.faults: list[str] = []
        self.header: dict[str, Any] = {}
        self.raw_bytes = 0
        self.bracket_closed = False
        self._told = time.monotonic()

    def run(self) -> None:
        chunks = self._counted(self.source.chunks())
        rest = self._find_array(chunks)
        tail: bytes | None = None
        for chunk in chunks:
            if tail is not None:
                if len(tail) < _TAIL_BYTES:
                    tail += chunk
                continue
            rest += chunk
            cut = _last_boundary(rest)
            if cut < 0:
                continue
            body, rest = rest[:cut], rest[cut:]
            tail = self._take(body, rest)
            if tail is not None:
                rest = b""
            else:
                rest = rest.lstrip(b"} \r\n\t").removeprefix(b",") if not self._left else self._left + rest
                self._left = b""
            self._tell()
        if tail is None:
            tail = self._end(rest)
        self._read_tail(tail)

    _left = b""

    def _take(self, body: bytes, rest: bytes) -> bytes | None:
        """Add the events of `body`, which ends with an event's `}`; text after the list's end if that is in it."""
        events = decode_events(body + b"}")
        if events is not None:
            self.builder.add(events)
            return None
        events, left, tail = walk_events(body + b"}", self.damage, last=False)
        self.builder.add(events)
        if tail is not None:
            return tail[:-1] + rest
        # an unfinished event: its text belongs before what follows (the `}` is still there)
        self._left = left[:-1] if left else b""
        return None

    def _end(self, rest: bytes) -> bytes | None:
        """The last piece of the text, with the list's end in it unless the file was cut off."""
        events, tail = _split_end(rest)
        if events is None:
            events, tail = self._walk_end(rest)
        self.builder.add(events)
        if tail is None:
            self.faults.append("the text ends inside the list of events: the file was cut off")
        return tail

    def _walk_end(self, rest: bytes) -> tuple[list[Event], bytes | None]:
        """As `_end`, for text that is damaged: with the tail cut off first where its place is beyond doubt."""
        ends = list(_END_OF_LIST.finditer(rest))
        if len(ends) == 1:
            body, tail = rest[: ends[0].start() + 1], rest[ends[0].end(1) :]
            events, _, inner = walk_events(body, self.damage, last=True)
            return events, tail if inner is None else inner + tail
        events, _, found = walk_events(rest, self.damage, last=True)
        return events, found

    def _find_array(self, chunks: Iterator[bytes]) -> bytes:
        """Read up to the list of events; returns the text after its opening bracket."""
        text = b""
        for chunk in chunks:
            text += chunk
            start = text[:64].lstrip(b"\xef\xbb\xbf \t\r\n")
            if start[:1] == b"[" and len(text) > 64:
                return self._bare_list(text)
            found = _ARRAY.search(text)
            if found:
                self._read_head(text[: found.start()])
                return text[found.end() :]
            if len(text) > _HEAD_BYTES or (len(text) > 4096 and start[:1] not in (b"{", b"[")):
                break
        if text[:64].lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"[":
            return self._bare_list(text)
        what = name_lookalike(text[: 2**20], self.source.name, len(text))
        if what is None:
            keys = re.findall(rb'"([^"\\]{1,60})"\s*:', text[:4000])[:6]
            what = "JSON without `traceEvents`" + (
                f" (it has {', '.join(key.decode('utf-8', 'replace') for key in keys)})" if keys else ""
            )
            if self.source.faults:
                what += f"; {'; '.join(self.source.faults)}"
        raise TraceError(f"{self.source.name} is no profiler trace: it is {what}")

    def _bare_list(self, text: bytes) -> bytes:
        inside = text.split(b"[", 1)[1]
        if inside.lstrip()[:1] not in (b"{", b"]", b""):
            what = name_lookalike(text[: 2**20], self.source.name, len(text))
            raise TraceError(
                f"{self.source.name} is no profiler trace: it is {what or 'a JSON list, but not of events'}"
            )
        head = inside[:4000]
        if inside.lstrip()[:1] == b"{" and not re.search(rb'"(?:ph|ts|pid|tid)"\s*:', head):
            raise TraceError(
                f"{self.source.name} is no profiler trace: it is a JSON list whose objects are no events (no ph, ts)"
            )
        self.faults.append("a bare list of events without a header: device and versions are unknown")
        return inside

    def _read_head(self, text: bytes) -> None:
        self._merge(text.decode("utf-8", "replace").strip().removeprefix("\ufeff").rstrip(" \n\r\t,") + "}")

    def _read_tail(self, text: bytes | None) -> None:
        if text is None:
            return
        self.bracket_closed = True
        inside = text.decode("utf-8", "replace").strip().lstrip(",").strip()
        if inside and inside != "}":
            self._merge("{" + inside)

    def _merge(self, text: str) -> None:
        for attempt in (text, re.sub(r",(\s*[}\]])", r"\1", text), text + "}"):
            try:
                values = json.loads(attempt, strict=False)
            except (ValueError, RecursionError):
                continue
            if isinstance(values, dict):
                self.header.update(values)
                return
        self.damage.note("an unreadable header")

    def _counted(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        for chunk in chunks:
            self.raw_bytes += len(chunk)
            yield chunk

    def _tell(self) -> None:
        if self.progress is not None and time.monotonic() - self._told > 0.5:
            self._told = time.monotonic()
            size = self.source.size_bytes
            self.progress(
                self.source.name, min(1.0, self.source.read_bytes / size) if size else 0.0, self.builder.seen
            )


def _split_end(rest: bytes) -> tuple[list[Event] | None, bytes | None]:
    """(events, text after the closing bracket) of sound text with the list's end in it; (None, None) otherwise."""
    for found in islice(_END_OF_LIST.finditer(rest), 8):
        events = decode_events(rest[: found.start() + 1])
        if events is not None:
            return events, rest[found.end(1) :]
    return None, None


def _last_boundary(text: bytes) -> int:
    """Where the last `}` stands that is followed by `, {`; -1 if there is none."""
    for start in (max(0, len(text) - _WINDOW), 0):
        last = -1
        for found in _BOUNDARY.finditer(text, start):
            last = found.start()
        if last >= 0:
            return last
        if len(text) > 256 * 2**20:
            raise TraceError("256 MiB of text without the end of an event: this is no trace")
    return -1
