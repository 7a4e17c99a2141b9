"""host-sync: the host waits for the device to read a value, and the device then waits for the host."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from hotloop.doctor.replay.simulate import Edit
from hotloop.doctor.rules.finding import Case, Finding, Rule
from hotloop.doctor.trace.columns import Category
from hotloop.doctor.trace.intervals import Spans
from hotloop.doctor.trace.places import Place

__all__ = ["RULE", "explain_sync", "find_prints", "find_syncs", "judge"]

Ints = npt.NDArray[np.int64]


def find_syncs(case: Case) -> Ints:
    """Calls in the window by which the host waits to learn something: synchronisations, and copies to the host.

    Left out: waits before the window's first launch and after its last one (those of whoever records), and the
    synchronisation that belongs to a large copy to the device (see blocking-copy).
    """
    timeline = case.timeline
    last = timeline.call_start[timeline.launch[case.work][timeline.launch[case.work] >= 0]]
    if not len(last):
        return np.empty(0, dtype=np.int64)
    initial, final = float(last.min()), float(last.max())
    calls = case.calls
    first = timeline.first_work[calls]
    to_host = np.zeros(len(calls), dtype=bool)
    copies = (first >= 0) & timeline.is_copy[calls]
    # a small tensor made on the host and sent waits just as one that is read
    small = _to_device(case)[first[copies]] & (case.call_us[calls][copies] < 100.0)
    to_host[copies] = _to_host(case)[first[copies]] | small
    blocking = to_host & (case.call_us[calls] >= 10.0) & _waits_for_copy(case, calls)
    begun = timeline.call_start[calls]
    sync = timeline.is_sync[calls] & (begun < final) & (begun > initial)
    to_device = _follows_upload(case, calls, sync)
    return calls[(sync & ~to_device) | (blocking & (timeline.call_start[calls] < final))]


def _waits_for_copy(case: Case, calls: Ints) -> npt.NDArray[np.bool_]:
    """[calls] the host stood still until half of the device's copy was done."""
    timeline = case.timeline
    first = timeline.first_work[calls]
    middle = np.full(len(calls), np.inf)
    own = first >= 0
    middle[own] = (timeline.work_start[first[own]] + timeline.work_end[first[own]]) / 2
    return timeline.call_end[calls] >= middle


def _to_host(case: Case) -> npt.NDArray[np.bool_]:
    return case.timeline.work_named(r"DtoH|Device -> (?:Pageable|Pinned|Host)|DeviceToHost")


def _to_device(case: Case) -> npt.NDArray[np.bool_]:
    return case.timeline.work_named(r"HtoD|(?:Pageable|Pinned|Host) -> Device|HostToDevice")


def _follows_upload(case: Case, calls: Ints, sync: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """[calls] synchronisations directly after a large copy to the device on the same thread."""
    timeline = case.timeline
    upload = _to_device(case)
    found = np.zeros(len(calls), dtype=bool)
    thread = timeline.events.thread[timeline.call_rows]
    for position in np.flatnonzero(sync).tolist():
        before = position - 1
        while before >= 0 and thread[calls[before]] != thread[calls[position]]:
            before -= 1
        if before < 0:
            continue
        work = int(timeline.first_work[calls[before]])
        near = timeline.call_start[calls[position]] - timeline.call_end[calls[before]] < 20.0
        large = case.call_us[calls[before]] >= 100.0
        found[position] = work >= 0 and bool(upload[work]) and bool(near) and bool(large)
    return found


_REASONS: tuple[tuple[str, str, str], ...] = (
    (r"_tensor_str\.py|_str_intern", "printing a tensor", "print it from time to time only, or loop.log(value=t)"),
    (r"is_nonzero", "bool(tensor): a branch on a tensor's value", "keep the branch on the device: torch.where"),
    (r"isnan|isfinite|isinf", "a NaN check", "check on the device and read the flag some steps later"),
    (r"masked_select", "masked_select", "torch.where(mask, x, 0): the shape stays known"),
    (r"aten::index_put_", "an assignment through a boolean mask", "torch.where(mask, value, x)"),
    (r"aten::index$", "indexing with a boolean mask", "torch.where(mask, x, 0), or indices that are computed once"),
    (r"nonzero", "nonzero: the number of results is not known before", "torch.where with three arguments"),
    (r"_unique2|unique", "unique", "compute it once, outside the loop"),
    (r"aten::equal|aten::allclose", "a comparison of whole tensors", "compare on the device"),
    (r"repeat_interleave", "repeat_interleave without output_size", "pass output_size="),
    (r"bincount", "bincount", "pass minlength and use scatter_add_"),
    (r"grad_scaler", "the loss scaler reads its inf flag", "a scaler whose flag stays on the device"),
    (r"clip_grad", "gradient clipping with a check on the host", "error_if_nonfinite=False"),
    (r"aten::item|_local_scalar_dense", ".item(): a value is read", "read it some steps later, or loop.log it"),
    (r"tolist|numpy", ".tolist() or .numpy()", "read it some steps later"),
    (r"DeviceSynchronize|CtxSynchronize", "torch.cuda.synchronize()", "remove it; events measure without a stall"),
    (r"EventSynchronize", "waiting for an event", "wait for an older event"),
    (r"aten::copy_|aten::to|_to_copy|aten::cpu", ".cpu() or .to('cpu')", "non_blocking=True into pinned memory"),
)  # fmt: skip


_SENT = (
    "a small tensor sent from pageable memory, such as torch.tensor(x, device='cuda')",
    "make it on the device, or once outside the loop",
)


def explain_sync(case: Case, call: int, place: Place) -> tuple[str, str]:
    """(why the host waits here, what to write instead)."""
    import re

    timeline = case.timeline
    row = int(timeline.call_rows[call])
    names = [timeline.events.name_of(at) for at in timeline.ancestors(row)][:40]
    text = [*names, *place.frames, timeline.events.name_of(row)]
    before = call if timeline.is_copy[call] else call - 1
    after_us = timeline.call_start[call] - timeline.call_end[before] if before >= 0 else np.inf
    ends_copy = "StreamSynchronize" in timeline.events.name_of(row) and after_us < 20.0
    work = int(timeline.first_work[before]) if before == call or ends_copy else -1
    if work >= 0 and _to_device(case)[work]:
        return _SENT
    for pattern, reason, fix in _REASONS:
        if any(re.search(pattern, name) for name in text):
            return reason, fix
    return "a synchronisation", "remove it, or move it out of the loop"


def judge(case: Case) -> list[Finding]:
    """Synchronising calls in at least half of the steady steps, grouped by source line if the trace has stacks.

    The fix is priced by replaying the window with these calls not waiting. What a tool that adds up the waits would
    say is given as evidence; it is wrong in both directions: a wait behind which the device stays busy costs
    nothing ("harmless"), a short one that drains the queue costs more than its own length.
    """
    timeline = case.timeline
    calls = find_syncs(case)
    if not len(calls):
        return []
    prints = find_prints(case)
    printed = prints.within(timeline.call_start[calls], timeline.call_start[calls] + 0.001) > 0
    return _by_place(case, calls[~printed]) + _printing(case, calls[printed], prints)


def _by_place(case: Case, calls: Ints) -> list[Finding]:
    timeline = case.timeline
    places = {int(call): case.place(int(timeline.call_rows[call])) for call in calls}
    if any(place.known for place in places.values()):
        return _by(
            case, calls, places, lambda place: (place.file, place.line, tuple(place.candidates), place.op)
        )
    return _by(case, calls, places, lambda place: ())


# What torch does to make a tensor's text: it looks for the finite, non-zero values, then at the largest and smallest.
_PRINT_BEGINS = ("aten::isfinite", "aten::ne", "aten::__and__", "aten::masked_select")
_PRINT_GOES_ON = frozenset(
    f"aten::{name}"
    for name in (
        "abs", "to", "min", "max", "unbind", "ceil", "ne", "is_nonzero", "div", "gt", "lt", "detach", "item", "select",
        "reshape", "isfinite", "__and__", "masked_select", "numel", "_to_copy", "cpu", "eq", "any", "narrow", "slice",
        "stack", "cat", "alias", "view", "clone",
    )
)  # fmt: skip


def find_prints(case: Case) -> Spans:
    """When a tensor's text was made, known by the operators that does: from the first of them to the last."""
    timeline = case.timeline
    events = timeline.events
    ops = events.rows(Category.OP)
    select = ops[events.names_matching(r"^aten::masked_select$")[events.name[ops]]]
    low, high = timeline.window
    select = select[(events.start_us[select] >= low) & (events.start_us[select] <= high)]
    begins, ends = [], []
    for thread in np.unique(events.thread[select]).tolist():
        mine = ops[events.thread[ops] == thread]
        end = np.maximum.accumulate(events.end_us[mine])
        top = mine[np.concatenate(([True], events.start_us[mine][1:] >= end[:-1] - 0.001))]
        for at in np.flatnonzero(np.isin(top, select)).tolist():
            names = [events.name_of(int(row)) for row in top[max(at - 3, 0) : at + 1]]
            if tuple(names) != _PRINT_BEGINS:
                continue
            first, last = at - 3, at
            while last + 1 < len(top) and events.name_of(int(top[last + 1])) in _PRINT_GOES_ON:
                last += 1
            while first > 0 and events.name_of(int(top[first - 1])) in ("aten::reshape", "aten::detach"):
                first -= 1
            begins.append(float(events.start_us[top[first]]))
            ends.append(float(events.end_us[top[last]]))
    return Spans(np.array(begins), np.array(ends))


def _printing(case: Case, calls: Ints, prints: Spans) -> list[Finding]:
    """Printing is priced as not done at all: its operators and the host's time between them go with its waits."""
    timeline = case.timeline
    if not len(calls) or case.in_steps(timeline.call_start[calls]) < 0.5:
        return []
    every = case.calls[
        prints.within(timeline.call_start[case.calls], timeline.call_start[case.calls] + 0.001) > 0
    ]
    waited = case.replay.waited_us(calls)
    busy = float(timeline.busy.within(timeline.call_start[calls], timeline.call_end[calls]).sum())
    first = calls[int(np.argmax(case.call_us[calls]))]
    reason, fix = next((why, cure) for _, why, cure in _REASONS if why == "printing a tensor")
    return [
        Finding(
            RULE.id,
            f"The host waits for the device: {reason}.",
            [
                f"{case.often(len(prints))}: {len(_waits(case, calls)) // max(len(prints), 1)} waits each, in "
                f"{prints.total / max(len(prints), 1) / 1000:.3g} ms of the host",
                f"the waits add up to {waited / 1000:.4g} ms, with the device busy in {_share(busy, waited)} of it",
            ],
            fix,
            case.place(int(timeline.call_rows[first])),
            edit=Edit(drop=every, host=(prints, 0.0)),
            weight_us=prints.total,
        )
    ]


def _by(
    case: Case, calls: Ints, places: dict[int, Place], key: Callable[[Place], tuple[object, ...]]
) -> list[Finding]:
    timeline = case.timeline
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for call in calls.tolist():
        groups[key(places[call])].append(call)
    findings = []
    for members in groups.values():
        index = np.array(members)
        if case.in_steps(timeline.call_start[index]) < 0.5:
            continue
        reasons = Counter(explain_sync(case, call, places[call]) for call in members)
        (reason, fix), _ = reasons.most_common(1)[0]
        waited = case.replay.waited_us(index)
        busy = float(timeline.busy.within(timeline.call_start[index], timeline.call_end[index]).sum())
        several = ", ".join(f"{count} x {why}" for (why, _), count in reasons.most_common(4))
        title = (
            f"The host waits for the device: {reason}."
            if len(reasons) == 1
            else f"The host waits for the device in {len(reasons)} ways."
        )
        findings.append(
            Finding(
                RULE.id,
                title,
                [
                    f"{case.often(len(_waits(case, index)))}: {several}",
                    f"the waits add up to {waited / 1000:.4g} ms, with the device busy in {_share(busy, waited)} of it",
                ],
                fix,
                places[members[int(np.argmax(case.call_us[index]))]],
                edit=Edit(unblock=index),
                weight_us=waited,
            )
        )
    return findings


def _waits(case: Case, index: Ints) -> Ints:
    """One call for each wait: a copy and the synchronisation right after it are one."""
    sync = index[case.timeline.is_sync[index]]
    return sync if len(sync) else index


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole > 0 else "none"


RULE = Rule("host-sync", "the host waits for the device to read a value", judge)
