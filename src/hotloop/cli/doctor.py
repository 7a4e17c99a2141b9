"""`hotloop doctor`: why a recorded run is slow, on which line, and what the repair is worth."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotloop.cli.verb import Verb
from hotloop.errors import HotloopError

if TYPE_CHECKING:
    from hotloop.doctor import Trace

__all__ = ["VERB"]

_SUMMARY = "read a profiler trace: what is slow, on which line, and what the repair is worth"
_EPILOG = """TRACE is what torch.profiler exported: .json, .json.gz, .json.zst, a .tar.gz or a folder of ranks.
`# hotloop: ignore[host-sync]` on a line silences that rule there.

examples:
  hotloop doctor trace.json.gz                       what is slow, ranked by seconds
  hotloop doctor trace.json.gz --html report.html    the same as a page, with a timeline
  hotloop doctor before.json --against after.json    two traces compared
  hotloop doctor traces/ --json | jq .verdict        all ranks of a run"""


def _run(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="hotloop doctor",
        description=f"{_SUMMARY[0].upper()}{_SUMMARY[1:]}.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("trace", metavar="TRACE", nargs="?", help="the trace, or a folder of ranks")
    parser.add_argument("--against", metavar="TRACE", help="compare with this one")
    parser.add_argument("--json", action="store_true", help="print it machine-readable")
    parser.add_argument("--html", metavar="FILE", help="also write a page with a timeline, for a browser")
    parser.add_argument(
        "--overlay", metavar="FILE", help="also write a trace with the findings, for Perfetto"
    )
    parser.add_argument("--rules", action="store_true", help="list the rules and end")
    options = parser.parse_args(arguments)
    if options.rules:
        return _list_rules(as_json=options.json)
    if options.trace is None:
        parser.error("there is no TRACE to read")
    from hotloop.doctor import report

    trace = _read(options.trace)
    facts = report.gather_facts(trace)
    if options.html:
        _write(options.html, report.make_html(trace, facts))
    if options.overlay:
        _write(options.overlay, report.make_overlay(trace))
    if options.against:
        comparison = report.compare_facts(facts, report.gather_facts(_read(options.against)))
        print(_dump(comparison) if options.json else report.format_comparison(comparison))
        return 0
    print(_dump(facts) if options.json else report.format_page(facts, colour=_colours()))
    return 0


def _read(path: str) -> Trace:
    from hotloop.doctor import read

    shown = False
    began = time.monotonic()

    def tell(name: str, share: float, events: int) -> None:
        nonlocal shown
        # a read that is over in two seconds needs no progress
        if sys.stderr.isatty() and time.monotonic() - began > 2:
            shown = True
            print(
                f"\r\x1b[Kreading {name}: {share:.0%}, {events} events", end="", file=sys.stderr, flush=True
            )

    trace = read(path, tell)
    if shown:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    return trace


def _list_rules(*, as_json: bool) -> int:
    from hotloop.doctor.rules import RULES

    if as_json:
        print(_dump([{"id": rule.id, "what": rule.what} for rule in RULES]))
    else:
        width = max(len(rule.id) for rule in RULES)
        print("\n".join(f"{rule.id:<{width}}  {rule.what}" for rule in RULES))
    return 0


def _colours() -> bool:
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ


def _dump(value: Any) -> str:
    return json.dumps(value, indent=2, allow_nan=False)


def _write(name: str, text: str) -> None:
    """Write under a temporary name, then publish: no half-written page is taken for a whole one."""
    path = Path(name)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise HotloopError(f"{name} cannot be written: {error.strerror or error}") from error


VERB = Verb("doctor", _SUMMARY, _run)
