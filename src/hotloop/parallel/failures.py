"""Which rank failed first, and how that is told: its traceback alone, then one line about the others."""

from __future__ import annotations

import json
import re
import signal
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Failure", "describe_failures", "read_failures"]

# Ends by these signals are often the consequence of another rank's end: by the agent, or a watchdog's abort.
_SECONDARY_SIGNALS = (signal.SIGTERM, signal.SIGKILL, signal.SIGABRT)


@dataclass(frozen=True)
class Failure:
    """How one rank ended.

    Attributes:
        rank: its number among all ranks.
        code: exit status; negative for the signal that ended it.
        time_ns: when, in nanoseconds since the epoch: when its exception left the script, else when it died.
        kind: name of the exception's class, or "".
        traceback: what it had to say on stderr about its end.
        echo: likely a consequence of another rank's end.
        stopped: it was asked to stop, and did so without an error of its own.
    """

    rank: int
    code: int
    time_ns: int
    kind: str
    traceback: str
    echo: bool
    stopped: bool

    @property
    def exit_code(self) -> int:
        """The exit status as a shell gives it: 128 + n for signal n."""
        return self.code if self.code >= 0 else 128 - self.code

    @property
    def ending(self) -> str:
        """In words, such as "exit code 3" or "signal SIGKILL"."""
        if self.code >= 0:
            return f"exit code {self.code}"
        try:
            return f"signal {signal.Signals(-self.code).name}"
        except ValueError:
            return f"signal {-self.code}"


def read_failures(attempt_folder: Path) -> list[Failure]:
    """The ranks of one attempt on this node that ended badly, the likely cause of it all first.

    In order of time, but a rank whose end looks like the echo of another's comes after the others.
    """
    found = []
    for folder in attempt_folder.glob("rank*"):
        try:
            end = json.loads((folder / "end.json").read_text())
        except FileNotFoundError:
            continue
        if end["code"] == 0:
            continue
        note_file, trace_file = folder / "failure.json", folder / "traceback.txt"
        note = json.loads(note_file.read_text()) if note_file.exists() else {}
        trace = trace_file.read_text(errors="replace") if trace_file.exists() else ""
        stopped = bool(end["stopped_by"]) and note.get("interrupt", True)
        died = -end["code"] in _SECONDARY_SIGNALS
        found.append(
            Failure(
                rank=end["rank"],
                code=end["code"],
                time_ns=note.get("time_ns", end["time_ns"]),
                kind=note.get("kind", ""),
                traceback=trace,
                echo=stopped or note.get("echo", died),
                stopped=stopped,
            )
        )
    return sorted(found, key=lambda failure: (failure.echo, failure.time_ns))


def describe_failures(failures: list[Failure], ranks: int) -> str:
    """Text for stderr: the first failure's traceback, then one line that sums up all of them."""
    first, *others = failures
    # torch prefixes each line with the rank once its process group is up; the last line says it anyway
    text = re.sub(r"^\[rank\d+\]: ?", "", first.traceback, flags=re.MULTILINE)
    # the stack of a crash in native code goes down to the shim
    text = re.sub(r'^  File ".*hotloop.parallel.shim\.py", line \d+ in .*\n', "", text, flags=re.MULTILINE)
    if text and not text.endswith("\n"):
        text += "\n"
    line = f"hotloop launch: rank {first.rank} of {ranks} failed" + (" first" if others else "")
    line += f", with {first.ending}"
    if first.traceback:
        line += " (above)"
    elif first.code == -signal.SIGKILL:
        line += " and no traceback; if nobody killed it, the system ran out of memory: see `dmesg`"
    else:
        line += " and no traceback"
    if others:
        shown = [f"rank {other.rank}: {other.kind or other.ending}" for other in others[:8]]
        if len(others) > 8:
            shown.append(f"{len(others) - 8} more")
        line += "; then " + ", ".join(shown)
    return text + line + "\n"
