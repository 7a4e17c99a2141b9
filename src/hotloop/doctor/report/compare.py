"""Two traces side by side: the step, what the device does, and which findings came or went."""

from __future__ import annotations

from typing import Any

from hotloop.doctor.report.page import format_seconds

__all__ = ["compare_facts", "format_comparison"]


def compare_facts(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Differences of two reports (`gather_facts`), all for one step (for the window if a trace has no steps)."""
    pair = (first, second)
    steps = [max(facts["steps"], 1) for facts in pair]
    each = [facts["replay"]["measured_s"] / count for facts, count in zip(pair, steps, strict=True)]
    families: dict[str, list[float]] = {}
    idle: dict[str, list[float]] = {}
    for side, facts in enumerate(pair):
        for row in facts["kernels"]:
            families.setdefault(row["family"], [0.0, 0.0])[side] = row["seconds"] / steps[side]
        # without device work there is no device that could be idle
        for cause, seconds in facts["idle_s"].items() if facts["kernels"] else ():
            idle.setdefault(cause, [0.0, 0.0])[side] = seconds / steps[side]
    rules = [{finding["rule"]: finding for finding in facts["findings"]} for facts in pair]
    return {
        "traces": [facts["trace"] for facts in pair],
        "step_s": each,
        "busy_share": [facts["busy_share"] for facts in pair],
        "families_s": families,
        "idle_s": idle,
        "gone": [finding for rule, finding in rules[0].items() if rule not in rules[1]],
        "new": [finding for rule, finding in rules[1].items() if rule not in rules[0]],
        "kept": [rule for rule in rules[0] if rule in rules[1]],
    }


def format_comparison(comparison: dict[str, Any]) -> str:
    """The comparison as text for a terminal."""
    before, after = comparison["step_s"]
    change = f", {(after - before) / before:+.1%}" if before else ""
    lines = [
        f"A  {comparison['traces'][0]}",
        f"B  {comparison['traces'][1]}",
        "",
        f"a step takes {format_seconds(before)} in A, {format_seconds(after)} in B{change}",
    ]
    for title, key in (("device work", "families_s"), ("idle", "idle_s")):
        rows = sorted(comparison[key].items(), key=lambda row: -abs(row[1][1] - row[1][0]))
        rows = [(name, a, b) for name, (a, b) in rows if max(a, b) > 0.005 * max(before, after)]
        if rows:
            lines += ["", f"{title:<16}        A           B      B - A"]
        lines += [
            f"  {n:<16}{a * 1e3:>9.3f} ms{b * 1e3:>9.3f} ms{(b - a) * 1e3:>+9.3f} ms" for n, a, b in rows
        ]
    for word, key in (("gone in B", "gone"), ("new in B", "new")):
        lines += [f"{word}: {finding['rule']}: {finding['title']}" for finding in comparison[key]]
    if comparison["kept"]:
        lines.append(f"in both: {', '.join(comparison['kept'])}")
    return "\n".join(lines)
