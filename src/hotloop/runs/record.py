"""The record of a run: a folder of plain files that says what ran, where, with what, and how it ended."""

from __future__ import annotations

import datetime
import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hotloop.errors import HotloopError
from hotloop.hardware.processes import Processes
from hotloop.runs.environment import (
    find_packages,
    find_variables,
    find_versions,
    identify_process,
    show_command,
)
from hotloop.runs.jsonfile import to_plain, write_json
from hotloop.runs.source import capture_source

__all__ = ["END_STATUSES", "METRICS_FILE", "RECORD_FILE", "Record", "runs_folder"]

RECORD_FILE = "run.json"
METRICS_FILE = "metrics.jsonl"
END_STATUSES = ("finished", "failed", "interrupted", "stopped")

_FORMAT = "hotloop run 1"
# how long the end of a run waits for git and the list of packages
_END_PATIENCE_S = 5.0
# by folder, those that still look at code and packages
_OBSERVERS: dict[Path, threading.Thread] = {}


def runs_folder(base: str | os.PathLike[str] | None = None) -> Path:
    """Where runs are kept: `base`, else HOTLOOP_RUNS, else `runs` in the working folder."""
    return Path(base or os.environ.get("HOTLOOP_RUNS") or "runs")


class Record:
    """One run's `run.json` and the files beside it; made by `start` or `resume`.

    Only rank 0 writes; on other ranks, in forked children, and once the disk failed, every method does
    nothing. A failing disk is said once on stderr and never stops training.

    Attributes:
        folder: the run's folder, the same on all ranks; None if none could be made.
        enabled: this process writes the record.
    """

    def __init__(self, folder: Path | None, fields: dict[str, Any], *, enabled: bool) -> None:
        self.folder = folder
        self.enabled = enabled
        self._fields = fields
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._observer: threading.Thread | None = None

    @classmethod
    def start(
        cls,
        folder: str | os.PathLike[str] | None = None,
        config: Any = None,
        settings: Any = None,
        seed: int | None = None,
        device: Any = None,
        processes: Processes | None = None,
        script: str | os.PathLike[str] | None = None,
        machine: Mapping[str, Any] | None = None,
    ) -> Record:
        """Begin a record; a collective call if there are several processes.

        Takes milliseconds: git, packages and uncommitted code are looked at by a thread of its own.

        Args:
            folder: where; None makes `<time>-<script>-<id>` in `runs_folder()`. A folder that holds a run
                already is continued as by `resume`.
            config: the user's configuration: a dict, a Namespace, a dataclass, anything.
            settings: hotloop's own settings.
            seed: the run's seed.
            device: the device that it trains on.
            processes: the processes of the run; None for one.
            script: the file that runs; None takes the program's.
            machine: a description of the computer.
        """
        processes = processes or Processes()
        record = cls(None, {}, enabled=False)
        if processes.is_main:
            path = _find_script(script)
            if folder is not None and (Path(folder) / RECORD_FILE).exists():
                record = cls.resume(folder, script=script)
            else:
                fields = {
                    "format": _FORMAT,
                    "name": "",
                    "status": "running",
                    "started": _now(),
                    "script": str(path) if path else None,
                    "process": identify_process(),
                    "command": show_command(),
                    "working_folder": os.getcwd(),
                    "seed": seed,
                    "device": to_plain(device),
                    "ranks": {"world": processes.world, "local_world": processes.local_world},
                    "backend": processes.backend,
                    "config": to_plain(config),
                    "settings": to_plain(settings),
                    "versions": find_versions(),
                    "machine": to_plain(machine),
                    "variables": find_variables(),
                    "notes": [],
                }
                record = cls._create(folder, path, fields)
        if processes.world > 1:
            shared = processes.broadcast_object(os.fspath(record.folder) if record.folder else None)
            record.folder = Path(shared) if shared else None
        return record

    @classmethod
    def resume(
        cls, folder: str | os.PathLike[str], *, script: str | os.PathLike[str] | None = None
    ) -> Record:
        """Continue the record in `folder`: the same run, a further stretch. For the one process that writes.

        The time, the command and the code of the new stretch are added under "resumed"; metrics written to
        `metrics_path` follow the old ones. Waits for what this process still finds out for the old stretch.

        Raises:
            HotloopError: there is no readable record in `folder`.
        """
        folder = Path(folder).absolute()
        before = _OBSERVERS.get(folder.resolve())
        if before is not None:
            # it would write over what follows here
            before.join()
        try:
            fields = json.loads((folder / RECORD_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise HotloopError(f"{folder} holds no run that could be continued: {error}") from None
        if not isinstance(fields, dict) or fields.get("format") != _FORMAT:
            raise HotloopError(f"{folder / RECORD_FILE} is no record of this form ({_FORMAT!r})")
        path = _find_script(script)
        process = identify_process()
        stretch = {"time": _now(), "command": show_command(), "process": process}
        fields.setdefault("resumed", []).append(stretch)
        fields.update(status="running", process=process)
        for ended in ("ended", "error", "traceback", "reason"):
            fields.pop(ended, None)
        record = cls(folder, fields, enabled=True)
        record._save(sync=False)
        record._observe(path, stretch, folder / f"resumed-{len(fields['resumed'])}")
        return record

    @property
    def metrics_path(self) -> Path | None:
        """The file for logged rows (`hotloop.metrics.JsonLines`); None without a folder."""
        return self.folder / METRICS_FILE if self.folder else None

    @property
    def fields(self) -> dict[str, Any]:
        """What `run.json` says, as a copy."""
        with self._lock:
            return json.loads(json.dumps(self._fields))

    def note(self, text: str) -> None:
        """Add a line: something that hotloop decided by itself, or that a reader should know."""
        if not self._writes():
            return
        with self._lock:
            if self._writes():
                self._fields["notes"].append({"time": _now(), "text": to_plain(text)})
                self._save()

    def update(self, **fields: Any) -> None:
        """Set further fields of `run.json`, or replace some."""
        if not self._writes():
            return
        with self._lock:
            if self._writes():
                self._fields.update(to_plain(fields))
                self._save()

    def finish(
        self, status: str = "finished", error: BaseException | str | None = None, reason: str | None = None
    ) -> None:
        """Say how the run ended; the first call counts, later ones do nothing.

        Args:
            status: one of "finished", "failed", "interrupted" (Ctrl-C, a signal), "stopped" (by hotloop
            itself).
            error: what was raised, or its text.
            reason: why it ended, in a few words.

        Raises:
            HotloopError: `status` is none of these.
        """
        if status not in END_STATUSES:
            raise HotloopError(f"a run cannot end as {status!r}; valid are: {', '.join(END_STATUSES)}")
        if not self._writes():
            return
        self.wait(timeout_s=_END_PATIENCE_S)
        with self._lock:
            if self._fields["status"] != "running":
                return
            self._fields["status"] = status
            self._fields["ended"] = _now()
            if reason is not None:
                self._fields["reason"] = to_plain(reason)
            if isinstance(error, BaseException):
                self._fields["error"] = to_plain(f"{type(error).__name__}: {error}")
                self._fields["traceback"] = to_plain("".join(traceback.format_exception(error)))
            elif error is not None:
                self._fields["error"] = to_plain(error)
            self._save()

    def wait(self, timeout_s: float | None = None) -> None:
        """Return once code and packages are recorded, or `timeout_s` seconds have passed."""
        observer = self._observer
        if observer is not None and observer is not threading.current_thread() and os.getpid() == self._pid:
            observer.join(timeout_s)

    @classmethod
    def _create(
        cls, folder: str | os.PathLike[str] | None, script: Path | None, fields: dict[str, Any]
    ) -> Record:
        """A new record in `folder` or a new folder; a disabled one if the disk does not allow it."""
        try:
            path = _make_folder(folder, script)
        except OSError as error:
            _say(f"this run is not recorded, training goes on: {error}")
            return cls(None, fields, enabled=False)
        fields["name"] = path.name
        record = cls(path, fields, enabled=True)
        record._save(sync=False)
        record._observe(script, fields, path)
        return record

    def _observe(self, script: Path | None, fields: dict[str, Any], folder: Path) -> None:
        """Look at code and packages in a thread: git may take seconds on a large repository."""
        if not self.enabled or self.folder is None:
            return
        # Runs are no part of the code; but a folder chosen by the user may lie in the midst of it.
        ignore = self.folder.parent.resolve()
        if (script or Path.cwd()).resolve().is_relative_to(ignore):
            ignore = self.folder.resolve()

        home = self.folder.resolve()

        def observe() -> None:
            try:
                folder.mkdir(exist_ok=True)
                found = {"packages": find_packages(), "code": capture_source(folder, script, ignore=ignore)}
                with self._lock:
                    fields.update(to_plain(found))
                    self._save()
            except OSError as error:
                self._fail(error)
            finally:
                _OBSERVERS.pop(home, None)

        self._observer = _OBSERVERS[home] = threading.Thread(
            target=observe, name="hotloop-record", daemon=True
        )
        self._observer.start()

    def _writes(self) -> bool:
        """Whether this process may write: not in the child of a fork, where even the lock may be stuck."""
        return self.enabled and os.getpid() == self._pid

    def _save(self, *, sync: bool = True) -> None:
        """Write `run.json`."""
        with self._lock:
            if not self._writes() or self.folder is None:
                return
            try:
                write_json(self.folder / RECORD_FILE, self._fields, sync=sync)
            except OSError as error:
                self._fail(error)

    def _fail(self, error: OSError) -> None:
        """Stop recording, saying so once."""
        with self._lock:
            if self.enabled:
                self.enabled = False
                _say(f"the run's record could not be written, training goes on without it: {error}")


def _make_folder(folder: str | os.PathLike[str] | None, script: Path | None) -> Path:
    """`folder`, or a new one named after time and script."""
    if folder is not None:
        path = Path(folder).absolute()
        path.mkdir(parents=True, exist_ok=True)
        return path
    base = runs_folder().absolute()
    base.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^A-Za-z0-9_.]+", "_", script.stem if script else "notebook")[:40]
    while True:
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
        path = base / f"{stamp}-{name}-{os.urandom(3).hex()}"
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path


def _find_script(script: str | os.PathLike[str] | None) -> Path | None:
    """The file that runs, absolute; None in a notebook or an interactive interpreter."""
    if script is not None:
        return Path(script).absolute()
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    if main is None or "ipykernel" in sys.modules:
        return None
    return Path(main).absolute()


def _now() -> str:
    """The time in UTC, to the millisecond."""
    now = datetime.datetime.now(datetime.UTC)
    return now.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _say(text: str) -> None:
    """One line on stderr; a closed or full stderr is no reason to fail."""
    try:
        print(f"hotloop: {text}", file=sys.stderr, flush=True)
    except (OSError, ValueError):
        return
