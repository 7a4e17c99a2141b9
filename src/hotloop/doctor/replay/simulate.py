"""What if: the window's timeline played again with some of its events changed.

The host is one sequence of runtime calls. Each starts a fixed "think" time after the last call that had finished
before it, on whatever thread. Device work starts when its call has begun, its stream's earlier work has ended and,
where a dependency across streams is recorded or evident, that work has ended too, plus a residual. Calls that waited
end when what they waited for ends, plus the lag that was measured. Residuals are fitted once, so that the unedited
replay gives the measured times; negative ones are cut to zero, and what that costs is the replay's error.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hotloop.doctor.trace.intervals import Spans
from hotloop.doctor.trace.kernels import COMMUNICATION
from hotloop.doctor.trace.timeline import Timeline

__all__ = ["Edit", "Replay"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_RETURN_US = 3.0  # what a call takes that finds nothing to wait for
_EVIDENT_US = 12.0  # a start this soon after another stream's end, and after nothing else, was waiting for it
_BETWEEN_US = 1.0  # from the end of one kernel to the start of the next, queued one, where a trace has none
_WAITED_US = 20.0  # shorter calls are taken as work, not as waits
MAX_EVENTS = 400_000
MOST_EVENT_US, MOST_KERNEL_US = 12.0, 5.0


@dataclass
class Edit:
    """One change of a trace. Indices are those of the timeline's calls and work.

    Attributes:
        unblock: calls that no longer wait for the device.
        drop: calls that are no longer made; the work they started takes no time.
        quicken: calls whose own duration becomes `_RETURN_US` (an allocation served from the cache).
        host: (time, factor): host time inside is multiplied by the factor (0 removes it).
        work: (indices, factor or factors): durations of device work are multiplied.
        free: groups of work moved to a stream of their own, one for each group.
    """

    unblock: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    drop: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    quicken: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    host: tuple[Spans, float] | None = None
    work: tuple[Ints, float | Floats] | None = None
    free: tuple[Ints, ...] = ()


class Replay:
    """The simulator for one timeline.

    Attributes:
        measured_us: from the window's start (from the end of earlier work, if that still ran) to the end of its last
            work or host call.
        error: (replayed - measured) / measured of the unedited replay.
        event_us: what recording added to the host for each event; the replay takes it off, so that `replayed_us` is the
            window as it would be unrecorded. 0 unless the recording says how fast the program was before
            (`Timeline.pace`).
        repeats: the window's steps are played twice in a row, and the second time counts.
        usable: within 2 %, at most 2 % of the work without a launch, skew at most 1 ms.
        why_not: a sentence if it is not usable.
    """

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self._think: Floats = np.empty(0)
        self._took: Floats = np.empty(0)
        self._duration: Floats = np.empty(0)
        self.repeats = False
        self._prepare()
        self.replayed_us = self.run([])
        self.error = (self.replayed_us - self.measured_us) / self.measured_us if self.measured_us > 0 else 0.0
        self.why_not = self._judge()
        self.usable = not self.why_not
        if self.usable and timeline.steps >= 2:
            # a window that does not go round in a circle, such as one whose last step differs, is played once
            self.repeats = True
            again = self.run([])
            self.repeats = abs(again - self.replayed_us) <= 0.02 * self.replayed_us
            self.replayed_us = again if self.repeats else self.replayed_us
        self.event_us = self._fit_event_cost() if self.usable else 0.0

    def _judge(self) -> str:
        timeline = self.timeline
        if not len(timeline.work_rows):
            return "there is no device work in the trace"
        if not len(self._call_index) or self.measured_us <= 0:
            return "there are no launches in the trace"
        if self.truncated:
            return f"the window has more than {MAX_EVENTS} calls"
        if timeline.unmatched_share > 0.02:
            return f"{timeline.unmatched_share:.0%} of the device's work has no launch in the trace"
        if timeline.skew_us > 1000:
            return f"the clocks of host and device differ by {timeline.skew_us / 1000:.1f} ms"
        if abs(self.error) > 0.02:
            return f"the replay differs from the measured time by {self.error:+.1%}"
        return ""

    def _fit_event_cost(self) -> float:
        """Take from the host what recording added, so that the window takes as long as its steps did before it.

        Where the device is the limit, the time of a step does not tell: the cost measured on other events is taken.
        """
        pace = self.timeline.pace
        if pace.step_us is None and pace.event_us is None:
            return 0.0
        # no more than a few microseconds, and no more than half of what a kernel takes
        added = min(pace.kernel_us or 0.0, MOST_KERNEL_US)
        self._duration = self._duration - np.minimum(added, 0.5 * self._duration)
        timeline = self.timeline
        ends = np.append(self._start, self._host_end)
        events = timeline.recorded_within(self._previous_end, ends)
        boundaries = np.array([end for _, end in timeline.step_spans[:-1]])
        marks = np.searchsorted(boundaries, ends, "right") - np.searchsorted(
            boundaries, self._previous_end, "right"
        )
        fixed = (pace.mark_us or 0.0) * np.maximum(marks, 0)
        whole = self._think

        def play(cost: float) -> float:
            # no call comes for nothing: a quarter of the time is left at least
            self._think = np.where(whole > 0, np.maximum(whole - cost * events - fixed, 0.25 * whole), whole)
            self.replayed_us = self.run([])
            return self.replayed_us

        cost = pace.event_us or 0.0
        # so little is no measurement
        cost = cost if cost >= 0.3 else 0.0
        if pace.step_us is None or not self.timeline.steps:
            play(cost)
            return cost
        wanted = pace.step_us * self.timeline.steps
        low, high = 0.0, max(1.6 * cost, MOST_EVENT_US)
        slowed = self.replayed_us > 1.02 * wanted
        # a window that was no slower than the steps before it had luck: recording costs the host what it costs
        if play(cost) >= 0.85 * wanted and (not slowed or self.replayed_us < 1.03 * wanted):
            return cost
        if slowed and play(high) > 1.02 * wanted:
            play(cost)
            self._shorten_allocations(wanted)
            return cost
        for _ in range(12):
            cost = (low + high) / 2
            low, high = (cost, high) if play(cost) > wanted else (low, cost)
        return cost

    def _shorten_allocations(self, wanted: float) -> None:
        """What is still too slow lies, if there are any, in driver allocations: recording slows them down most."""
        alloc = self.timeline.is_alloc[self._call_index] & (self._waits_for < 0)
        whole = self._took
        low, high = 0.5, 1.0
        for _ in range(8 if alloc.any() else 0):
            share = (low + high) / 2
            self._took = np.where(alloc, share * whole, whole)
            self.replayed_us = self.run([])
            low, high = (low, share) if self.replayed_us > wanted else (share, high)

    def _prepare(self) -> None:
        timeline = self.timeline
        calls = np.flatnonzero(timeline.calls_in_window)
        work = np.flatnonzero(timeline.work_in_window & (timeline.launch >= 0))
        self.truncated = len(calls) > MAX_EVENTS
        self._call_index, self._work_index = calls, work
        start, end = timeline.call_start[calls], timeline.call_end[calls]
        begin = timeline.window[0]
        host_end = timeline.window[1] if timeline.steps else float(end.max(initial=begin))
        finish = max(host_end, float(timeline.work_end[work].max(initial=begin)))
        # a device that runs behind has the same lag at both ends: it is measured from end of work to end of work
        self.begin, self._from = begin, max(begin, min(timeline.device_window[0], finish))
        self.measured_us = finish - self._from
        self._start, self._end = start, end
        self._host_end = host_end
        self._predecessors(start, end, host_end)
        self._device(work, calls, start, end)

    def _predecessors(self, start: Floats, end: Floats, host_end: float) -> None:
        """For each call, and for the window's end, the call that finished last before it; -1: the window's start."""
        by_end = np.argsort(end, kind="stable")
        ends = end[by_end]
        # float64 holds large times to a fraction of a microsecond
        place = np.searchsorted(ends, np.append(start, host_end) + 0.3, side="right") - 1
        before = np.full(len(place), -1, dtype=np.int64)
        before[place >= 0] = by_end[place[place >= 0]]
        own = np.arange(len(before))
        # a call of no duration may be found as its own predecessor, or a later one of the same instant
        wrong = before >= own
        for index in np.flatnonzero(wrong).tolist():
            at = place[index]
            while at >= 0 and by_end[at] >= index:
                at -= 1
            before[index] = by_end[at] if at >= 0 else -1
        self._before = before
        previous = np.full(len(before), self.begin)
        previous[before >= 0] = end[before[before >= 0]]
        self._previous_end = previous
        self._think = np.append(start, host_end) - previous

    def _device(self, work: Ints, calls: Ints, start: Floats, end: Floats) -> None:
        timeline = self.timeline
        place = np.full(len(timeline.call_rows) + 1, -1, dtype=np.int64)
        place[calls] = np.arange(len(calls))
        launch = place[timeline.launch[work]]
        # order of launch, which is the order inside each stream
        order = np.lexsort((timeline.work_start[work], launch))
        work, launch = work[order], launch[order]
        self._work_index = work
        w_start, w_end = timeline.work_start[work], timeline.work_end[work]
        stream = timeline.events.stream[timeline.work_rows[work]] + 100_000 * (
            timeline.events.device[timeline.work_rows[work]].astype(np.int64) + 1
        )
        previous = _previous_in_group(stream)
        earlier = timeline.asked < timeline.window[0]
        initial = np.full(len(work), -np.inf)
        if earlier.any() or timeline.prologue.any():
            rows = np.flatnonzero((earlier | timeline.prologue) & ~timeline.work_in_window)
            all_streams = timeline.events.stream[timeline.work_rows] + 100_000 * (
                timeline.events.device[timeline.work_rows].astype(np.int64) + 1
            )
            for number in np.unique(stream):
                mine = rows[all_streams[rows] == number]
                if len(mine):
                    initial[stream == number] = float(timeline.work_end[mine].max())
        base = initial.copy()
        base[previous >= 0] = w_end[previous[previous >= 0]]
        lead = w_start - start[launch]
        # only work that found its stream empty shows what a launch takes
        alone = lead[base <= start[launch]]
        self.launch_delay_us = float(np.clip(np.percentile(alone, 5), 0.0, 30.0)) if len(alone) else 5.0
        ready = start[launch] + self.launch_delay_us
        # work that found its stream empty does not show what following other work would have cost it
        behind = w_start - base
        queued = behind[(base > ready) & (behind >= 0) & (behind < 5.0)]
        between = float(np.median(queued)) if len(queued) >= 5 else _BETWEEN_US
        self._gap = np.where(base <= ready, np.minimum(between, np.maximum(behind, 0.0)), 0.0)
        base = base + np.where(np.isfinite(base), self._gap, 0.0)
        across = self._across(work, w_start, w_end, stream, previous, base, ready)
        latest = np.maximum(ready, base)
        latest[across >= 0] = np.maximum(latest[across >= 0], w_end[across[across >= 0]])
        residual = w_start - latest
        # the branches of one graph overlap on what the trace calls one stream
        branch = (previous >= 0) & (launch[previous] == launch) if len(launch) else np.zeros(0, dtype=bool)
        self._residual = np.where(branch, residual, np.maximum(residual, 0.0))
        self._initial, self._stream_before, self._across_stream = initial, previous, across
        self._launch, self._duration = launch, w_end - w_start
        self._waits(launch, w_start, w_end, start, end)

    def _across(
        self,
        work: Ints,
        w_start: Floats,
        w_end: Floats,
        stream: Ints,
        previous: Ints,
        base: Floats,
        ready: Floats,
    ) -> Ints:
        """[work] index of work on another stream that it waited for, -1 if none: inferred from its start."""
        found = np.full(len(work), -1, dtype=np.int64)
        if len(np.unique(stream)) < 2:
            return found
        by_end = np.argsort(w_end, kind="stable")
        ends = w_end[by_end]
        place = np.searchsorted(ends, w_start + 0.3, side="right") - 1
        near = max(_EVIDENT_US, 3 * self.launch_delay_us)
        talks = self.timeline.work_named(COMMUNICATION)[work]
        own = np.maximum(base, ready)
        unexplained = (w_start - own > _EVIDENT_US) & (place >= 0)
        for index in np.flatnonzero(unexplained).tolist():
            other = int(by_end[place[index]])
            # only work launched before can be waited for
            if other >= index or stream[other] == stream[index]:
                continue
            after = w_start[index] - w_end[other]
            # a collective and a computation that wait for each other do so through events, which take their time
            pair = talks[other] != talks[index] and w_end[other] > own[index] and after < 200.0
            if after < near or pair:
                found[index] = other
        return found

    def _waits(self, launch: Ints, w_start: Floats, w_end: Floats, start: Floats, end: Floats) -> None:
        """For each call the work whose end it waited for (-1: none), and how long after that it returned."""
        timeline = self.timeline
        count = len(start)
        waits = np.full(count, -1, dtype=np.int64)
        lag = np.zeros(count)
        sync = timeline.is_sync[self._call_index]
        copy = timeline.is_copy[self._call_index]
        alloc = timeline.is_alloc[self._call_index]
        took = end - start
        first = np.searchsorted(launch, np.arange(count), side="left")
        past = np.searchsorted(launch, np.arange(count), side="right")
        own = past > first
        # copies: the host stood still for a good part of the device's copy
        for index in np.flatnonzero(copy & own & (took >= _WAITED_US)).tolist():
            work = int(past[index]) - 1
            if end[index] >= w_start[work] + 0.5 * (w_end[work] - w_start[work]):
                waits[index], lag[index] = work, end[index] - w_end[work]
        # everything launched before a call is a candidate; the last one to end before it returned is what it waited for
        by_end = np.argsort(w_end, kind="stable")
        ends = w_end[by_end]
        place = np.searchsorted(ends, end + 5.0, side="right") - 1
        slow_launch = (took > 100.0) & ~copy & ~alloc & ~sync
        if slow_launch.any():
            slow_launch &= took > 20 * float(np.median(took))
            busy = timeline.busy.within(start, end)
            slow_launch &= busy > 0.95 * took
        for index in np.flatnonzero((sync | slow_launch | (alloc & (took > 50.0))) & (place >= 0)).tolist():
            at = int(place[index])
            while at >= 0 and launch[by_end[at]] > index:
                at -= 1
            if at < 0:
                continue
            work = int(by_end[at])
            near = end[index] - w_end[work] < max(50.0, 0.5 * took[index])
            if w_end[work] > start[index] and (sync[index] or near):
                waits[index], lag[index] = work, end[index] - w_end[work]
        self._waits_for, self._lag, self._took = waits, lag, took

    @property
    def waiting_calls(self) -> Ints:
        """Timeline's indices of the calls in the window that waited for device work."""
        return self._call_index[self._waits_for >= 0]

    def waited_us(self, calls: Ints) -> float:
        """Sum of the durations of the given calls: what a tool that adds up stalls would claim."""
        return float((self.timeline.call_end[calls] - self.timeline.call_start[calls]).sum())

    def run(self, edits: list[Edit]) -> float:
        """Microseconds the window takes with all the edits applied, never less than the device's own work."""
        think, took, waits = self._think.copy(), self._took.copy(), self._waits_for.copy()
        duration, before = self._duration.copy(), self._stream_before.copy()
        initial = self._initial.copy()
        for edit in edits:
            self._apply(edit, think, took, waits, duration, before, initial)
        if edits:
            moved = tuple(group for edit in edits for group in edit.free)
            return max(
                self._play(think, took, waits, duration, before, initial), self._floor(duration, moved)
            )
        return self._play(think, took, waits, duration, before, initial)

    def _apply(
        self,
        edit: Edit,
        think: Floats,
        took: Floats,
        waits: Ints,
        duration: Floats,
        before: Ints,
        initial: Floats,
    ) -> None:
        if edit.host is not None:
            spans, factor = edit.host
            ends = np.append(self._start, self._host_end)
            inside = spans.within(self._previous_end, ends)
            whole = np.maximum(ends - self._previous_end, 1e-9)
            think -= (1 - factor) * inside * np.clip(think / whole, 0.0, 1.0)
            inside = spans.within(self._start, self._end)
            own = waits < 0
            took[own] -= ((1 - factor) * inside * np.clip(took / np.maximum(self._took, 1e-9), 0, 1))[own]
        for calls in (edit.unblock, edit.quicken):
            index = self._places(calls)
            waits[index] = -1
            took[index] = np.minimum(took[index], _RETURN_US)
        index = self._places(edit.drop)
        waits[index] = -1
        took[index] = 0.0
        if len(index):
            duration[np.isin(self._launch, index)] = 0.0
        if edit.work is not None:
            chosen, factor_of = edit.work
            factors = np.broadcast_to(np.asarray(factor_of, dtype=np.float64), chosen.shape)
            order = np.argsort(self._work_index)
            place = np.searchsorted(self._work_index[order], chosen)
            good = (place < len(order)) & (
                self._work_index[order][np.minimum(place, len(order) - 1)] == chosen if len(order) else False
            )
            duration[order[place[good]]] *= factors[good]
        for group in edit.free:
            self._move(np.flatnonzero(np.isin(self._work_index, group)), before)

    @staticmethod
    def _move(mine: Ints, before: Ints) -> None:
        """Take work out of its stream's order: what followed it follows what it had followed."""
        chosen = np.zeros(len(before) + 1, dtype=bool)
        chosen[mine] = True
        old = before.tolist()
        skip = list(old)
        for item in range(len(old)):  # predecessors come first, so theirs are known
            p = old[item]
            if p >= 0 and chosen[p]:
                skip[item] = skip[p]
        before[:] = skip
        before[mine] = np.concatenate(([-1], mine[:-1])) if len(mine) else mine

    def _places(self, calls: Ints) -> Ints:
        """Positions in the window of the timeline's calls."""
        if not len(calls):
            return calls
        place = np.searchsorted(self._call_index, calls)
        good = place < len(self._call_index)
        place, calls = place[good], calls[good]
        return place[self._call_index[place] == calls]

    def _floor(self, duration: Floats, moved: tuple[Ints, ...]) -> float:
        """Length of the device's work itself: the union of what stays where it is, or the longest moved group."""
        if not len(duration):
            return 0.0
        start = self.timeline.work_start[self._work_index]
        stays = np.ones(len(start), dtype=bool)
        longest = 0.0
        for group in moved:
            mine = np.isin(self._work_index, group)
            stays &= ~mine
            longest = max(longest, float(duration[mine].sum()))
        kept = Spans(start[stays], (start + duration)[stays]).clipped(
            self._from, self._from + self.measured_us
        )
        return max(kept.total, longest)

    def _play(
        self, think: Floats, took: Floats, waits: Ints, duration: Floats, before: Ints, initial: Floats
    ) -> float:
        """Microseconds of the window; of steps, as many of them take that follow each other without end.

        A window of steps begins with whatever the device had queued then. A changed program would have queued more, or
        less: so it is played twice in a row, and the second time counts.
        """
        once, host, done = self._play_once(think, took, waits, duration, before, initial, self.begin)
        if not self.repeats:
            return once - self._from
        last: dict[int, float] = {}
        head = np.arange(len(before))
        for index, previous in enumerate(before.tolist()):
            if previous >= 0:
                head[index] = head[previous]
            last[int(head[index])] = done[index]
        first = np.flatnonzero(before < 0)
        initial = initial.copy()
        initial[first] = [last[int(index)] for index in first]
        twice, _, _ = self._play_once(think, took, waits, duration, before, initial, host)
        return twice - once

    def _play_once(
        self,
        think: Floats,
        took: Floats,
        waits: Ints,
        duration: Floats,
        before: Ints,
        initial: Floats,
        begin: float,
    ) -> tuple[float, float, list[float]]:
        """(when all is done, when the host is, [work] when each piece is) of a window that begins at `begin`."""
        think_l, took_l, waits_l = think.tolist(), took.tolist(), waits.tolist()
        previous = self._before.tolist()
        lag = self._lag.tolist()
        duration_l, before_l, across = duration.tolist(), before.tolist(), self._across_stream.tolist()
        initial_l, residual, gap = initial.tolist(), self._residual.tolist(), self._gap.tolist()
        count = len(took_l)
        first = np.searchsorted(self._launch, np.arange(count + 1), side="left").tolist()
        delay = self.launch_delay_us
        done = [0.0] * len(duration_l)
        ended = [0.0] * count
        last = begin
        for index in range(count):
            p = previous[index]
            now = (ended[p] if p >= 0 else begin) + think_l[index]
            for work in range(first[index], first[index + 1]):
                at = now + delay
                b = before_l[work]
                free = (done[b] if b >= 0 else initial_l[work]) + gap[work]
                if free > at:
                    at = free
                x = across[work]
                if x >= 0 and done[x] > at:
                    at = done[x]
                at += residual[work] + duration_l[work]
                done[work] = at
                if at > last:
                    last = at
            w = waits_l[index]
            if w >= 0:
                until = done[w] + lag[index]
                ended[index] = until if until > now + 3.0 else now + min(3.0, took_l[index])
            else:
                ended[index] = now + took_l[index]
        p = previous[count]
        host = (ended[p] if p >= 0 else begin) + think_l[count]
        return max(host, last), host, done


def _previous_in_group(group: Ints) -> Ints:
    """[items] index of the previous item of the same group, -1 for the first."""
    order = np.argsort(group, kind="stable")
    previous = np.full(len(group), -1, dtype=np.int64)
    if len(group) > 1:
        same = group[order][1:] == group[order][:-1]
        previous[order[1:][same]] = order[:-1][same]
    return previous
