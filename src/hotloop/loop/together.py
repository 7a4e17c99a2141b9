"""What a loop asks of the other processes of its run."""

from __future__ import annotations

from typing import Any

from hotloop.hardware.processes import Processes
from hotloop.loop.window import Window
from hotloop.nested import map_tensors
from hotloop.parallel import collectives

__all__ = ["Together"]


class Together:
    """Members of `hotloop.Loop`; all but `is_main_process` are collective: every process has to call them."""

    processes: Processes
    _window: Window

    @property
    def is_main_process(self) -> bool:
        """True in the one process that prints, records and saves."""
        return self.processes.is_main

    def wait_for_everyone(self) -> None:
        """Return once every process has arrived here."""
        self.processes.barrier()

    def gather(self, data: Any) -> Any:
        """Tensors of all ranks concatenated along dim 0, in rank order; ranks may differ in its length."""
        return collectives.gather(data, self.processes, uneven=True)

    def gather_for_metrics(self, data: Any) -> Any:
        """`gather` without what a rank replayed to keep the others company."""
        if self._replays():
            data = map_tensors(data, lambda t: t[:0])
        return collectives.gather(data, self.processes, uneven=True)

    def reduce(self, data: Any, how: str = "sum") -> Any:
        """Tensors reduced elementwise over ranks: "sum", "mean", "max" or "min"."""
        return collectives.reduce(data, self.processes, how)

    def _replays(self) -> bool:
        """Whether the batch that the script works on is one that was given again to keep others company."""
        if self.processes.world == 1:
            return False
        loader = self._window.in_hand()
        return loader is not None and bool(loader.is_replay)
