"""What tuning found, as a text for the terminal."""

from __future__ import annotations

from hotloop.tune.result import Result, Tried

__all__ = ["describe_rate", "format_result"]


def format_result(result: Result, *, colour: bool = False) -> str:
    """The table of rungs, what is kept, and what it is worth."""
    rows = [("rung", "steps/s", "x best so far", "memory", "verdict")]
    rows.append(("as it is", describe_rate(result.step_s), "1.00", _memory(result.memory_bytes), "baseline"))
    rows += [_row(tried) for tried in result.tried]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = []
    for number, row in enumerate(rows):
        cells = [cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in
                 enumerate(zip(row, widths, strict=False))]  # fmt: skip
        line = "  ".join([*cells, row[4]])
        kept = number > 1 and result.tried[number - 2].outcome == "kept"
        lines.append(f"\x1b[1m{line}\x1b[0m" if colour and kept else line)
    lines += ["", "not tried:", *(f"  {p.name}: {p.why}" for p in result.pruned)] if result.pruned else []
    diffs = dict.fromkeys(p.diff for p in result.pruned if p.diff)
    for diff in diffs:
        lines += [
            "",
            "this change of the script would allow more:",
            *(f"    {line}" for line in diff.splitlines()),
        ]
    return "\n".join([*lines, "", *_summary(result)])


def _row(tried: Tried) -> tuple[str, str, str, str, str]:
    rate = "" if tried.step_s is None else describe_rate(tried.step_s)
    gain = ""
    if tried.gain is not None:
        gain = f"{tried.gain.ratio:.2f} ({tried.gain.low:.2f}-{tried.gain.high:.2f})"
    why = f": {tried.why}" if tried.why and tried.why != tried.outcome else ""
    if tried.break_even is not None and tried.outcome == "kept":
        why += f" (+{tried.extra_s:.3g} s once, won back after {tried.break_even} steps)"
    return tried.rung.name, rate, gain, _memory(tried.memory_bytes), tried.outcome + why


def describe_rate(step_s: float) -> str:
    """Steps per second, three digits and more."""
    return "" if step_s <= 0 else f"{1 / step_s:.4g}"


def _memory(count: int) -> str:
    return "" if not count else f"{count / 2**20:.0f} MB"


def _summary(result: Result) -> list[str]:
    lines = [f"ended early: {result.interrupted}"] if result.interrupted else []
    if not result.kept and result.tried and all(tried.outcome == "not reached" for tried in result.tried):
        return [*lines, "nothing was tried: the budget was spent before; give more by --budget"]
    if not result.kept:
        return [*lines, "nothing that was tried is faster and the same training: the script stays as it is"]
    lines.append(f"kept: {', '.join(rung.name for rung in result.kept)}")
    if result.gain is not None:
        lines.append(f"verified: {result.gain} as fast as the script as it is, {result.gain.rounds} rounds")
    if result.gain_fp32 is not None and not result.baseline_is_fp32:
        lines.append(f"          {result.gain_fp32} as fast as fp32, eager")
    if result.exact:
        lines.append(f"same training: bitwise equal to the script as it is over {result.horizon} steps")
    else:
        lines.append(
            f"same training: {result.horizon} steps beside fp32 eager, in the band of {result.seeds + 1} seeds"
        )
    for name, (mine, theirs, unit) in result.metrics.items():
        lines.append(f"    {name} {mine:.4g}, fp32 eager {theirs:.4g} (seeds differ by {unit:.2g})")
    return lines + [f"note: {note}" for note in result.notes]
