"""One step drawn: host calls, device streams, idle time by cause, and where the findings' events lie."""

from __future__ import annotations

from html import escape

import numpy as np
import numpy.typing as npt

from hotloop.doctor.recorded import Trace
from hotloop.doctor.rules.finding import Finding
from hotloop.doctor.trace.columns import Category
from hotloop.doctor.trace.idle import CAUSES
from hotloop.doctor.trace.intervals import Spans
from hotloop.doctor.trace.kernels import family

__all__ = ["COLOURS", "draw_step", "finding_spans"]

_WIDTH, _ROW, _LABEL = 1160, 22, 150
_MOST = 3000  # rectangles in a row; more would be thinner than a pixel

COLOURS = {
    "loader": "#d1495b", "alloc": "#9b5de5", "copy": "#e07a1f", "sync": "#c0392b", "after-sync": "#e6839a",
    "host": "#8d99ae", "queued": "#b8c4bb", "unexplained": "#444444",
    "matrix multiply": "#1d7874", "convolution": "#2a9d8f", "attention": "#264653", "element-wise": "#e9b44c",
    "reduction": "#b5a642", "communication": "#5f4bb6", "copy-work": "#e07a1f", "optimizer": "#6a994e",
    "triton": "#3a86c8", "other": "#7a8b99",
}  # fmt: skip


def finding_spans(trace: Trace, finding: Finding) -> Spans:
    """When the events that a finding is about happened."""
    timeline = trace.timeline
    edit = finding.edit
    if edit is None:
        return Spans()
    spans = Spans()
    calls = np.unique(np.concatenate((edit.unblock, edit.drop, edit.quicken)))
    if len(calls):
        spans = spans.joined(Spans(timeline.call_start[calls], timeline.call_end[calls]))
    if edit.host is not None:
        spans = spans.joined(edit.host[0])
    if edit.work is not None and len(edit.work[0]):
        work = edit.work[0]
        spans = spans.joined(Spans(timeline.work_start[work], timeline.work_end[work]))
    return spans


def draw_step(trace: Trace) -> str:
    """An SVG of the middle step (of the whole window if the trace has no steps)."""
    timeline = trace.timeline
    if timeline.step_spans:
        lengths = np.array([end - start for start, end in timeline.step_spans])
        low, high = timeline.step_spans[int(np.argsort(lengths)[len(lengths) // 2])]
    else:
        low, high = timeline.device_window
    if high <= low:
        return ""
    scale = (_WIDTH - _LABEL) / (high - low)
    rows: list[str] = []
    texts: list[str] = []

    def row(label: str, boxes: list[tuple[float, float, str, str]]) -> None:
        y = len(texts) * (_ROW + 6) + 4
        texts.append(f'<text x="4" y="{y + 15}" class="lane">{escape(label[:22])}</text>')
        for start, end, colour, title in boxes[:_MOST]:
            x = _LABEL + (max(start, low) - low) * scale
            width = max((min(end, high) - max(start, low)) * scale, 0.4)
            rows.append(
                f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_ROW}" fill="{colour}">'
                f"<title>{escape(title)}</title></rect>"
            )

    inside = (timeline.call_end > low) & (timeline.call_start < high)
    calls = np.flatnonzero(inside)
    ops = timeline.events.rows(Category.OP)
    events = timeline.events
    whole = events.names_matching(r"^ProfilerStep|^PyTorch Profiler")[events.name[ops]]
    near = ops[(events.end_us[ops] > low) & (events.start_us[ops] < high) & ~whole]
    for thread in _main_threads(events.thread[near]):
        mine = near[events.thread[near] == thread]
        mine = mine[_outermost(events.start_us[mine], events.end_us[mine])]
        start, end, took = events.start_us, events.end_us, events.duration_us
        chosen = _longest(mine, took)
        boxes = [
            (float(start[r]), float(end[r]), "#9db4c0", _title(events.name_of(r), took[r])) for r in chosen
        ]
        row(f"operators, thread {events.threads[thread][1]}", boxes)
    boxes = []
    for call in _longest(calls, trace.case.call_us):
        name = events.name_of(int(timeline.call_rows[call]))
        title = _title(name, trace.case.call_us[call])
        boxes.append(
            (
                float(timeline.call_start[call]),
                float(timeline.call_end[call]),
                _call_colour(trace, call),
                title,
            )
        )
    row("runtime calls", boxes)
    work = np.flatnonzero((timeline.work_end > low) & (timeline.work_start < high))
    stream = events.stream[timeline.work_rows]
    for number in np.unique(stream[work])[:8]:
        boxes = []
        for item in _longest(work[stream[work] == number], trace.case.work_us):
            name = events.name_of(int(timeline.work_rows[item]))
            what = family(name)
            colour = COLOURS["copy-work" if what == "copy" else what]
            title = _title(name, trace.case.work_us[item])
            boxes.append((float(timeline.work_start[item]), float(timeline.work_end[item]), colour, title))
        row(f"stream {number}", boxes)
    gaps = trace.idle.gaps
    boxes = [
        (float(a), float(b), COLOURS[cause], f"{CAUSES[cause]}: {b - a:.4g} us")
        for a, b, cause in zip(gaps.start, gaps.end, trace.idle.cause, strict=True)
        if b > low and a < high
    ]
    row("idle, by cause", boxes)
    for place, finding in enumerate(trace.findings()[:6], 1):
        spans = finding_spans(trace, finding).clipped(low, high)
        if len(spans):
            pairs = zip(spans.start.tolist(), spans.end.tolist(), strict=True)
            boxes = [(a, b, "#c0392b", f"{finding.rule}: {b - a:.4g} us") for a, b in pairs]
            row(f"{place} {finding.rule}", boxes)
    height = len(texts) * (_ROW + 6) + 30
    marks = "".join(_tick(share, height, (high - low) / 1000) for share in (0.0, 0.25, 0.5, 0.75, 1.0))
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="timeline of one step">{marks}'
        f"{''.join(rows)}{''.join(texts)}</svg>"
    )


def _call_colour(trace: Trace, call: int) -> str:
    timeline = trace.timeline
    kinds = (("sync", timeline.is_sync), ("alloc", timeline.is_alloc), ("copy", timeline.is_copy))
    return next((COLOURS[kind] for kind, mask in kinds if mask[call]), "#5b7083")


def _tick(share: float, height: int, whole_ms: float) -> str:
    x = _LABEL + share * (_WIDTH - _LABEL)
    return (
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height - 22}" class="tick"/>'
        f'<text x="{x:.1f}" y="{height - 8}" class="tick" text-anchor="{"end" if share == 1 else "start"}">'
        f"{share * whole_ms:.4g} ms</text>"
    )


def _title(name: str, took_us: float) -> str:
    return f"{name[:160]}: {float(took_us):.4g} us"


def _longest(index: npt.NDArray[np.int64], took: npt.NDArray[np.float64]) -> list[int]:
    """The longest of them, at most as many as can be seen, in order of time."""
    if len(index) > _MOST:
        index = np.sort(index[np.argsort(-took[index])[:_MOST]])
    return [int(i) for i in index]


def _main_threads(threads: npt.NDArray[np.int32]) -> list[int]:
    found, counts = np.unique(threads, return_counts=True)
    return [int(thread) for thread in found[np.argsort(-counts)][:3]]


def _outermost(start: npt.NDArray[np.float64], end: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    """Which intervals, in order of start, begin after all earlier ones have ended."""
    if not len(start):
        return np.zeros(0, dtype=bool)
    before = np.concatenate(([-np.inf], np.maximum.accumulate(end)[:-1]))
    return np.asarray(start >= before - 0.5)
