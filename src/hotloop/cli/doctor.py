"""`hotloop doctor`: why a recorded run is slow, on which line, and what the repair is worth."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from hotloop.cli.launch import split_arguments
from hotloop.cli.publish import publish_text
from hotloop.cli.verb import Verb, make_parser
from hotloop.errors import HotloopError

if TYPE_CHECKING:
    from hotloop.doctor import Trace

__all__ = ["VERB"]

_SUMMARY = "say why a run is slow: on which line, and what the repair is worth"
_USAGE = """hotloop doctor [options] TRACE|RUN
       hotloop doctor [options] SCRIPT.py [ARGUMENT ...]
       hotloop doctor [options] -m MODULE [ARGUMENT ...]"""
_EPILOG = """TRACE is what torch.profiler exported: .json, .json.gz, .json.zst, a .tar.gz or a folder of ranks.
SCRIPT is run to its end, unchanged; a short window of its steps is recorded (the script's optimizer marks
them), and the report follows on stderr. The exit status is the script's. A run that the script records keeps
the report, too: RUN is its folder or name.
`# hotloop: ignore[host-sync]` on a line silences that rule there.

examples:
  hotloop doctor trace.json.gz                       what is slow, ranked by seconds
  hotloop doctor trace.json.gz --html report.html    the same as a page, with a timeline
  hotloop doctor before.json --against after.json    two traces compared
  hotloop doctor --against RUN train.py              this run with one that was watched before
  hotloop doctor traces/ --json | jq .verdict        all ranks of a run
  hotloop doctor train.py --epochs 1                 run and watch a script
  hotloop doctor -n 2 train.py                       two processes, one window on both
  torchrun --nproc-per-node 8 -m hotloop doctor train.py     under another launcher: rank 0 reports for all
  hotloop doctor --virtual-gpu train.py              on the CPU: what would make a GPU wait"""


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("doctor", _SUMMARY, _EPILOG, usage=_USAGE)
    parser.add_argument(
        "-m", "--module", metavar="MODULE", help="run and watch a module, as `python -m` does"
    )
    parser.add_argument(
        "--virtual-gpu",
        action="store_true",
        help="without a GPU: list the lines of a script that would wait for one",
    )
    parser.add_argument(
        "--skip", type=int, default=20, metavar="N", help="steps before the window (default: 20)"
    )
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="steps in the window (default: 5)")
    parser.add_argument(
        "-n",
        "--processes",
        type=int,
        metavar="N",
        help="run the script in N processes, as `hotloop launch -n N` does, with one window on all of them",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda", "xpu", "mps"),
        help="with -n: compute there (see `hotloop launch`)",
    )
    parser.add_argument(
        "--gather",
        metavar="FOLDER",
        help="a folder that all machines see: the ranks of all of them leave their traces there",
    )
    parser.add_argument(
        "--against", metavar="TRACE", help="compare with this one: a trace, a run, or what --json printed"
    )
    parser.add_argument("--json", action="store_true", help="print it machine-readable")
    parser.add_argument("--html", metavar="FILE", help="also write a page with a timeline, for a browser")
    parser.add_argument(
        "--overlay", metavar="FILE", help="also write a trace with the findings, for Perfetto"
    )
    parser.add_argument("--rules", action="store_true", help="list the rules and end")
    return parser


def _run(arguments: list[str]) -> int:
    parser = _parser()
    own, rest = split_arguments(arguments, parser)
    script = bool(rest) and rest[0].endswith(".py")
    if rest and not script and "-m" not in own and "--module" not in own:
        # options may follow a trace; what follows a script or module belongs to it
        own, rest = [*own, *rest[1:]], rest[:1]
    options = parser.parse_args(own)
    if options.rules:
        return _list_rules(as_json=options.json)
    if options.module is not None or script:
        return _watch(options, rest) if options.processes is None else _launch(options, own, rest)
    if not rest:
        parser.error("name a trace, a run or a script")
    from hotloop.doctor import report

    facts = report.load_report(rest[0])
    if facts is None:
        trace = _read(rest[0])
        facts = report.gather_facts(trace)
        if options.html:
            publish_text(options.html, report.make_html(trace, facts))
        if options.overlay:
            publish_text(options.overlay, report.make_overlay(trace))
    elif options.html or options.overlay:
        raise HotloopError(f"{rest[0]} is a report without its trace: --html and --overlay need the trace")
    if options.against:
        return _compare(facts, _reference(options.against), options)
    print(_dump(facts) if options.json else report.format_page(facts, colour=_colours()))
    return 0


def _reference(against: str) -> dict[str, Any]:
    from hotloop.doctor import report

    return report.load_report(against) or report.gather_facts(_read(against))


def _compare(
    facts: dict[str, Any],
    reference: dict[str, Any],
    options: argparse.Namespace,
    *,
    status: int = 0,
    file: Any = None,
) -> int:
    from hotloop.doctor import report

    comparison = report.compare_facts(facts, reference)
    print(
        _dump(comparison) if options.json else report.format_comparison(comparison), file=file or sys.stdout
    )
    return status


def _watch(options: argparse.Namespace, rest: list[str]) -> int:
    """Run a script and report on stderr: stdout is the script's."""
    from hotloop.doctor import report
    from hotloop.doctor.live import run_watched

    if options.skip < 1 or options.steps < 1:
        raise HotloopError(f"--skip {options.skip} --steps {options.steps}: both must be at least 1")
    # one that cannot be read is told before the script has run for hours
    reference = _reference(options.against) if options.against else None
    target = options.module if options.module is not None else rest.pop(0)
    if options.virtual_gpu:
        return _list_stalls(target, rest, module=options.module is not None, as_json=options.json)
    watched = run_watched(
        target,
        rest,
        module=options.module is not None,
        skip=options.skip,
        active=options.steps,
        folder=options.gather,
    )
    sys.stdout.flush()
    if not watched.tells:
        return watched.status
    if watched.trace is None:
        print(
            f"hotloop: nothing was recorded: {watched.steps} optimizer steps were seen, and the window begins "
            f"after {options.skip} (--skip)",
            file=sys.stderr,
        )
        return watched.status
    facts = report.gather_facts(watched.trace)
    if options.html:
        publish_text(options.html, report.make_html(watched.trace, facts))
    if options.overlay:
        publish_text(options.overlay, report.make_overlay(watched.trace))
    report.keep_in_runs(facts)
    if reference is not None:
        return _compare(facts, reference, options, status=watched.status, file=sys.stderr)
    print(_dump(facts) if options.json else report.format_page(facts), file=sys.stderr)
    return watched.status


def _launch(options: argparse.Namespace, own: list[str], rest: list[str]) -> int:
    """The same command in several processes, each of which finds out that it is one of them."""
    from hotloop.parallel.launch import Launch, launch_processes

    if options.virtual_gpu:
        raise HotloopError("--virtual-gpu watches one process: leave out -n")
    words = [*_without(own, {"-n", "--processes", "--device"}), *rest]
    return launch_processes(
        Launch(
            target="hotloop",
            arguments=("doctor", *words),
            module=True,
            processes=options.processes,
            device=options.device,
        )
    )


def _without(words: list[str], options: set[str]) -> list[str]:
    """`words` without the options and their values, given as `-n 2`, `-n2` or `--processes=2`."""
    left: list[str] = []
    skip = False
    for word in words:
        if skip:
            skip = False
        elif word in options:
            skip = True
        elif word.partition("=")[0] not in options and not (word[:2] in options and word[:2] != "--"):
            left.append(word)
    return left


def _list_stalls(target: str, rest: list[str], *, module: bool, as_json: bool) -> int:
    from hotloop.doctor.live import run_virtually

    virtual = run_virtually(target, rest, module=module)
    sys.stdout.flush()
    if as_json:
        facts = {
            **vars(virtual),
            "stalls": [{**vars(s), "why": s.why, "recurs": s.recurs} for s in virtual.stalls],
            "stoppers": [vars(stopper) for stopper in virtual.stoppers],
        }
        print(_dump(facts), file=sys.stderr)
        return virtual.status
    if virtual.broke:
        print(
            f"hotloop: the virtual GPU cannot run this script ({virtual.broke}); it ran on the CPU",
            file=sys.stderr,
        )
    stalls = [stall for stall in virtual.stalls if stall.recurs]
    if stalls:
        how = "" if virtual.on_device else ", if its parameters were on one"
        lines = "1 line" if len(stalls) == 1 else f"{len(stalls)} lines"
        print(f"{lines} would make a GPU wait{how}:", *stalls, sep="\n", file=sys.stderr)
    else:
        print("no line would make a GPU wait", file=sys.stderr)
    if len(virtual.stalls) > len(stalls):
        print(
            f"outside the steps or in few of them, where it matters little: {len(virtual.stalls) - len(stalls)} more",
            file=sys.stderr,
        )
    others = [stopper for stopper in virtual.stoppers if not stopper.why.startswith("waits")]
    if others:
        print("besides, a step could not be captured as it is:", *others, sep="\n", file=sys.stderr)
    return virtual.status


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


VERB = Verb("doctor", _SUMMARY, _run)
