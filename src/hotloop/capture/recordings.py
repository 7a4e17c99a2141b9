"""The recordings of one step that are kept, and which is given up where memory is short."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from hotloop.capture.entry import Entry
from hotloop.capture.graphs import Recorder
from hotloop.capture.reasons import megabytes

__all__ = ["Recordings"]

_MOST = 32
# A recording given up so often for memory is not made again: making it costs more than it saves.
_MOST_EVICTIONS = 2


class Recordings:
    """Entries by key; all recordings share one pool of memory.

    The pool goes back to the device only as a whole. So when one entry has to go, it is forgotten and all others are
    recorded anew, into a new pool, when they come next.

    Args:
        name: the step's, for lines.
        recorder: what made the recordings.
        most_bytes: what the pool may hold; None for whatever the device has.
        say: says a line.

    Attributes:
        evictions: how many were given up.
    """

    def __init__(
        self, name: str, recorder: Recorder, most_bytes: int | None, say: Callable[[str], None]
    ) -> None:
        self._name = name
        self._recorder = recorder
        self._most_bytes = most_bytes
        self._say = say
        self._entries: dict[Any, Entry] = {}
        self._given_up: Counter[Any] = Counter()
        self._clock = 0
        self.evictions = 0

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def find(self, key: Any) -> Entry | None:
        """The entry of `key`, which is used now."""
        entry = self._entries.get(key)
        if entry is not None:
            self.touch(entry)
        return entry

    def touch(self, entry: Entry) -> None:
        """`entry` is used now."""
        self._clock = entry.used = self._clock + 1

    def add(self, entry: Entry) -> None:
        """Keep `entry`; the one used least recently goes if there are too many."""
        self._entries[entry.key] = entry
        self.touch(entry)
        if self._given_up[entry.key] >= _MOST_EVICTIONS:
            self.refuse(entry, f"its recording was given up {_MOST_EVICTIONS} times for memory")
        if len(self._entries) > _MOST:
            oldest = min(self, key=lambda e: e.used)
            del self._entries[oldest.key]

    def keep_within(self, entry: Entry) -> bool:
        """After `entry` was recorded: give up others while all together hold too much; True if any was."""
        if self._most_bytes is None:
            return False
        held = self._recorder.pool_bytes()
        if held <= self._most_bytes:
            return False
        recorded = [e for e in self if e.recording is not None]
        others = [e for e in recorded if e is not entry]
        self.forget(recorded)
        allowed = megabytes(self._most_bytes)
        if not others:
            self.refuse(entry, f"its graph needs {megabytes(held)} and pool_bytes allows {allowed}")
            return True
        self._say(
            f"{self._name}: recordings hold {megabytes(held)} of the {allowed} allowed: the one used least recently "
            "is given up, the others are made anew"
        )
        self._give_up(min(others, key=lambda e: e.used))
        return True

    def make_room(self, entry: Entry, error: str) -> bool:
        """Memory ran out while `entry` was being recorded: True if others were given up for it."""
        others = [e for e in self if e.recording is not None and e is not entry]
        held = self._recorder.pool_bytes()
        entry.forget()
        self.forget(others)
        if others:
            self._say(f"{self._name}: memory ran out while recording; other recordings are made anew")
            self._give_up(min(others, key=lambda e: e.used))
            return True
        self.refuse(entry, f"its graph does not fit into memory: {megabytes(held)} held, and {error}")
        return False

    def refuse(self, entry: Entry, reason: str) -> None:
        """`entry` runs eagerly from now on."""
        entry.refused = reason
        self._say(f"{self._name} runs eagerly for one shape of its arguments: {reason}")

    def forget(self, entries: list[Entry]) -> None:
        """Give up the recordings of `entries`, and the pool."""
        recordings = [e.recording for e in entries if e.recording is not None]
        for e in entries:
            e.forget()
        self._recorder.drop_pool(recordings)

    def _give_up(self, entry: Entry) -> None:
        self.evictions += 1
        self._given_up[entry.key] += 1
        del self._entries[entry.key]
