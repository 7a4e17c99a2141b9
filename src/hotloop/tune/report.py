"""The report of a tuning as one HTML page: waterfall, losses in their band, every rung, the doctor before and after."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from hotloop.tune.page import describe_rate
from hotloop.tune.result import Result, Tried
from hotloop.tune.tuned import publish

__all__ = ["make_report", "write_report"]

_STYLE = """
:root { color-scheme: light dark; --ink: #1f2933; --soft: #61707f; --line: #d5dde5; --paper: #fff; --card: #f5f7f9;
  --good: #2a9d8f; --bad: #c0392b; --plain: #8d99ae; --band: #9db8d6; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e9ee; --soft: #9aa8b5; --line: #37424d; --paper: #161b20;
  --card: #1f262d; --band: #3c5570; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1100px;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; } .soft { color: var(--soft); }
table { border-collapse: collapse; width: 100%; } th, td { text-align: left; padding: .3rem .6rem; vertical-align: top;
  border-bottom: 1px solid var(--line); } td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
.kept { color: var(--good); font-weight: 600; } .rejected, .failed { color: var(--bad); font-weight: 600; }
pre { background: var(--card); padding: .6rem .8rem; overflow-x: auto; } svg { width: 100%; height: auto; }
text { font-size: 12px; fill: var(--ink); } text.soft { fill: var(--soft); } .key { display: inline-block; width: 1em;
  height: .25em; vertical-align: middle; margin: 0 .35em 0 1em; } .columns { display: grid; gap: 1.5rem;
  grid-template-columns: repeat(auto-fit, minmax(22rem, 1fr)); }
"""
_COLOURS = ("#1d7874", "#c0392b", "#e07a1f", "#9b5de5", "#b5a642")
_MOST_POINTS = 400


def write_report(result: Result, path: Path) -> None:
    """Write the page; whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    publish(path, make_report(result))


def make_report(result: Result) -> str:
    """The page: it needs no network and no other file."""
    parts = [
        f'<p class="soft">{escape(_heading(result))}</p><h1>{escape(_title(result))}</h1>',
        _section("What each rung gives", _waterfall(result)),
        _section("The same training", _losses(result) + _metrics(result)),
        _section("Every rung", _table(result)),
        _section("Not tried", _pruned(result)),
        _section("The settings", f"<pre>{escape(_settings(result))}</pre>"),
        _section("The doctor", _doctor(result)),
        _section("How it was measured", _method(result)),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(result.script)}: hotloop tune</title><style>{_STYLE}</style></head>"
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _heading(result: Result) -> str:
    machine = ", ".join(str(value) for value in result.machine.values())
    return f"hotloop tune {result.script} · {machine} · {result.trials} trials in {result.seconds:.0f} s"


def _title(result: Result) -> str:
    early = f" ({result.interrupted})" if result.interrupted else ""
    if not result.kept:
        return f"Nothing that was tried is faster and the same training{early}"
    if result.gain is None:
        return f"Kept: {', '.join(rung.name for rung in result.kept)}; not verified together{early}"
    return f"{result.gain.ratio:.2f} times as fast, the same training{early}"


def _section(title: str, content: str) -> str:
    return f"<h2>{escape(title)}</h2>{content}" if content else ""


# ---------------------------------------------------------------------------------------------------- pictures


def _waterfall(result: Result) -> str:
    """Bars of steps per second: as it is, then after each rung that was kept."""
    if not result.step_s:
        return ""
    bars = [("as it is", 1 / result.step_s, 0.0, "var(--plain)")]
    for tried in result.tried:
        if tried.outcome == "kept" and tried.gain is not None:
            before = bars[-1][1]
            bars.append((tried.rung.name, before * tried.gain.ratio, before, "var(--good)"))
    if result.gain is not None:
        bars.append(("all, verified", result.gain.ratio / result.step_s, 0.0, "var(--plain)"))
    most = max(rate for _, rate, _, _ in bars)
    rows = []
    for i, (name, rate, start, colour) in enumerate(bars):
        x, end = 220 + 760 * start / most, 220 + 760 * rate / most
        low, width = min(x, end), max(abs(end - x), 2)
        y = 8 + 30 * i
        rows.append(
            f'<text x="210" y="{y + 15}" text-anchor="end">{escape(name)}</text>'
            f'<rect x="{low:.1f}" y="{y}" width="{width:.1f}" height="20" rx="2" fill="{colour}"/>'
            f'<text x="{max(x, end) + 6:.1f}" y="{y + 15}">{describe_rate(1 / rate)} '
            f"({rate * result.step_s:.2f}x)</text>"
        )
    return (
        f'<svg viewBox="0 0 1100 {16 + 30 * len(bars)}" role="img" aria-label="steps per second">'
        f"{''.join(rows)}</svg><p class='soft'>Steps per second; each bar adds what its rung gave.</p>"
    )


def _losses(result: Result) -> str:
    """Reference, tuned and rejected curves over the band, as an SVG."""
    named = {name: series for name, series in result.losses.items() if series}
    shown = {name: series for name, series in named.items() if not name.startswith("seed +")}
    if not shown or not result.band:
        return ""
    ys = [y for series in shown.values() for y in series.values() if math.isfinite(y)]
    ys += [y for _, _, same, unit in result.band for y in (same - unit, same + unit) if math.isfinite(y)]
    last = max(step for series in shown.values() for step in series)
    low, high = min(ys), max(ys)
    reference = [y for y in named.get("fp32, eager", {}).values() if math.isfinite(y)]
    if reference:
        # a run that went astray is cut off where it would flatten all others
        high = min(high, max(reference) + 1.5 * (max(reference) - min(reference)) + 1e-9)
    span = max(high - low, 1e-9)

    def x(step: float) -> float:
        return 60 + 1000 * step / max(last, 1)

    def y(value: float) -> float:
        return 300 - 280 * min(max((value - low) / span, -0.02), 1.02)

    upper = [(x((a + b) / 2), y(m + u)) for a, b, m, u in result.band if math.isfinite(m)]
    lower = [(x((a + b) / 2), y(m - u)) for a, b, m, u in result.band if math.isfinite(m)]
    area = " ".join(f"{px:.1f},{py:.1f}" for px, py in [*upper, *reversed(lower)])
    lines = [f'<polygon points="{area}" fill="var(--band)" opacity=".45"/>']
    keys = ['<span class="key" style="background:var(--band);height:.8em"></span>what seeds differ by']
    for i, (name, series) in enumerate(_ordered(shown)):
        colour = "var(--ink)" if name == "fp32, eager" else _COLOURS[i % len(_COLOURS)]
        points = " ".join(f"{x(s):.1f},{y(v):.1f}" for s, v in _thinned(series))
        lines.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.4"/>')
        keys.append(f'<span class="key" style="background:{colour}"></span>{escape(name)}')
    for value in (low, low + span / 2, low + span):
        lines.append(f'<text class="soft" x="52" y="{y(value) + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    lines.append('<text class="soft" x="60" y="320">step 1</text>')
    lines.append(f'<text class="soft" x="1060" y="320" text-anchor="end">step {last}</text>')
    return (
        f'<svg viewBox="0 0 1100 330" role="img" aria-label="{escape(result.loss or "loss")}">{"".join(lines)}</svg>'
        f'<p class="soft">{escape(result.loss or "")}, step by step:{"".join(keys)}</p>'
    )


def _ordered(shown: dict[str, dict[int, float]]) -> list[tuple[str, dict[int, float]]]:
    """The reference first, so that it lies below; rejected runs last."""
    return sorted(shown.items(), key=lambda item: (item[0] != "fp32, eager", item[0] != "tuned"))


def _thinned(series: dict[int, float]) -> Iterable[tuple[int, float]]:
    """Means of neighbours, where there are more points than pixels."""
    steps = [step for step in sorted(series) if math.isfinite(series[step])]
    every = max(1, math.ceil(len(steps) / _MOST_POINTS))
    for i in range(0, len(steps), every):
        group = steps[i : i + every]
        yield group[len(group) // 2], sum(series[step] for step in group) / len(group)


# ---------------------------------------------------------------------------------------------------- tables


def _rows(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    def cell(tag: str, i: int, text: str) -> str:
        return f"<{tag}{' class=n' if i in numbers else ''}>{text}</{tag}>"

    top = "".join(cell("th", i, text) for i, text in enumerate(head))
    body = "".join(
        "<tr>" + "".join(cell("td", i, text) for i, text in enumerate(row)) + "</tr>" for row in rows
    )
    return f"<table><tr>{top}</tr>{body}</table>" if rows else ""


def _metrics(result: Result) -> str:
    rows = [
        [escape(name), f"{mine:.5g}", f"{theirs:.5g}", f"{unit:.2g}"]
        for name, (mine, theirs, unit) in result.metrics.items()
    ]
    return _rows(["last value of", "tuned", "fp32, eager", "seeds differ by"], rows, (1, 2, 3))


def _table(result: Result) -> str:
    rows = [["as it is", describe_rate(result.step_s), "1", _memory(result.memory_bytes), "baseline", ""]]
    rows += [_row(tried) for tried in result.tried]
    head = ["rung", "steps/s", "times the best before", "peak memory", "verdict", "because"]
    return _rows(head, rows, (1, 2, 3))


def _row(tried: Tried) -> list[str]:
    gain = ""
    if tried.gain is not None:
        gain = (
            f"{tried.gain.ratio:.3f}<br><span class=soft>{tried.gain.low:.3f} to {tried.gain.high:.3f}</span>"
        )
    once = ""
    if tried.extra_s > 0.5:
        back = f", won back after {tried.break_even} steps" if tried.break_even else ""
        once = f"<br><span class=soft>{tried.extra_s:.1f} s once{back}</span>"
    lines = f"<pre>{escape(chr(10).join(tried.lines))}</pre>" if tried.lines else ""
    kind = tried.outcome.split()[0]
    return [
        f"{escape(tried.rung.name)}<br><span class=soft>{escape(tried.rung.why)}</span>",
        "" if tried.step_s is None else describe_rate(tried.step_s),
        gain,
        _memory(tried.memory_bytes),
        f'<span class="{kind}">{escape(tried.outcome)}</span>',
        escape(tried.why) + once + lines,
    ]


def _memory(count: int) -> str:
    return f"{count / 2**20:.0f} MB" if count else ""


def _pruned(result: Result) -> str:
    rows = [
        [escape(p.name), escape(p.why) + (f"<pre>{escape(p.diff)}</pre>" if p.diff else "")]
        for p in result.pruned
    ]
    return _rows(["rung", "because"], rows)


def _settings(result: Result) -> str:
    return "\n".join(f"{name} = {value!r}" for name, value in result.settings.items()) or "none"


def _doctor(result: Result) -> str:
    columns = [("before", result.findings_before), ("after", result.findings_after)]
    parts = [f"<div><b>{when}</b>{_findings(facts)}</div>" for when, facts in columns if facts is not None]
    return f'<div class="columns">{"".join(parts)}</div>' if parts else ""


def _findings(facts: dict[str, Any]) -> str:
    items = [
        f"<li><b>{escape(f['rule'])}</b> {escape(f['title'])}"
        + (f" <code>{escape(f['place']['text'])}</code>" if f["place"] else "")
        + (f"<pre>{escape(f['fix'])}</pre>" if f["fix"] else "")
        + "</li>"
        for f in facts["findings"]
    ]
    each = (
        ""
        if not facts.get("step_s")
        else f"<p class=soft>a recorded step takes {facts['step_s'] * 1e3:.3g} ms</p>"
    )
    return f"<p>{escape(facts['verdict'])}</p>{each}<ol>{''.join(items)}</ol>"


def _method(result: Result) -> str:
    reference = (
        f"bitwise equality with the script as it is over {result.horizon} steps"
        if result.exact
        else f"{result.horizon} steps beside fp32 eager with the same seed, in the band of {result.seeds + 1} seeds: a "
        "CUSUM over blocks, with at most 1 % false alarms for each logged value"
    )
    lines = [
        "Speed: alternating stretches of steps in two living processes, warm-up left out; Student's interval of the "
        "logarithm of the paired ratio, looked at after 3, 4, 6, 9, 14 and 20 rounds, at 95 % together.",
        "Proof: the same samples in the same order, the same updates and learning rates, the first gradient; "
        f"{reference}.",
        *result.notes,
    ]
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"
