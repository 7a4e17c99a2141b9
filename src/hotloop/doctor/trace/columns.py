"""Events as columns: numpy arrays and interned texts, filled a chunk at a time, so that memory stays flat."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from hotloop.doctor.trace.decode import Event

__all__ = ["Builder", "Category", "Events", "Interned"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


_MONTH_US = 30 * 86400e6


class Category:
    """What an event is, whatever the file calls it."""

    OTHER = 0
    KERNEL = 1
    MEMCPY = 2
    MEMSET = 3
    RUNTIME = 4
    OP = 5
    PYTHON = 6
    ANNOTATION = 7
    DEVICE_ANNOTATION = 8
    SYNC = 9
    OVERHEAD = 10
    WHOLE = 11

    NAMES = (
        "other", "kernel", "gpu_memcpy", "gpu_memset", "cuda_runtime", "cpu_op", "python_function", "user_annotation",
        "gpu_user_annotation", "cuda_sync", "overhead", "Trace",
    )  # fmt: skip


_CATEGORIES = {
    "kernel": Category.KERNEL,
    "concurrent_kernel": Category.KERNEL,
    "gpu_memcpy": Category.MEMCPY,
    "memcpy": Category.MEMCPY,
    "gpu_memset": Category.MEMSET,
    "memset": Category.MEMSET,
    "cuda_runtime": Category.RUNTIME,
    "cuda_driver": Category.RUNTIME,
    "runtime": Category.RUNTIME,
    "hip_runtime": Category.RUNTIME,
    "hip_driver": Category.RUNTIME,
    "xpu_runtime": Category.RUNTIME,
    "xpu_driver": Category.RUNTIME,
    "privateuse1_runtime": Category.RUNTIME,
    "cpu_op": Category.OP,
    "operator": Category.OP,
    "python_function": Category.PYTHON,
    "python": Category.PYTHON,
    "user_annotation": Category.ANNOTATION,
    "gpu_user_annotation": Category.DEVICE_ANNOTATION,
    "cuda_sync": Category.SYNC,
    "overhead": Category.OVERHEAD,
    "trace": Category.WHOLE,
}


class Interned(dict[Any, int]):
    """Number of each text, given at its first use; `texts` lists them."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[Any] = []

    def __missing__(self, key: Any) -> int:
        number = len(self.texts)
        self.texts.append(key)
        self[key] = number
        return number


_COLUMNS: dict[str, tuple[str, float]] = {
    "start_us": ("f8", np.nan),
    "duration_us": ("f8", 0),
    "name": ("i4", -1),
    "category": ("i1", 0),
    "thread": ("i4", -1),
    "correlation": ("i8", -1),
    "external": ("i8", -1),
    "stream": ("i4", -1),
    "device": ("i2", -1),
    "bytes": ("f4", 0),
    "shapes": ("i4", -1),
    "sequence": ("i4", -1),
}


@dataclass
class Events:
    """The slices of one trace, sorted by start (the longer one first where two start together).

    All arrays have length `count`. Times are microseconds since the first event (`origin_us` in the file's clock);
    -1 means not given.

    Attributes:
        start_us, duration_us: float64.
        name: int32 into `names`. category: int8, see `Category`. thread: int32 into `threads`, (pid, tid).
        correlation: int64, joins a runtime call with what it started on the device.
        external: int64, joins device events and runtime calls with the operator.
        stream: int32, device: int16, bytes: float32 (copies and memsets).
        shapes: int32 into `texts`: input shapes and types of an operator, as JSON text.
        sequence: int32, joins a backward operator with its forward one.
        details: rare values by row: blocks, threads, blocks_per_sm, occupancy, collective, stack, kind, waits_for.
    """

    start_us: Floats
    duration_us: Floats
    name: npt.NDArray[np.int32]
    category: npt.NDArray[np.int8]
    thread: npt.NDArray[np.int32]
    correlation: Ints
    external: Ints
    stream: npt.NDArray[np.int32]
    device: npt.NDArray[np.int16]
    bytes: npt.NDArray[np.float32]
    shapes: npt.NDArray[np.int32]
    sequence: npt.NDArray[np.int32]
    names: list[str]
    texts: list[Any]
    threads: list[tuple[Any, Any]]
    process_labels: dict[Any, str]
    thread_names: dict[tuple[Any, Any], str]
    kernel_rows: npt.NDArray[np.int64]
    kernel_facts: npt.NDArray[np.float32]
    details: dict[str, dict[int, Any]]
    origin_us: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """How many slices there are."""
        return len(self.start_us)

    @property
    def end_us(self) -> Floats:
        """`start_us + duration_us`."""
        return self.start_us + self.duration_us

    def rows(self, *categories: int) -> Ints:
        """Row numbers of the events of these categories, in time order."""
        mask = np.zeros(self.count, dtype=bool)
        for category in categories:
            mask |= self.category == category
        return np.flatnonzero(mask)

    def name_of(self, row: int) -> str:
        """The name of one event."""
        return self.names[self.name[row]]

    def names_matching(self, pattern: str) -> npt.NDArray[np.bool_]:
        """For each entry of `names`, whether the regular expression occurs in it."""
        search = re.compile(pattern).search
        return np.fromiter(
            (search(name) is not None for name in self.names), dtype=bool, count=len(self.names)
        )

    def to_arrow(self) -> Any:
        """All columns as a pyarrow table, names and categories as dictionaries.

        Raises:
            ImportError: pyarrow is not installed.
        """
        import pyarrow  # type: ignore[import-not-found, import-untyped, unused-ignore]

        columns = {
            name: pyarrow.array(getattr(self, name)) for name in _COLUMNS if name not in ("name", "category")
        }
        columns["name"] = pyarrow.DictionaryArray.from_arrays(self.name, pyarrow.array(self.names))
        columns["category"] = pyarrow.DictionaryArray.from_arrays(
            self.category, pyarrow.array(list(Category.NAMES))
        )
        return pyarrow.table(columns)


class Builder:
    """Takes event records in chunks and ends as `Events`."""

    def __init__(self) -> None:
        self._names = Interned()
        self._raw_categories = Interned()
        self._texts = Interned()
        self._threads = Interned()
        self._parts: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in _COLUMNS}
        self._category_of: list[int] = []
        self._kernel_rows = array("q")
        self._kernel_facts = array("f")
        self._details: dict[str, dict[int, Any]] = {}
        self._labels: dict[Any, str] = {}
        self._thread_names: dict[tuple[Any, Any], str] = {}
        self._open: dict[tuple[Any, Any], list[tuple[Any, Any, float]]] = {}
        self._size = 0
        self._origin: float | None = None
        self.counts: dict[str, int] = {}
        self.unclear = 0
        self.unfinished = 0

    def add(self, events: list[Event]) -> None:
        """Append event records; those that are no slices are counted, or used for names of processes and threads."""
        rows = [event for event in events if event.ph == "X"]
        if len(rows) != len(events):
            rows += self._others(event for event in events if event.ph != "X")
        if not rows:
            return
        base = self._size
        count = len(rows)
        start = self._numbers([event.ts for event in rows])
        if self._origin is None:
            finite = start[np.isfinite(start)]
            self._origin = float(np.median(finite)) if len(finite) else None
        duration = self._numbers([event.dur for event in rows])
        # no recording lasts a month: such a time is damage, and would stretch every axis
        bad = ~(np.abs(start - (self._origin or 0.0)) < _MONTH_US)
        self.unclear += int(bad.sum()) + int((~np.isfinite(duration)).sum())
        duration = np.where((duration > 0) & (duration < _MONTH_US), duration, 0.0)
        names, threads, categories = self._names, self._threads, self._raw_categories
        try:
            name = np.array([names[event.name] for event in rows], dtype=np.int32)
            raw = np.array([categories[event.cat] for event in rows], dtype=np.int32)
            thread = np.array([threads[event.pid, event.tid] for event in rows], dtype=np.int32)
        except TypeError:  # lists or objects where a name should be
            name = np.array([names[_hashable(event.name)] for event in rows], dtype=np.int32)
            raw = np.array([categories[_hashable(event.cat)] for event in rows], dtype=np.int32)
            thread = np.array(
                [threads[_hashable(event.pid), _hashable(event.tid)] for event in rows], dtype=np.int32
            )
        for text in categories.texts[len(self._category_of) :]:
            self._category_of.append(_category(text))
        category = np.array(self._category_of, dtype=np.int8)[raw]
        if (category == Category.OTHER).any():
            for number in np.unique(raw[category == Category.OTHER]).tolist():
                kind = f"X:{categories.texts[number]}"
                self.counts[kind] = self.counts.get(kind, 0) + int((raw == number).sum())
        values: dict[str, npt.NDArray[Any]] = {
            "start_us": start - (self._origin or 0.0),
            "duration_us": duration,
            "name": name,
            "category": category,
            "thread": thread,
        }
        for column, (kind, fill) in _COLUMNS.items():
            if column not in values:
                values[column] = np.full(count, fill, dtype=kind)
        self._joins(rows, category, values, base)
        if bad.any():
            self._keep(values, ~bad, base)
        else:
            for column, part in values.items():
                self._parts[column].append(part)
            self._size += count

    def _keep(self, values: dict[str, npt.NDArray[Any]], good: npt.NDArray[np.bool_], base: int) -> None:
        """Append only the rows with a time; details of the rows after a missing one move down."""
        place = np.cumsum(good) - 1
        size = len(good)

        def moved(row: int) -> int:
            return base + int(place[row - base]) if good[row - base] else -1

        for table in self._details.values():
            late = {row: table.pop(row) for row in [r for r in table if base <= r < base + size]}
            table.update({moved(row): value for row, value in late.items() if moved(row) >= 0})
        rows, facts = array("q"), array("f")
        for index, row in enumerate(self._kernel_rows):
            target = row if row < base else moved(row)
            if target >= 0:
                rows.append(target)
                facts.extend(self._kernel_facts[4 * index : 4 * index + 4])
        self._kernel_rows, self._kernel_facts = rows, facts
        for column, part in values.items():
            self._parts[column].append(part[good])
        self._size += int(good.sum())

    def _numbers(self, given: list[Any]) -> Floats:
        try:
            whole = np.array(given, dtype=np.float64)
        except (ValueError, TypeError, OverflowError):
            whole = None
        # lists that are all alike make a table instead of an error
        if whole is None or whole.ndim != 1:
            return np.array([_number(value) for value in given], dtype=np.float64)
        return whole

    def _whole(self, given: list[Any]) -> Ints:
        try:
            whole = np.array(given, dtype=np.int64)
        except (ValueError, TypeError, OverflowError):
            whole = None
        if whole is None or whole.ndim != 1:
            return np.array([_integer(value) for value in given], dtype=np.int64)
        return whole

    def _joins(
        self,
        rows: list[Event],
        category: npt.NDArray[np.int8],
        values: dict[str, npt.NDArray[Any]],
        base: int,
    ) -> None:
        """Fill the columns that come from `args`, for each kind of event only those it has."""
        device = (category >= Category.KERNEL) & (category <= Category.MEMSET)
        for mask, is_device in ((device, True), (category == Category.RUNTIME, False)):
            places = np.flatnonzero(mask).tolist()
            given = [(place, rows[place].args) for place in places if rows[place].args is not None]
            if not given:
                continue
            index = np.array([place for place, _ in given])
            values["correlation"][index] = self._whole([args.correlation for _, args in given])
            values["external"][index] = self._whole(
                [args.external_old if args.external is None else args.external for _, args in given]
            )
            if is_device:
                values["stream"][index] = np.clip(
                    self._whole([args.stream for _, args in given]), -1, 2**31 - 1
                )
                values["device"][index] = np.clip(
                    self._whole([args.device for _, args in given]), -1, 2**15 - 1
                )
                size = np.nan_to_num(self._numbers([args.bytes or 0 for _, args in given]))
                values["bytes"][index] = np.clip(size, 0, 2**62)
                for place, args in given:
                    if args.grid:
                        self._kernel_rows.append(base + place)
                        self._kernel_facts.extend(
                            (
                                _volume(args.grid),
                                _volume(args.block),
                                _number(args.blocks_per_sm),
                                _number(args.occupancy),
                            )
                        )
                    if args.collective is not None:
                        self._detail("collective", base + place, (args.collective, args.elements, args.group))
        places = np.flatnonzero((category == Category.OP) | (category == Category.ANNOTATION)).tolist()
        texts = self._texts
        given = [(place, rows[place].args) for place in places if rows[place].args is not None]
        if given:
            index = np.array([place for place, _ in given])
            values["external"][index] = self._whole([args.external for _, args in given])
            values["sequence"][index] = np.clip(
                self._whole([args.sequence for _, args in given]), -1, 2**31 - 1
            )
            values["shapes"][index] = [
                texts[bytes(args.dims or args.dims_old), bytes(args.types)]
                if args.dims or args.dims_old
                else -1
                for _, args in given
            ]
            for place, args in given:
                if args.stack:
                    self._detail("stack", base + place, str(args.stack))
                if args.collective is not None:
                    self._detail("collective", base + place, (args.collective, args.elements, args.group))
        for place in np.flatnonzero(category == Category.SYNC).tolist():
            sync = rows[place].args
            if sync is not None:
                values["correlation"][place] = _integer(sync.correlation)
                values["stream"][place] = min(_integer(sync.stream), 2**31 - 1)
                self._detail("kind", base + place, str(sync.kind))
                self._detail("waits_for", base + place, _integer(sync.waits_for))

    def _detail(self, name: str, row: int, value: Any) -> None:
        self._details.setdefault(name, {})[row] = value

    def _others(self, events: Iterable[Event]) -> list[Event]:
        """Slices made of begin/end pairs, of unknown phases that have a duration; everything else is counted."""
        made: list[Event] = []
        for event in events:
            phase = event.ph
            if phase in ("B", "E"):
                stack = self._open.setdefault((_hashable(event.pid), _hashable(event.tid)), [])
                if phase == "B":
                    stack.append((event.name, event.cat, _number(event.ts)))
                elif stack:
                    name, category, start = stack.pop()
                    made.append(
                        Event(
                            ph="X",
                            cat=category,
                            name=name,
                            pid=event.pid,
                            tid=event.tid,
                            ts=start,
                            dur=_number(event.ts) - start,
                        )
                    )
                else:
                    self.unclear += 1
                continue
            if phase == "M" and event.args is not None:
                if event.name == "process_labels" or event.name == "process_name":
                    self._labels.setdefault(_hashable(event.pid), str(event.args.name or ""))
                elif event.name == "thread_name":
                    self._thread_names[_hashable(event.pid), _hashable(event.tid)] = str(
                        event.args.name or ""
                    )
            known = isinstance(phase, str) and len(phase) == 1
            if not known and event.ts is not None and event.dur is not None:
                made.append(event)
                if phase is None:
                    self.unclear += 1
                continue
            if phase is None and event.name is None and event.ts is None:
                continue  # an empty object
            kind = f"{phase}:{event.cat}" if phase in ("s", "f", "i") else str(phase)
            self.counts[kind] = self.counts.get(kind, 0) + 1
        return made

    @property
    def seen(self) -> int:
        """Events taken so far, of all kinds."""
        return self._size + sum(count for kind, count in self.counts.items() if not kind.startswith("X:"))

    def finish(self) -> Events:
        """The columns, sorted by time; the builder is empty afterwards."""
        self.unfinished = sum(len(stack) for stack in self._open.values())
        columns: dict[str, npt.NDArray[Any]] = {}
        start = self._join("start_us")
        duration = self._join("duration_us")
        # shift to the earliest event: the first one in the file need not be it
        low = float(start.min()) if len(start) else 0.0
        start -= low
        order = np.lexsort((-duration, start))
        columns["start_us"], columns["duration_us"] = start[order], duration[order]
        del start, duration
        for column in _COLUMNS:
            if column not in columns:
                columns[column] = self._join(column)[order]
        place = np.empty(len(order), dtype=np.int64)
        place[order] = np.arange(len(order))
        kernel_rows = place[np.array(self._kernel_rows, dtype=np.int64)]
        facts = np.array(self._kernel_facts, dtype=np.float32).reshape(-1, 4)
        by_row = np.argsort(kernel_rows)
        details = {
            name: {int(place[row]): value for row, value in table.items()}
            for name, table in self._details.items()
        }
        return Events(
            **columns,
            names=["" if text is None else str(text) for text in self._names.texts],
            texts=self._texts.texts,
            threads=self._threads.texts,
            process_labels=self._labels,
            thread_names=self._thread_names,
            kernel_rows=kernel_rows[by_row],
            kernel_facts=facts[by_row],
            details=details,
            origin_us=(self._origin or 0.0) + low,
            counts=self.counts,
        )

    def _join(self, column: str) -> npt.NDArray[Any]:
        parts = self._parts.pop(column)
        return np.concatenate(parts) if parts else np.empty(0, dtype=_COLUMNS[column][0])


def _category(text: Any) -> int:
    if not isinstance(text, str):
        return Category.OTHER
    return _CATEGORIES.get(text.lower(), Category.OTHER)


def _hashable(value: Any) -> Any:
    return value if isinstance(value, (str, int, float, type(None))) else str(value)


_LEADING_NUMBER = re.compile(r"\s*[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


def _number(value: Any) -> float:
    """As a float; a text's leading number; NaN where there is none."""
    if isinstance(value, (int, float)):
        try:
            return float(value)
        except OverflowError:
            return float("nan")
    if isinstance(value, str) and (found := _LEADING_NUMBER.match(value)):
        return float(found.group())
    return float("nan")


def _integer(value: Any) -> int:
    """As an int64, -1 where there is none."""
    if isinstance(value, str):
        try:
            value = int(value, 0)
        except ValueError:
            value = _number(value)
    if isinstance(value, float):
        value = int(value) if np.isfinite(value) else -1
    if not isinstance(value, int):
        return -1
    # identifiers beyond 64 bits keep being different from each other
    return value if -(2**63) <= value < 2**63 else value % (2**63)


def _volume(raw: Any) -> float:
    """Product of the numbers in a text such as `[2, 4, 64]`."""
    product = 1.0
    for number in re.findall(rb"\d+", bytes(raw)):
        product *= int(number)
    return product
