"""The page for the terminal: verdict, findings by what they save, what looks bad and is not, where the time goes."""

from __future__ import annotations

import textwrap
from typing import Any

from hotloop.doctor.trace.idle import CAUSES

__all__ = ["format_page", "format_seconds"]

_WIDTH = 100


def format_page(facts: dict[str, Any], *, colour: bool = False) -> str:
    """The report as text.

    Args:
        facts: from `gather_facts`.
        colour: with ANSI colours, for a terminal.
    """
    ink = _Ink(colour)
    lines = [ink.dim(_heading(facts)), "", *textwrap.wrap(ink.plain(facts["verdict"]), _WIDTH)]
    lines[2:] = [ink.bold(line) for line in lines[2:]]
    for number, finding in enumerate(facts["findings"], 1):
        lines += ["", *_finding(number, finding, facts, ink)]
    for finding in facts["harmless"]:
        lines += ["", f"    harmless, 0 s: {finding['rule']}: {finding['title']}"]
        lines += [f"      {text}" for text in finding["evidence"][:3]]
    for note in facts["notes"]:
        if note["title"] == facts["verdict"]:
            lines += ["", *(f"    {text}" for text in note["evidence"]), *_fix(note, ink)]
        else:
            lines += ["", f"    note: {note['rule']}: {note['title']}"]
            lines += [f"      {text}" for text in note["evidence"]]
    # where one launch is the repair, what stands in its way belongs beside it
    if facts.get("stoppers") and any(f["rule"] in ("launch-bound", "optimizer") for f in facts["findings"]):
        lines += ["", "    before a step can be captured as one launch (@loop.capture):"]
        for each in facts["stoppers"][:12]:
            where = f"{each['file']}:{each['line']}  " if each["line"] else ""
            lines.append(f"      {where}{each['why']}")
    if facts["silenced"]:
        silenced = ", ".join(f"{f['rule']} at {f['place']['text']}" for f in facts["silenced"])
        lines += ["", f"    silenced in the source: {silenced}"]
    lines += ["", *_time(facts)]
    if facts.get("ranks"):
        lines += ["", *_ranks(facts["ranks"])]
    lines += [f"the file: {text}" for text in facts["file"]["repairs"]]
    return "\n".join(lines)


class _Ink:
    def __init__(self, colour: bool) -> None:
        self._colour = colour

    def plain(self, text: str) -> str:
        return text

    def bold(self, text: str) -> str:
        return f"\x1b[1m{text}\x1b[0m" if self._colour else text

    def dim(self, text: str) -> str:
        return f"\x1b[2m{text}\x1b[0m" if self._colour else text

    def diff(self, line: str) -> str:
        code = {"-": "31", "+": "32"}.get(line[:1])
        return f"\x1b[{code}m{line}\x1b[0m" if self._colour and code else line


def _heading(facts: dict[str, Any]) -> str:
    parts = [facts["trace"]]
    if facts["device"]:
        parts.append(facts["device"])
    if facts["steps"]:
        each = f"{facts['window_note']}, {format_seconds(facts['step_s'])} each"
        if facts["replay"].get("event_us"):
            each += f", {format_seconds(facts['replay']['unrecorded_s'] / facts['steps'])} unrecorded"
        parts.append(each)
    elif facts["window_s"]:
        parts.append(f"{format_seconds(facts['window_s'])}, no steps marked")
    return " | ".join(parts)


def _finding(number: int, finding: dict[str, Any], facts: dict[str, Any], ink: _Ink) -> list[str]:
    head = f"{number:>2}  {finding['rule']}  {_price(finding, facts)}"
    lines = [ink.bold(head.rstrip()), f"    {finding['title']}"]
    if finding["place"]:
        lines.append(f"    {finding['place']['text']}")
    lines += [f"      {text}" for text in finding["evidence"]]
    return lines + _fix(finding, ink)


def _fix(finding: dict[str, Any], ink: _Ink) -> list[str]:
    return [f"    {ink.diff(line)}" for line in finding["fix"].splitlines() if line.strip()]


def _price(finding: dict[str, Any], facts: dict[str, Any]) -> str:
    if finding["saves_s"] is None:
        return "(no seconds)"
    steps = max(facts["steps"], 1)
    saves, low, high = (finding[key] / steps for key in ("saves_s", "saves_low_s", "saves_high_s"))
    most, each = "at most " if finding["at_most"] else "", " a step" if facts["steps"] else ""
    text = f"saves {most}{format_seconds(saves)}{each}"
    whole = facts["replay"].get("unrecorded_s", facts["replay"]["measured_s"]) / steps
    if whole:
        text += f" of {format_seconds(whole)}"
    if high - low > 0.05 * max(high, 1e-9):
        text += f"  ({format_seconds(low)} .. {format_seconds(high)})"
    return text


def _time(facts: dict[str, Any]) -> list[str]:
    window = facts["device_window_s"]
    if facts["busy_share"] is None or not window:
        return []
    rows = [("the device works", facts["busy_share"] * window)]
    rows += [(CAUSES[cause], seconds) for cause, seconds in facts["idle_s"].items()]
    rows = [rows[0], *sorted((row for row in rows[1:] if row[1] > 0.005 * window), key=lambda row: -row[1])]
    lines = []
    for text, seconds in rows:
        bar = "#" * round(30 * seconds / window)
        lines.append(f"{seconds / window:>5.0%}  {bar:<30}  {text}")
    return lines


def _ranks(ranks: dict[str, Any]) -> list[str]:
    lines = ["rank  step ms  busy  collectives ms  exposed ms"]
    for row in ranks["rows"]:
        rank = "?" if row["rank"] is None else row["rank"]
        busy = "-" if row["busy_share"] is None else f"{row['busy_share']:.0%}"
        lines.append(
            f"{rank:>4}  {row['step_ms']:>7.1f}  {busy:>4}  {row['collectives_ms']:>14.1f}  "
            f"{row['exposed_ms']:>10.1f}  {row['name']}"
        )
    if ranks["straggler"]:
        lines.append(
            f"the others wait for {ranks['straggler']}: up to {ranks['waiting_ms']:.1f} ms a step"
            + (f"; moving the data takes {ranks['transfer_ms']:.1f} ms" if ranks["matched"] else "")
        )
        if ranks["reason"]:
            lines.append(f"{ranks['straggler']}: {ranks['reason']}")
    for finding in ranks["straggler_findings"]:
        lines.append(f"found there: {finding['rule']}: {finding['title']}")
        if finding["place"]:
            lines.append(f"    {finding['place']['text']}")
    return lines


def format_seconds(seconds: float) -> str:
    """Three digits and a unit: `1.23 s`, `45.6 ms`, `7.8 us`."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds * 1e6:.3g} us"
