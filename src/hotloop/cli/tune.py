"""`hotloop tune`: find the settings that make a script fastest and leave its training the same."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from hotloop.cli.launch import split_arguments
from hotloop.cli.verb import Verb, make_parser
from hotloop.errors import HotloopError

if TYPE_CHECKING:
    from hotloop.tune import Rung

__all__ = ["VERB"]

_SUMMARY = "find the settings that make a script fastest, and prove that it is the same training"
_USAGE = """hotloop tune [options] SCRIPT.py [ARGUMENT ...] [--budget TIME] [--exact]
       hotloop tune [options] -m MODULE [ARGUMENT ...]"""
_EPILOG = """The script is run many times, a stretch of it each time, with settings replaced from outside: nothing is
edited. Its records, checkpoints, trackers and torch.save are left out meanwhile; other files that it writes
are written. What is kept goes to SCRIPT.tuned.toml, a report to SCRIPT.tuned.html.
Ctrl-C ends it with the best so far.

examples:
  hotloop tune train.py --epochs 3 --budget 5m   --budget and --exact may stand behind the script
  hotloop tune train.py -- --budget 7            what follows -- is the script's alone
  hotloop tune --budget 2m --out tuned train.py
  hotloop tune --exact -m project.train          only what is bitwise the same"""


# tune's, where it is not read behind the script
_MISPLACED = ("--seeds", "--rungs", "--out", "--json")


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("tune", _SUMMARY, _EPILOG, usage=_USAGE)
    add = parser.add_argument
    add("-m", "--module", metavar="MODULE", help="tune a module, as `python -m` runs it")
    add(
        "--budget",
        default="10m",
        metavar="TIME",
        help="time to spend, such as 90s, 10m or 1h (default: 10m); a comparison under way is finished",
    )
    add("--exact", action="store_true", help="keep only what is bitwise equal to the script as it is")
    add("--seeds", type=int, default=3, metavar="K", help="further seeds of the reference (default: 3)")
    add("--rungs", metavar="FILE.py", help="try the list RUNGS of this file first")
    add("--out", metavar="FOLDER", help="where settings and report go (default: beside the script)")
    add("--json", action="store_true", help="print the result machine-readable")
    return parser


def _run(arguments: list[str]) -> int:
    parser = _parser()
    own, rest = split_arguments(arguments, parser)
    more, rest = _own_after_script(rest)
    options = parser.parse_args([*own, *more])
    if options.module is None and not rest:
        parser.error("there is no script to tune")
    if options.seeds < 1:
        raise HotloopError(f"--seeds {options.seeds}: a band needs at least 1 further seed")
    budget_s = _seconds(options.budget)
    rungs = _read_rungs(options.rungs) if options.rungs else []
    from hotloop.tune import tune, tuned_path, write_report, write_tuned
    from hotloop.tune.page import format_result

    target = options.module if options.module is not None else rest.pop(0)
    module = options.module is not None
    path = tuned_path(target, module=module)
    if options.out:
        try:
            Path(options.out).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise HotloopError(f"--out {options.out} cannot be made: {error.strerror or error}") from error
        path = Path(options.out) / path.name
    if path.exists():
        was = "an earlier tuning's settings, replaced if anything is kept"
        print(f"hotloop: {path} is there: {was}", file=sys.stderr)
    for item in rest:
        if item.partition("=")[0] in _MISPLACED:
            print(
                f"hotloop: {item} stands behind the script and goes to it; tune's own stands before the script",
                file=sys.stderr,
            )
    teller = _Teller()
    try:
        result = tune(
            target,
            rest,
            module=module,
            budget_s=budget_s,
            exact=options.exact,
            seeds=options.seeds,
            rungs=rungs,
            tell=teller.tell,
        )
    except KeyboardInterrupt:
        print("hotloop: interrupted before anything was measured", file=sys.stderr)
        return 130
    finally:
        teller.end()
    report = path.with_suffix(".html")
    try:
        if result.kept:
            write_tuned(result, path)
        write_report(result, report)
    except OSError as error:
        raise HotloopError(f"{path.parent} cannot be written to: {error.strerror or error}") from error
    if options.json:
        plain = result.to_plain() | {"tuned": str(path) if result.kept else None, "report": str(report)}
        print(json.dumps(plain, indent=2, allow_nan=False, default=str))
        return 0
    print("\n" + format_result(result, colour=sys.stdout.isatty() and "NO_COLOR" not in os.environ))
    if result.kept:
        print(f"settings: {path}   use: Loop(settings={str(path)!r})")
    print(f"report:   {report}   ({result.trials} trials, {result.seconds:.0f} s)")
    return 0


def _own_after_script(rest: list[str]) -> tuple[list[str], list[str]]:
    """`--budget` and `--exact` are tune's behind the script too; what follows a `--` is the script's alone."""
    own: list[str] = []
    script: list[str] = []
    items = iter(rest)
    for item in items:
        if item == "--":
            return own, [*script, *items]
        if item == "--exact" or item.startswith("--budget="):
            own.append(item)
        elif item == "--budget":
            own += [item, next(items, "")]
        else:
            script.append(item)
    return own, script


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if match is None or float(match[1]) <= 0:
        raise HotloopError(f"--budget {text!r} is no time: write 90s, 10m or 1h")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


def _read_rungs(file: str) -> list[Rung]:
    path = Path(file)
    found = importlib.util.spec_from_file_location(path.stem, path) if path.is_file() else None
    if found is None or found.loader is None:
        raise HotloopError(f"--rungs {file}: there is no such Python file")
    module = importlib.util.module_from_spec(found)
    try:
        found.loader.exec_module(module)
    except Exception as error:
        raise HotloopError(f"--rungs {file} fails: {type(error).__name__}: {error}") from error
    rungs = getattr(module, "RUNGS", None)
    from hotloop.tune import Rung

    if not isinstance(rungs, list) or not all(isinstance(rung, Rung) for rung in rungs):
        raise HotloopError(f"--rungs {file}: it has no list RUNGS of hotloop.tune.Rung")
    return rungs


class _Teller:
    """Lines that stay, and on a terminal one that is redrawn: all on stderr."""

    def __init__(self) -> None:
        self._drawn = False
        self._began = time.monotonic()
        self._redraws = sys.stderr.isatty()

    def tell(self, kind: str, text: str) -> None:
        """See `hotloop.tune.tune`."""
        if kind == "now" and not self._redraws:
            return
        self._clear()
        text = f"{time.monotonic() - self._began:4.0f} s  {text}"
        if kind == "now":
            print(f"{text[:100]} …", end="", file=sys.stderr, flush=True)
            self._drawn = True
        else:
            print(text, file=sys.stderr, flush=True)

    def end(self) -> None:
        """Nothing more comes."""
        self._clear()

    def _clear(self) -> None:
        if self._drawn:
            print("\r\x1b[K", end="", file=sys.stderr)
            self._drawn = False


VERB = Verb("tune", _SUMMARY, _run)
