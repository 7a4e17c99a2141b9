"""One self-contained HTML page: no network, no library, opens anywhere."""

from __future__ import annotations

from html import escape
from typing import Any

from hotloop.doctor.recorded import Trace
from hotloop.doctor.report.drawing import COLOURS, draw_step
from hotloop.doctor.report.facts import gather_facts
from hotloop.doctor.report.page import format_seconds
from hotloop.doctor.trace.idle import CAUSES

__all__ = ["make_html"]

_STYLE = """
:root { color-scheme: light dark; --ink: #1f2933; --soft: #61707f; --line: #d5dde5; --paper: #ffffff;
  --card: #f5f7f9; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e9ee; --soft: #9aa8b5; --line: #37424d; --paper: #161b20; --card: #1f262d; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem
  auto; max-width: 1180px; padding: 0 1rem; }
h1 { font-size: 1.35rem; margin: .3rem 0 1rem; } h2 { font-size: 1.05rem; margin: 2rem 0 .6rem; }
.soft, .tick, caption { color: var(--soft); font-size: .87rem; } text { font-size: 11px; fill: var(--ink); }
text.tick { fill: var(--soft); } line.tick { stroke: var(--line); }
section.finding { background: var(--card); border-left: 4px solid #c0392b; padding: .7rem 1rem; margin:
  .8rem 0; border-radius: 4px; }
section.harmless { border-color: #6a994e; } section.note { border-color: #8d99ae; }
.price { float: right; font-weight: 600; } pre { margin: .5rem 0 0; overflow-x: auto; } .add { color:
  #2e8540; } .cut { color: #c0392b; }
.bar { display: flex; height: 26px; border-radius: 4px; overflow: hidden; } .bar div { min-width: 1px; }
table { border-collapse: collapse; width: 100%; } th, td { text-align: left; padding: .25rem .6rem;
  border-bottom: 1px solid var(--line); }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; } ul { margin: .4rem 0; padding-left:
  1.2rem; }
.key { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin: 0 .3em 0 .8em; } svg {
  width: 100%; height: auto; }
td.name { max-width: 34rem; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
"""


def make_html(trace: Trace, facts: dict[str, Any] | None = None) -> str:
    """The report on a trace as one HTML page: verdict, findings, a step drawn, idle time, kernels, before/after."""
    facts = gather_facts(trace) if facts is None else facts
    parts = [
        f'<p class="soft">{escape(_heading(facts))}</p><h1 id="verdict">{escape(facts["verdict"])}</h1>',
        *(_finding(number, finding, facts) for number, finding in enumerate(facts["findings"], 1)),
        *(_other(finding, "harmless") for finding in facts["harmless"]),
        *(_other(note, "note") for note in facts["notes"]),
        _before_after(facts),
        _idle(facts),
        _section("A step", draw_step(trace)),
        _kernels(facts),
        _ranks(facts.get("ranks")),
        _file(facts),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(facts['trace'])}: hotloop doctor</title><style>{_STYLE}</style></head>"
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _heading(facts: dict[str, Any]) -> str:
    parts = [facts["trace"], facts["device"] or "no device named", facts["window_note"]]
    return " · ".join(part for part in parts if part)


def _section(title: str, content: str) -> str:
    return f"<h2>{escape(title)}</h2>{content}" if content else ""


def _finding(number: int, finding: dict[str, Any], facts: dict[str, Any]) -> str:
    price = "no seconds"
    if finding["saves_s"] is not None:
        steps = max(facts["steps"], 1)
        unit = " a step" if facts["steps"] else ""
        price = f"saves {'at most ' if finding['at_most'] else ''}{format_seconds(finding['saves_s'] / steps)}{unit}"
        low, high = finding["saves_low_s"] / steps, finding["saves_high_s"] / steps
        if high - low > 0.05 * max(high, 1e-9):
            price += f" ({format_seconds(low)} to {format_seconds(high)})"
    place = f"<div><code>{escape(finding['place']['text'])}</code></div>" if finding["place"] else ""
    return (
        f'<section class="finding"><span class="price">{escape(price)}</span>'
        f'<b>{number}. {escape(finding["title"])}</b> <span class="soft">{escape(finding["rule"])}</span>'
        f"{place}{_evidence(finding)}{_fix(finding['fix'])}</section>"
    )


def _other(finding: dict[str, Any], kind: str) -> str:
    word = "harmless, 0 s" if kind == "harmless" else "note"
    return (
        f'<section class="finding {kind}"><span class="price">{word}</span><b>{escape(finding["title"])}</b> '
        f'<span class="soft">{escape(finding["rule"])}</span>{_evidence(finding)}</section>'
    )


def _evidence(finding: dict[str, Any]) -> str:
    return "<ul>" + "".join(f"<li>{escape(text)}</li>" for text in finding["evidence"]) + "</ul>"


def _fix(fix: str) -> str:
    if not fix:
        return ""
    lines = []
    for line in fix.splitlines():
        kind = {"+": "add", "-": "cut"}.get(line[:1])
        lines.append(f'<span class="{kind}">{escape(line)}</span>' if kind else escape(line))
    return f"<pre>{chr(10).join(lines)}</pre>"


def _before_after(facts: dict[str, Any]) -> str:
    priced = [finding for finding in facts["findings"] if finding["saves_s"]]
    whole = facts["replay"]["measured_s"]
    if not priced or not whole:
        return ""
    steps = max(facts["steps"], 1)
    left = whole
    rows = [
        f'<tr><td>as recorded</td><td class="n">{format_seconds(whole / steps)}</td><td class="n">100 %</td></tr>'
    ]
    for finding in priced:
        left -= finding["saves_s"]
        rows.append(
            f'<tr><td>and {escape(finding["rule"])} repaired</td><td class="n">{format_seconds(left / steps)}</td>'
            f'<td class="n">{left / whole:.0%}</td></tr>'
        )
    head = "<tr><th>replayed</th><th class=n>a step takes</th><th class=n>of before</th></tr>"
    return _section("Before and after", f"<table>{head}{''.join(rows)}</table>")


def _idle(facts: dict[str, Any]) -> str:
    window = facts["device_window_s"]
    if facts["busy_share"] is None or not window:
        return ""
    shares = [("the device works", facts["busy_share"], "#2a9d8f")]
    shares += [(CAUSES[c], s / window, COLOURS[c]) for c, s in facts["idle_s"].items() if s > 0.001 * window]
    bar = "".join(
        f'<div style="width:{share:.4%};background:{colour}" title="{escape(text)}: {share:.1%}"></div>'
        for text, share, colour in shares
    )
    legend = "".join(
        f'<span class="key" style="background:{colour}"></span>{escape(text)} {share:.1%}'
        for text, share, colour in shares
    )
    return _section(
        "Where the device's time goes", f'<div class="bar">{bar}</div><p class="soft">{legend}</p>'
    )


def _kernels(facts: dict[str, Any]) -> str:
    if not facts["kernels"]:
        return ""
    rows = "".join(
        f'<tr><td>{escape(row["family"])}</td><td class="n">{format_seconds(row["seconds"])}</td>'
        f'<td class="n">{row["share"]:.1%}</td><td class="n">{row["count"]}</td>'
        f'<td class="name">{escape(row["longest"][:160])}</td></tr>'
        for row in facts["kernels"]
    )
    head = (
        "<tr><th>family</th><th class=n>time</th><th class=n>share</th><th class=n>number</th>"
        "<th>most of it</th></tr>"
    )
    return _section("What the device does", f"<table>{head}{rows}</table>")


def _ranks(ranks: dict[str, Any] | None) -> str:
    if not ranks:
        return ""
    rows = "".join(
        f'<tr><td>{"?" if row["rank"] is None else row["rank"]}</td><td class="n">{row["step_ms"]:.1f}</td>'
        f'<td class="n">{"-" if row["busy_share"] is None else format(row["busy_share"], ".0%")}</td>'
        f'<td class="n">{row["collectives_ms"]:.1f}</td><td>{escape(row["name"])}</td></tr>'
        for row in ranks["rows"]
    )
    told = f"<p>The others wait for {escape(ranks['straggler'])}.</p>" if ranks["straggler"] else ""
    head = (
        "<tr><th>rank</th><th class=n>step ms</th><th class=n>busy</th><th class=n>collectives ms</th>"
        "<th>file</th></tr>"
    )
    return _section("Ranks", f"{told}<table>{head}{rows}</table>")


def _file(facts: dict[str, Any]) -> str:
    replay = facts["replay"]
    lines = [*facts["file"]["repairs"]]
    lines.append(
        f"the unedited replay is {replay['error']:+.2%} off the measured time"
        if replay["usable"]
        else f"no seconds are given: {replay['why_not']}"
    )
    if facts["skew_s"]:
        lines.append(f"the device's clock was moved by {format_seconds(facts['skew_s'])}")
    return _section("The recording", "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>")
