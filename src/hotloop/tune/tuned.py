"""`train.tuned.toml`: what tuning kept, for `Loop(settings=…)`, with the machine that it was found on."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from hotloop.tune.result import Result

__all__ = ["publish", "tuned_path", "write_tuned"]


def tuned_path(script: str, *, module: bool = False) -> Path:
    """Where the settings of a script are kept: beside it; those of a module in the working folder."""
    if module:
        return Path(script.rpartition(".")[2] + ".tuned.toml")
    path = Path(script)
    return path.with_name(path.stem + ".tuned.toml")


def write_tuned(result: Result, path: Path) -> None:
    """Write the settings of `result` and the kind of machine; whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    # the script may read this very file: what it had from there was in force, and is what was built on
    settings = result.facts.get("from_file", {}) | result.settings
    gain = "" if result.gain is None else f", {result.gain.ratio:.2f} times as fast as the script as it was"
    lines = [
        f"# found by `hotloop tune {result.script}`{gain}",
        f"# use it: Loop(settings={str(path)!r}), or HOTLOOP_SETTINGS={path} in the environment",
        "",
        "[settings]",
        *(f"{name} = {_value(value)}" for name, value in settings.items()),
        *(f"# kept too, and no setting: {line}" for line in _beyond_settings(result)),
        "",
        "# on another kind of machine these settings are left aside",
        "[machine]",
        *(f"{name} = {_value(value)}" for name, value in result.machine.items()),
        "",
    ]
    publish(path, "\n".join(lines))


def _beyond_settings(result: Result) -> list[str]:
    """What rungs of the user's own did that a settings file cannot."""
    lines = []
    for rung in result.kept:
        lines += [f"{name}={value} in the environment" for name, value in rung.environment.items()]
        lines += [f"{rung.setup} called before the script starts"] if rung.setup else []
    return lines


def _value(value: Any) -> str:
    return json.dumps(value)


def publish(path: Path, text: str) -> None:
    """Write under a temporary name, then rename: no half-written file is taken for a whole one."""
    descriptor, part = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(part, 0o644)
        os.replace(part, path)
    except OSError:
        Path(part).unlink(missing_ok=True)
        raise
