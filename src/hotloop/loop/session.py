"""What surrounds a run: its record, log, progress line and notes, from the first line to the last."""

from __future__ import annotations

import atexit
import contextlib
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hotloop.errors import HotloopError, NonFiniteError, SettingError
from hotloop.hardware.processes import Processes
from hotloop.loop.notebook import Cell, current_cell
from hotloop.loop.notes import Notes
from hotloop.metrics import JsonLines, Log, Means, Progress, Sink
from hotloop.settings import Settings

if TYPE_CHECKING:
    from hotloop.runs import Record

__all__ = ["Session", "sinks_of"]


def sinks_of(trackers: Sequence[Sink] | Sink) -> list[Sink]:
    """One or several trackers as a list.

    Raises:
        SettingError: one of them is none.
    """
    one = hasattr(trackers, "write_rows") or not isinstance(trackers, Iterable) or isinstance(trackers, str)
    sinks: list[Any] = [trackers] if one else list(trackers)  # type: ignore[arg-type]
    for tracker in sinks:
        if not hasattr(tracker, "write_rows") or not hasattr(tracker, "close"):
            raise SettingError(
                f"trackers={tracker!r} is no tracker: give objects such as hotloop.metrics.TensorBoard(folder), "
                "with write_rows(rows) and close()"
            )
    return sinks


@dataclass
class _Begun:
    """The runs that one execution of a notebook's cell began, and those of the execution before it."""

    execution: int
    before: list[tuple[Path | None, weakref.ref[Session]]]
    runs: list[tuple[Path | None, weakref.ref[Session]]] = field(default_factory=list)


_CELLS: dict[str, _Begun] = {}


class Session:
    """Record, log, means, progress and notes of one Loop.

    Args:
        precision: the number format in force, for the record.
        clock: gives (updates made, current epoch), cheaply and from any thread.
        samples: gives the samples trained on so far.
    """

    def __init__(
        self,
        *,
        device: torch.device,
        processes: Processes,
        settings: Settings,
        precision: dict[str, Any],
        config: Any,
        trackers: Sequence[Sink],
        clock: Callable[[], tuple[int, int]],
        samples: Callable[[], int],
    ) -> None:
        self.notes = Notes(speak=processes.is_main)
        self.means = Means(device, processes)
        self.ended = False
        # a notebook keeps the last error of any cell for ever
        self.error_before = id(getattr(sys, "last_value", None))
        cell = self.cell = current_cell()
        again = self._same_run(cell)
        self.record = self._open_record(again, device, processes, settings, config, precision)
        self.folder: Path | None = self.record.folder if self.record is not None else None
        self.progress = Progress(clock=clock, samples=samples, enabled=None if processes.is_main else False)
        self.notes.show = lambda line: self.progress.print(line, file=sys.stderr)
        sinks: list[Sink] = []
        if processes.is_main:
            if self.record is not None:
                self.notes.keep = self.record.note
                if self.record.metrics_path is not None and self.record.enabled:
                    sinks += self._open_metrics(self.record.metrics_path)
            sinks += [self.progress, *trackers]
        self.log = Log(device, sinks)
        if cell is not None:
            _CELLS[cell.name].runs.append((self.folder, weakref.ref(self)))
        # a loop that is let go of before the program ends: its run is over
        self._let_go = weakref.finalize(self, _finish, self.record)
        self._let_go.atexit = False
        atexit.register(_end_at_exit, weakref.ref(self))

    def _same_run(self, cell: Cell | None) -> Path | None:
        """In a notebook whose cell is run again: end what it began, and give the folder of the run it began in turn."""
        if cell is None:
            return None
        begun = _CELLS.get(cell.name)
        if begun is None or begun.execution != cell.execution:
            begun = _CELLS[cell.name] = _Begun(cell.execution, begun.runs if begun is not None else [])
            for _, reference in begun.before:
                session = reference()
                if session is not None:
                    session.end("finished")
        number = len(begun.runs)
        return begun.before[number][0] if number < len(begun.before) else None

    def _open_metrics(self, path: Path) -> list[Sink]:
        try:
            return [JsonLines(path)]
        except OSError as error:
            self.notes.say(f"logged values are not kept, training goes on: {error}")
            return []

    def _open_record(
        self,
        again: Path | None,
        device: torch.device,
        processes: Processes,
        settings: Settings,
        config: Any,
        precision: dict[str, Any],
    ) -> Record | None:
        wish = settings["record"]
        if wish is False:
            return None
        from hotloop.hardware.machine import describe_machine
        from hotloop.runs import Record

        facts = {
            "values": settings.values,
            "sources": settings.sources,
            "in_force": {"precision": precision},
        }
        if again is not None and processes.is_main:
            # its folder may have been deleted in between
            with contextlib.suppress(HotloopError):
                record = Record.resume(again)
                record.update(config=config, settings=facts, seed=settings["seed"])
                return record
        return Record.start(
            None if wish is True else wish,
            config=config,
            settings=facts,
            seed=settings["seed"],
            device=device,
            processes=processes,
            machine=describe_machine() if processes.is_main else None,
        )

    def keep(self, name: str, entry: dict[str, Any]) -> None:
        """Add `entry` to those that the record lists under `name`."""
        if self.record is not None:
            self.record.update(**{name: [*self.record.fields.get(name, []), entry]})

    def end(self, status: str, error: BaseException | str | None = None, reason: str | None = None) -> None:
        """Flush and close everything; later calls do nothing."""
        if self.ended:
            return
        self.ended = True
        self.progress.end()
        self.log.close()
        self._let_go.detach()
        if self.record is not None:
            if self.log.dropped or self.log.lost:
                self.record.update(rows_dropped=self.log.dropped, rows_lost=self.log.lost)
            self.record.finish(status, error, reason)


def _finish(record: Record | None) -> None:
    if record is not None:
        record.finish("finished")


def _end_at_exit(reference: weakref.ref[Session]) -> None:
    """A script that ends without `end_training` is recorded all the same, with how it ended."""
    session = reference()
    if session is None or session.ended:
        return
    error = getattr(sys, "last_value", None)
    if error is not None and (id(error) == session.error_before or session.cell is not None):
        # in a notebook the last error may be of any cell, and of any run
        error = None
    if isinstance(error, KeyboardInterrupt):
        session.end("interrupted", error)
    elif isinstance(error, NonFiniteError):
        session.end("stopped", error)
    elif error is not None:
        session.end("failed", error)
    else:
        session.end("finished")
