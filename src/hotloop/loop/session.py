"""What surrounds a run: its record, log, progress line and notes, from the first line to the last."""

from __future__ import annotations

import atexit
import sys
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from hotloop.errors import NonFiniteError
from hotloop.hardware.processes import Processes
from hotloop.loop.notebook import current_cell
from hotloop.loop.notes import Notes
from hotloop.metrics import JsonLines, Log, Means, Progress, Sink
from hotloop.runs import Record
from hotloop.settings import Settings

__all__ = ["Session"]

# The latest session of a notebook, with the cell that began it.
_IN_NOTEBOOK: list[tuple[str, weakref.ref[Session]]] = []


class Session:
    """Record, log, means, progress and notes of one Loop.

    Args:
        clock: gives (updates made, current epoch), cheaply and from any thread.
        samples: gives the samples trained on so far.
    """

    def __init__(
        self,
        *,
        device: torch.device,
        processes: Processes,
        settings: Settings,
        config: Any,
        trackers: Sequence[Sink],
        clock: Callable[[], tuple[int, int]],
        samples: Callable[[], int],
    ) -> None:
        self.notes = Notes(speak=processes.is_main)
        self.means = Means(device, processes)
        self.ended = False
        cell = self.cell = current_cell()
        again = self._same_cell(cell)
        self.record = self._open_record(again, device, processes, settings, config)
        self.folder: Path | None = self.record.folder if self.record is not None else None
        self.progress = Progress(clock=clock, samples=samples, enabled=None if processes.is_main else False)
        self.notes.show = lambda line: self.progress.print(line, file=sys.stderr)
        sinks: list[Sink] = []
        if processes.is_main:
            if self.record is not None:
                self.notes.keep = self.record.note
                if self.record.metrics_path is not None and self.record.enabled:
                    sinks.append(JsonLines(self.record.metrics_path))
            sinks += [self.progress, *trackers]
        self.log = Log(device, sinks)
        self.silent = not sinks
        if cell is not None:
            _IN_NOTEBOOK[:] = [(cell, weakref.ref(self))]
        atexit.register(_end_at_exit, weakref.ref(self))

    def _same_cell(self, cell: str | None) -> Path | None:
        """In a notebook, end the session before this one; the folder of its run if this cell began it."""
        if cell is None or not _IN_NOTEBOOK:
            return None
        before, reference = _IN_NOTEBOOK[0]
        session = reference()
        if session is None:
            return None
        session.end("finished")
        return session.folder if before == cell else None

    def _open_record(
        self, again: Path | None, device: torch.device, processes: Processes, settings: Settings, config: Any
    ) -> Record | None:
        wish = settings["record"]
        if wish is False:
            return None
        if again is not None and processes.is_main:
            return Record.resume(again)
        from hotloop.hardware.machine import describe_machine

        return Record.start(
            None if wish is True else wish,
            config=config,
            settings={"values": settings.values, "sources": settings.sources},
            seed=settings["seed"],
            device=device,
            processes=processes,
            machine=describe_machine() if processes.is_main else None,
        )

    def end(self, status: str, error: BaseException | str | None = None, reason: str | None = None) -> None:
        """Flush and close everything; later calls do nothing."""
        if self.ended:
            return
        self.ended = True
        self.progress.end()
        self.log.close()
        if self.record is not None:
            self.record.finish(status, error, reason)


def _end_at_exit(reference: weakref.ref[Session]) -> None:
    """A script that ends without `end_training` is recorded all the same, with how it ended."""
    session = reference()
    if session is None or session.ended:
        return
    error = getattr(sys, "last_value", None)
    if isinstance(error, KeyboardInterrupt):
        session.end("interrupted", error)
    elif isinstance(error, NonFiniteError):
        session.end("stopped", error)
    elif error is not None:
        session.end("failed", error)
    else:
        session.end("finished")
