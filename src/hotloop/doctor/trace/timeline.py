"""What happened when: device work, host calls and their join, the clocks' skew, the steady steps, who called whom."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from hotloop.doctor.trace.columns import Category, Events
from hotloop.doctor.trace.intervals import Spans
from hotloop.doctor.trace.reading import Recording

__all__ = ["Pace", "Timeline"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

# Sync records that some versions file under kernels.
_NO_KERNEL = r"^(?:Stream Wait Event|Stream Sync|Event Sync|Context Sync|Stream Synchronize|Event Record)"
_SYNC = r"^(?:cuda|hip|cu|xpu)\w*(?:StreamSynchronize|DeviceSynchronize|EventSynchronize|CtxSynchronize)"
_ALLOC = (
    r"^(?:cudaMalloc|cudaFree|hipMalloc|hipFree"
    r"|cuMem(?:Create|Map|Unmap|Release|AddressReserve|SetAccess|Alloc|Free))(?!Host|.*Async)"
)
_COPY = r"(?i)^(?:cuda|hip|cu)Memcpy"
_LAUNCH = r"(?i)^(?:cuda|hip|cu)\w*Launch|KernelLaunch"
_LOADER = (
    r"DataLoader\S*__next__|dataloader\.py\(\d+\): __next__|hotloop[/.]data[/.]\S*: __next__"
    r"|(?i:^(?:data[ _-]?load(?:er|ing)?|(?:load|next|fetch)[ _-]?batch)$)"
)
_STEP = r"^ProfilerStep(?:#|\*)\s*\d*"


@dataclass(frozen=True)
class Pace:
    """How fast a program is while nobody records it, and its machine; None where that is unknown.

    Attributes:
        step_us: microseconds of a step. event_us: what recording adds to the host for each event.
        kernel_us: what it adds to the device for each piece of work. mark_us: to the host at the end of each step.
        link_bytes_us: bytes a microsecond of a copy from pinned memory to the device.
    """

    step_us: float | None = None
    event_us: float | None = None
    kernel_us: float | None = None
    mark_us: float | None = None
    link_bytes_us: float | None = None


class Timeline:
    """One recording seen as a host that starts work and devices that do it.

    Times are microseconds in the host's clock, device times moved by the skew. "Calls" are runtime/driver calls in
    order of start; "work" are kernels, copies and fills in order of start.

    Attributes:
        events, header: as read.
        call_rows, call_start, call_end: [calls]. work_rows, work_start, work_end: [work].
        launch: [work] index of the call that started it, -1 if not in the trace.
        skew_us: by how much device times were moved. window: (start, end) of the steady part.
        steps: number of steps in the window, 0 if the trace has none. step_us: their median length, or the window's.
    """

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.events: Events = recording.events
        self.header = recording.header
        events = self.events
        fake = events.names_matching(_NO_KERNEL)
        if fake.any() and events.count:
            events.category[(events.category == Category.KERNEL) & fake[events.name]] = Category.SYNC
        self.call_rows = events.rows(Category.RUNTIME)
        self.call_start = events.start_us[self.call_rows]
        self.call_end = self.call_start + events.duration_us[self.call_rows]
        self.work_rows = events.rows(Category.KERNEL, Category.MEMCPY, Category.MEMSET)
        self.work_start = events.start_us[self.work_rows]
        self.work_end = self.work_start + events.duration_us[self.work_rows]
        self.launch = self._join()
        self.skew_us = self._measure_skew()
        if self.skew_us > 0:
            self.work_start = self.work_start + self.skew_us
            self.work_end = self.work_end + self.skew_us
        self.step_spans, self.steps, self.step_note = self._find_steps()
        self.window = self._find_window()

    # --- joining ---

    def _join(self) -> Ints:
        """Index of the call of each piece of work, by correlation; the latest one before it where ids repeat."""
        found = np.full(len(self.work_rows), -1, dtype=np.int64)
        calls = self.events.correlation[self.call_rows]
        # only calls that can start work: a wait has a correlation, too
        able = np.flatnonzero((calls > 0) & ~self.call_named(_SYNC))
        wanted = self.events.correlation[self.work_rows]
        if not len(able) or not len(wanted):
            return found
        order = np.lexsort((self.call_start[able], calls[able]))
        able = able[order]
        known = calls[able]
        low = np.searchsorted(known, wanted, side="left")
        high = np.searchsorted(known, wanted, side="right")
        there = (high > low) & (wanted > 0)
        found[there] = able[low[there]]
        for index in np.flatnonzero(there & (high - low > 1)).tolist():
            group = able[low[index] : high[index]]
            place = int(np.searchsorted(self.call_start[group], self.work_start[index], side="right")) - 1
            found[index] = group[max(place, 0)]
        return found

    def _measure_skew(self) -> float:
        """How far the device's clock runs behind: no work can start before the call that asked for it."""
        joined = self.launch >= 0
        if not joined.any():
            return 0.0
        lead = self.work_start[joined] - self.call_start[self.launch[joined]]
        return max(0.0, -float(lead.min()))

    def call_named(self, pattern: str) -> Mask:
        """For each call, whether its name matches the regular expression."""
        if not len(self.call_rows):
            return np.zeros(0, dtype=bool)
        return self.events.names_matching(pattern)[self.events.name[self.call_rows]]

    def work_named(self, pattern: str) -> Mask:
        """For each piece of device work, whether its name matches the regular expression."""
        if not len(self.work_rows):
            return np.zeros(0, dtype=bool)
        return self.events.names_matching(pattern)[self.events.name[self.work_rows]]

    # --- steps and window ---

    def _find_steps(self) -> tuple[list[tuple[float, float]], int, str]:
        events = self.events
        names = events.names_matching(_STEP)
        rows = np.flatnonzero(names[events.name]) if events.count else np.empty(0, dtype=np.int64)
        rows = rows[np.isin(events.category[rows], (Category.ANNOTATION, Category.OP, Category.OTHER))]
        if len(rows):
            threads, counts = np.unique(events.thread[rows], return_counts=True)
            rows = self._one_recording(rows[events.thread[rows] == threads[np.argmax(counts)]])
            spans = [
                (float(events.start_us[r]), float(events.start_us[r] + events.duration_us[r])) for r in rows
            ]
            spans = [span for span in spans if span[1] > span[0]]
        else:
            spans = self._steps_by_optimizer()
        if not spans:
            return [], 0, "no steps are marked: the whole trace is taken as one"
        spans = self._with_work(spans)
        kept = spans
        if len(spans) > 2 or (len(spans) == 2 and _long(spans[0]) > 1.5 * _long(spans[1])):
            kept = spans[1:]
        typical = float(np.median([_long(span) for span in kept]))
        steady = [span for span in kept if _long(span) <= 2 * typical]
        # the replay needs one stretch of time: leave out slow steps at its two ends only
        first, last = kept.index(steady[0]), len(kept) - kept[::-1].index(steady[-1])
        kept = kept[first:last]
        dropped = len(spans) - len(kept)
        note = f"{len(kept)} steady step{'' if len(kept) == 1 else 's'}" + (
            f" ({dropped} left out: warming up)" if dropped else ""
        )
        return kept, len(kept), note

    def _one_recording(self, rows: Ints) -> Ints:
        """Of several recordings in one file the longest: where step numbers leap, the loop ran on unrecorded."""
        found = [re.search(r"\d+$", self.events.name_of(int(row))) for row in rows]
        numbers = np.array([int(each.group()[-9:]) if each else 0 for each in found], dtype=np.int64)
        runs = np.split(rows, np.flatnonzero(np.diff(numbers) > 1) + 1)
        return max(reversed(runs), key=len)

    def _with_work(self, spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
        """Without stubs: a step cut off by the end of the recording starts no work while the others do."""
        asked = np.sort(self.call_start[self.launch[self.launch >= 0]])
        counts = [int(np.searchsorted(asked, b) - np.searchsorted(asked, a)) for a, b in spans]
        return [span for span, count in zip(spans, counts, strict=True) if count] if any(counts) else spans

    def _steps_by_optimizer(self) -> list[tuple[float, float]]:
        events = self.events
        names = events.names_matching(r"^Optimizer\.step#")
        rows = np.flatnonzero(names[events.name]) if events.count else np.empty(0, dtype=np.int64)
        rows = rows[np.isin(events.category[rows], (Category.ANNOTATION, Category.OP))]
        if len(rows) < 3:
            return []
        rows = rows[events.name[rows] == np.bincount(events.name[rows]).argmax()]
        ends = events.start_us[rows] + events.duration_us[rows]
        return [(float(a), float(b)) for a, b in pairwise(ends)]

    def _find_window(self) -> tuple[float, float]:
        if self.step_spans:
            return self.step_spans[0][0], self.step_spans[-1][1]
        if len(self.work_rows):
            # what comes before the first device work is the start of the program, not its pace
            first = self.launch[0]
            low = min(float(self.work_start[0]), float(self.call_start[first]) if first >= 0 else np.inf)
            return low, max(float(self.work_end.max()), low)
        starts, ends = [self.call_start, self.work_start], [self.call_end, self.work_end]
        rows = self.events.rows(Category.OP)
        starts.append(self.events.start_us[rows])
        ends.append(self.events.start_us[rows] + self.events.duration_us[rows])
        lowest = [float(part.min()) for part in starts if len(part)]
        highest = [float(part.max()) for part in ends if len(part)]
        if not lowest:
            end = self.events.end_us
            return (0.0, float(end.max())) if len(end) else (0.0, 0.0)
        return min(lowest), max(highest)

    @property
    def window_us(self) -> float:
        """Length of the window."""
        return self.window[1] - self.window[0]

    @property
    def step_us(self) -> float:
        """Mean length of a steady step; the window's length if there are no steps."""
        return self.window_us / max(self.steps, 1)

    @cached_property
    def asked(self) -> Floats:
        """[work] when its call began; when it started itself if the call is unknown."""
        if not len(self.call_rows):
            return self.work_start
        return np.where(self.launch >= 0, self.call_start[self.launch], self.work_start)

    @cached_property
    def prologue(self) -> Mask:
        """[work] asked for before recording began: no call, and before the first work of its stream that has one."""
        mask = np.zeros(len(self.work_rows), dtype=bool)
        stream = self.events.stream[self.work_rows]
        for number in np.unique(stream):
            mine = np.flatnonzero(stream == number)
            joined = np.flatnonzero(self.launch[mine] >= 0)
            if len(joined):
                mask[mine[: joined[0]]] = True
        return mask

    @cached_property
    def work_in_window(self) -> Mask:
        """[work] started by a call in the window, or running in it if its call is unknown."""
        low, high = self.window
        return (self.asked >= low) & (self.asked <= high) & ~self.prologue

    @cached_property
    def calls_in_window(self) -> Mask:
        """[calls] that start in the window."""
        return (self.call_start >= self.window[0]) & (self.call_start <= self.window[1])

    @cached_property
    def device_window(self) -> tuple[float, float]:
        """The stretch over which the device is judged: from the end of earlier work to the end of the window's work.

        A host that runs ahead has left the window long before the device begins it; both ends move with the device.
        """
        low, high = self.window
        mine = self.work_in_window
        if not mine.any():
            return low, high
        first = float(self.work_start[mine].min())
        if not self.steps:
            # until its first work here the device may have been busy with what came before the recording
            low = first
        before = (self.asked < self.window[0]) | self.prologue
        if before.any():
            low = max(low, float(self.work_end[before].max()))
        last = float(self.work_end[mine].max())
        if last > high or (self.asked > high).any():
            later = self.work_start[self.asked > high]
            high = max(high, last) if not len(later) else max(last, min(high, float(later.min())))
        return low, max(high, low)

    @cached_property
    def busy(self) -> Spans:
        """When any device worked: the union over all streams."""
        return Spans(self.work_start, self.work_end)

    # --- soundness ---

    @cached_property
    def unmatched_share(self) -> float:
        """Share of kernels in the window whose launch is not in the trace (copies inside graphs count as well)."""
        mask = self.work_in_window
        if not len(self.call_rows):
            return 1.0 if mask.any() else 0.0
        return float((self.launch[mask] < 0).mean()) if mask.any() else 0.0

    @property
    def device_name(self) -> str:
        """Name of the first device in the file's header, "" if unknown."""
        properties = self.header.get("deviceProperties") or self.header.get("computeProperties")
        if isinstance(properties, list) and properties and isinstance(properties[0], dict):
            return str(properties[0].get("name", ""))
        return ""

    def device_property(self, key: str) -> float | None:
        """A number from the file's device properties (`numSms`, `computeMajor`, ...)."""
        properties = self.header.get("deviceProperties")
        if isinstance(properties, list) and properties and isinstance(properties[0], dict):
            value = properties[0].get(key)
            return float(value) if isinstance(value, (int, float)) else None
        return None

    @property
    def pace(self) -> Pace:
        """How fast the program was unrecorded, if whoever recorded it has put that into the header."""
        given = self.header.get("hotloop")
        values = given if isinstance(given, dict) else {}

        def positive(key: str) -> float | None:
            value = values.get(key)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < np.inf:
                return None
            return float(value)

        return Pace(
            *(positive(key) for key in ("step_us", "event_us", "kernel_us", "mark_us", "link_bytes_us"))
        )

    def recorded_within(self, begin: Floats, end: Floats) -> Ints:
        """[intervals] host events that begin in each: operators, ranges, calls and Python frames."""
        events = self.events
        rows = events.rows(Category.OP, Category.ANNOTATION, Category.RUNTIME, Category.PYTHON)
        starts = np.sort(events.start_us[rows])
        return np.searchsorted(starts, end, side="right") - np.searchsorted(starts, begin, side="left")

    @property
    def rank(self) -> int | None:
        """The process's rank, if the file says so."""
        info: Any = self.header.get("distributedInfo")
        rank = info.get("rank") if isinstance(info, dict) else None
        return rank if isinstance(rank, int) else None

    # --- kinds of calls ---

    @cached_property
    def is_sync(self) -> Mask:
        """[calls] that wait for the device and do nothing else."""
        return self.call_named(_SYNC)

    @cached_property
    def is_alloc(self) -> Mask:
        """[calls] that get memory from the driver or give it back."""
        return self.call_named(_ALLOC)

    @cached_property
    def is_copy(self) -> Mask:
        """[calls] that copy memory."""
        return self.call_named(_COPY)

    @cached_property
    def is_launch(self) -> Mask:
        """[calls] that start kernels or graphs."""
        return self.call_named(_LAUNCH)

    @cached_property
    def first_work(self) -> Ints:
        """[calls] index of the first piece of work each call started, -1 if none."""
        first = np.full(len(self.call_rows), -1, dtype=np.int64)
        mine = np.flatnonzero(self.launch >= 0)[::-1]
        first[self.launch[mine]] = mine
        return first

    @cached_property
    def loader(self) -> Spans:
        """When a data loader's `__next__` ran (which blocks the loop)."""
        rows = self.loader_rows
        return Spans(self.events.start_us[rows], self.events.end_us[rows])

    @cached_property
    def loader_rows(self) -> Ints:
        """Rows of the loader's `__next__`, outermost ones or not."""
        events = self.events
        if not events.count:
            return np.empty(0, dtype=np.int64)
        rows = np.flatnonzero(events.names_matching(_LOADER)[events.name])
        host = (Category.OP, Category.PYTHON, Category.ANNOTATION, Category.OTHER)
        return rows[np.isin(events.category[rows], host)]

    # --- who called whom ---

    @cached_property
    def _callers(self) -> tuple[Ints, dict[int, int]]:
        """Parent row of each host event (by time, on its thread), as rows of host events and a lookup."""
        events = self.events
        rows = events.rows(Category.RUNTIME, Category.OP, Category.PYTHON, Category.ANNOTATION)
        start = events.start_us[rows].tolist()
        # files with whole microseconds, or large ones in float64, are off by a fraction of one
        end = (events.end_us[rows] + 0.25).tolist()
        thread = events.thread[rows].tolist()
        parents = [-1] * len(rows)
        stacks: dict[int, list[int]] = {}
        for index in range(len(rows)):
            stack = stacks.setdefault(thread[index], [])
            begin = start[index]
            while stack and end[stack[-1]] <= begin + 0.25:
                stack.pop()
            if stack:
                parents[index] = stack[-1]
            stack.append(index)
        place = {int(row): index for index, row in enumerate(rows)}
        parent_rows = np.array([rows[p] if p >= 0 else -1 for p in parents], dtype=np.int64)
        return parent_rows, place

    def ancestors(self, row: int) -> list[int]:
        """Rows of the events around a host event on its thread, innermost first."""
        parents, place = self._callers
        chain: list[int] = []
        index = place.get(int(row))
        while index is not None and len(chain) < 500:
            parent = int(parents[index])
            if parent < 0:
                break
            chain.append(parent)
            index = place[parent]
        return chain

    def op_of(self, row: int) -> int:
        """Row of the innermost operator around a host event, -1 if none."""
        return next((r for r in self.ancestors(row) if self.events.category[r] == Category.OP), -1)

    def outermost_op(self, row: int) -> int:
        """Row of the outermost operator around a host event, -1 if none."""
        ops = [r for r in self.ancestors(row) if self.events.category[r] == Category.OP]
        named = [r for r in ops if not re.match(_STEP, self.events.name_of(r))]
        return named[-1] if named else -1


def _long(span: tuple[float, float]) -> float:
    return span[1] - span[0]
