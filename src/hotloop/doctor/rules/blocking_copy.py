"""blocking-copy: a copy to the device that holds the host until it is done."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from hotloop.doctor.replay.simulate import Edit
from hotloop.doctor.rules.finding import Case, Finding, Rule

__all__ = ["RULE", "judge", "nominal_rate", "pinned_rate"]

Ints = npt.NDArray[np.int64]

UPLOAD = r"HtoD|(?:Pageable|Pinned|Host) -> Device|HostToDevice"
DOWNLOAD = r"DtoH|Device -> (?:Pageable|Pinned|Host)|DeviceToHost"


def judge(case: Case) -> list[Finding]:
    """Copies during which the host stood still: call >= 0.5 x the device's copy, and >= 100 us.

    This finds `non_blocking=True` from pageable memory as well, which makes no synchronising call at all. Priced by
    replaying with these calls (and the synchronisation right behind each) not waiting, and the copies of each
    direction on a stream of their own: what pinned memory and prefetching give. Pinned copies keep their measured
    speed; pageable ones get that of pinned ones where it is known (see `pinned_rate`), else they keep theirs, too, and
    the range's far end has the GPU's nominal link.
    """
    timeline = case.timeline
    first = timeline.first_work
    calls = case.calls
    calls = calls[timeline.is_copy[calls] & (first[calls] >= 0)]
    if not len(calls):
        return []
    work = first[calls]
    took, copying = case.call_us[calls], case.work_us[work]
    up, down = timeline.work_named(UPLOAD), timeline.work_named(DOWNLOAD)
    large = (took >= 0.5 * copying) & (took >= 100.0)
    uploads = calls[large & up[work]]
    # downloads that are large are transfers, not values that are read
    downloads = calls[large & down[work] & (copying >= 1000.0)]
    findings = []
    for chosen, direction in ((uploads, "to the device"), (downloads, "to the host")):
        if not len(chosen) or case.in_steps(timeline.call_start[chosen]) < 0.5:
            continue
        moved = first[chosen]
        if direction == "to the host" and len(uploads):
            continue  # told together with the uploads below
        together = np.union1d(uploads, downloads)
        everything = together if len(uploads) and len(downloads) else chosen
        findings.append(_finding(case, everything, moved, direction))
    return findings


def pinned_rate(case: Case) -> float | None:
    """Bytes a microsecond of a pinned copy: measured beside the recording, or the trace's own best; else None."""
    timeline = case.timeline
    if timeline.pace.link_bytes_us is not None:
        return timeline.pace.link_bytes_us
    pinned = np.flatnonzero(
        timeline.work_named(r"Memcpy (?:HtoD|DtoH) \((?:Pinned -> Device|Device -> Pinned)\)")
    )
    size = timeline.events.bytes[timeline.work_rows[pinned]].astype(np.float64)
    took = case.work_us[pinned]
    good = (size >= 1e6) & (took > 0)
    return float((size[good] / took[good]).max()) if good.any() else None


def nominal_rate(case: Case) -> float | None:
    """Bytes a microsecond that the GPU's link can carry; None for an unknown GPU.

    PCI Express of 16 lanes carries 15.8, 31.5 or 63 GB/s in its generations 3, 4 and 5, of which 78 to 88 % are left
    for data. A machine may give a GPU less: one of the public traces shows 5 GB/s on an A100.
    """
    major, name = case.timeline.device_property("computeMajor"), case.timeline.device_name
    if "MI3" in name or (major is not None and major >= 9):
        return 55_000.0
    if "MI2" in name or major == 8:
        return 25_000.0
    return 12_300.0 if major in (6, 7) else None


def _pinned_factors(case: Case, work: Ints, rate: float) -> npt.NDArray[np.float64]:
    """[work] by how much shorter each copy gets at the rate; 1 for those that are pinned or small."""
    timeline = case.timeline
    size = timeline.events.bytes[timeline.work_rows[work]].astype(np.float64)
    took = case.work_us[work]
    slow = timeline.work_named(r"ageable")[work] & (size >= 1e5) & (took > 0)
    factors = np.ones(len(work))
    factors[slow] = np.minimum(size[slow] / rate / took[slow], 1.0)
    return factors


def _finding(case: Case, calls: Ints, moved: Ints, direction: str) -> Finding:
    timeline = case.timeline
    first = timeline.first_work
    work = first[calls]
    up, down = timeline.work_named(UPLOAD), timeline.work_named(DOWNLOAD)
    groups = tuple(group for group in (work[up[work]], work[down[work]]) if len(group))
    both = len(groups) == 2
    syncs = _syncs_behind(case, calls)
    names = [timeline.events.name_of(int(timeline.work_rows[index])) for index in work]
    pageable = sum("ageable" in name for name in names)
    longest = calls[int(np.argmax(case.call_us[calls]))]
    size = float(timeline.events.bytes[timeline.work_rows[work]].sum())
    spent = float(case.work_us[work].sum())
    kind = " from or to pageable memory" if pageable else ""
    evidence = [
        f"{case.often(len(calls))}; the host is held {float(case.call_us[calls].sum()) / 1000:.4g} ms in the copy call "
        f"itself" + ("" if len(syncs) else ", without any synchronising call"),
        f"{len(calls)} copies, {size / 1e6:.4g} MB, {spent / 1000:.4g} ms on the device"
        + (f" ({size / spent / 1000:.3g} GB/s)" if spent and size else ""),
    ]
    if pageable:
        evidence.append(
            f"{pageable} of {len(calls)} use pageable memory: non_blocking=True has no effect on those"
        )
    rate, most = (pinned_rate(case), nominal_rate(case)) if pageable else (None, None)
    if rate is not None:
        evidence.append(f"priced at {rate / 1000:.3g} GB/s, the speed of pinned memory here")
    elif most is not None:
        evidence.append(
            f"priced at their own speed, the range's end at {most / 1000:.3g} GB/s: what pinned memory gives "
            "over a full link of this GPU"
        )
    edit = Edit(unblock=np.union1d(calls, syncs), free=groups)
    return Finding(
        RULE.id,
        f"Copies {'in both directions' if both else direction}{kind} hold up the host.",
        evidence,
        "- x = x.to(device)\n+ DataLoader(..., pin_memory=True) and x = x.to(device, non_blocking=True)",
        case.place(int(timeline.call_rows[longest])),
        edit=replace(edit, work=(work, _pinned_factors(case, work, rate))) if rate else edit,
        optimistic=replace(edit, work=(work, _pinned_factors(case, work, most)))
        if most and not rate
        else None,
        weight_us=spent,
    )


def _syncs_behind(case: Case, calls: Ints) -> Ints:
    """The synchronisation right after each copy on the same thread, where there is one."""
    timeline = case.timeline
    thread = timeline.events.thread[timeline.call_rows]
    found = []
    for call in calls.tolist():
        for after in range(call + 1, min(call + 6, len(timeline.call_rows))):
            if thread[after] == thread[call]:
                near = timeline.call_start[after] - timeline.call_end[call] < 20.0
                if timeline.is_sync[after] and near:
                    found.append(after)
                break
    return np.array(found, dtype=np.int64)


RULE = Rule("blocking-copy", "a copy holds the host until it is done", judge)
