"""`hotloop runs list` and `hotloop runs show`: what was run, and how it ended."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotloop.cli.verb import Verb, make_parser
from hotloop.errors import HotloopError

if TYPE_CHECKING:
    from hotloop.runs import Run, RunSummary

__all__ = ["VERB", "find_run", "format_list", "format_run"]

_SUMMARY = "list the recorded runs, or show one: code, command, machine, settings, metrics, end"
_EPILOG = """RUN is the folder of a run, its name, a part of the name that fits no other, or `last`.

examples:
  hotloop runs list
  hotloop runs show last
  hotloop runs show 20260314 --json | jq .config"""


def _run(arguments: list[str]) -> int:
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument(
        "--base", metavar="DIR", help="where the runs are (default: $HOTLOOP_RUNS, else ./runs)"
    )
    shared.add_argument("--json", action="store_true", help="print it machine-readable")
    parser = make_parser("runs", _SUMMARY, _EPILOG)
    nouns = parser.add_subparsers(dest="what", required=True, metavar="list | show RUN")
    nouns.add_parser("list", parents=[shared], help="one line for each run", allow_abbrev=False)
    show = nouns.add_parser("show", parents=[shared], help="everything about one run", allow_abbrev=False)
    show.add_argument("run", metavar="RUN", help="folder, name, part of a name, or `last`")
    options = parser.parse_args(arguments)
    if options.what == "list":
        return _list(options.base, as_json=options.json)
    return _show(options.run, options.base, as_json=options.json)


def _list(base: str | None, *, as_json: bool) -> int:
    from hotloop.runs import list_runs, runs_folder

    runs = list_runs(base)
    if as_json:
        rows = [{**vars(run), "folder": str(run.folder)} for run in runs]
        print(json.dumps(rows, indent=2))
    elif runs:
        print(format_list(runs))
    else:
        print(f"no runs in {runs_folder(base)}")
    return 0


def _show(name: str, base: str | None, *, as_json: bool) -> int:
    from hotloop.runs import load_run

    run = load_run(find_run(name, base))
    if as_json:
        # as recorded, but a run that died says so
        print(json.dumps({**run.fields, "status": run.summary.status}, indent=2))
    else:
        print(format_run(run))
    return 0


def find_run(name: str, base: str | None) -> Path:
    """The folder of the run that `name` means: a folder, a run's name or a part of it, or "last".

    Raises:
        HotloopError: none fits, or more than one does.
    """
    from hotloop.runs import list_runs, runs_folder

    if (Path(name) / "run.json").is_file():
        return Path(name)
    runs = list_runs(base)
    if name == "last" and runs:
        return runs[-1].folder
    fitting = [run for run in runs if run.name == name] or [run for run in runs if name in run.name]
    if len(fitting) == 1:
        return fitting[0].folder
    if fitting:
        raise HotloopError(f"{name} fits {len(fitting)} runs: {', '.join(run.name for run in fitting[-8:])}")
    if not runs:
        raise HotloopError(f"there are no runs in {runs_folder(base)}; --base names another folder")
    raise HotloopError(
        f"there is no run {name} in {runs_folder(base)}; `hotloop runs list` shows those there are"
    )


def format_list(runs: list[RunSummary]) -> str:
    """A table of runs, oldest first: name, status, duration, commit and script."""
    rows = [("name", "status", "duration", "commit", "script")]
    for run in runs:
        script = Path(run.script).name if run.script else "-"
        rows.append((run.name, run.status, _duration(run.duration_s), _commit(run), script))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def format_run(run: Run) -> str:
    """A page about one run."""
    summary, fields = run.summary, run.fields
    versions = fields.get("versions") or {}
    rows: list[tuple[str, Any]] = [
        ("run", summary.folder),
        ("status", summary.status),
        ("error", summary.error),
        ("reason", fields.get("reason")),
        ("started", summary.started),
        ("ended", summary.ended),
        ("duration", _duration(summary.duration_s)),
        ("resumed", len(fields.get("resumed", [])) or None),
        ("command", shlex.join(fields.get("command") or [])),
        ("working folder", fields.get("working_folder")),
        ("commit", _commit(summary)),
        ("seed", fields.get("seed")),
        ("device", fields.get("device")),
        ("processes", (fields.get("ranks") or {}).get("world")),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
    ]
    rows += [("setting", line) for line in _settings(fields.get("settings"))]
    config = fields.get("config")
    if isinstance(config, dict):
        rows += [("config", f"{name} = {json.dumps(item)}") for name, item in config.items()]
    else:
        rows.append(("config", config))
    rows += [("note", note.get("text")) for note in fields.get("notes", [])]
    rows += [("agreement", line) for table in fields.get("agreement", []) for line in _agreement(table)]
    metrics = run.metrics()
    last: dict[str, Any] = {}
    for row in metrics:
        last |= {
            name: (row.get("step"), value) for name, value in row.items() if name not in ("step", "time")
        }
    rows += [
        ("last value", f"{name} = {_value(value)} (step {step})") for name, (step, value) in last.items()
    ]
    shown = [(name, str(value)) for name, value in rows if value not in (None, "", "-")]
    width = max(len(name) for name, _ in shown)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in shown)


def _settings(settings: Any) -> list[str]:
    """One line for each setting that has a value, and where it came from; a precision with its options."""
    if not isinstance(settings, dict):
        return []
    values, sources = settings.get("values") or {}, settings.get("sources") or {}
    options = dict((settings.get("in_force") or {}).get("precision") or {})
    computed = options.pop("name", None)
    lines = []
    for name, value in values.items():
        if value is None:
            continue
        text = f"{name} = {value if isinstance(value, str) else json.dumps(value)} ({sources.get(name, 'unknown')})"
        if name == "precision":
            text += f", which is {computed}" if computed not in (None, value) else ""
            text += "".join(f", {option} = {json.dumps(item)}" for option, item in options.items())
        lines.append(text)
    return lines


def _agreement(table: dict[str, Any]) -> list[str]:
    from hotloop.precision import Agreement

    return str(Agreement.from_dict(table)).splitlines()


def _value(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _commit(run: RunSummary) -> str:
    if run.commit is None:
        return "-"
    return run.commit[:10] + ("+changes" if run.dirty else "")


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}" if minutes else f"{seconds:.1f} s"


VERB = Verb("runs", _SUMMARY, _run)
