"""Loggers that speak once per run, or once per rank in order."""

from __future__ import annotations

import logging
import os
from typing import Any

from hotloop.accelerate.state import PartialState
from hotloop.errors import ProcessError

__all__ = ["MultiProcessAdapter", "get_logger"]


class MultiProcessAdapter(logging.LoggerAdapter[logging.Logger]):
    """A logger whose calls take `main_process_only=True` and `in_order=False`.

    With `in_order` every rank logs, one after the other; that is a collective call.
    """

    def __init__(self, logger: logging.Logger, extra: Any = None) -> None:
        super().__init__(logger, extra)
        self._warned: set[tuple[Any, ...]] = set()

    @staticmethod
    def _should_log(main_process_only: bool) -> bool:
        return not main_process_only or PartialState().is_main_process

    def process(self, msg: Any, kwargs: Any) -> tuple[Any, Any]:
        """The message with this process's rank before it."""
        msg, kwargs = super().process(msg, kwargs)
        kwargs.setdefault("stacklevel", 2)
        return f"[RANK {PartialState().process_index}] {msg}", kwargs

    def log(self, level: int, msg: Any, *args: Any, **kwargs: Any) -> None:
        """Log where it is wanted; see the class.

        Raises:
            ProcessError: neither PartialState() nor Accelerator() was made before.
        """
        if not PartialState._shared_state:
            raise ProcessError("make a PartialState() or an Accelerator() before this logger is used")
        main_process_only = kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        if not self.isEnabledFor(level):
            return
        message, options = self.process(msg, kwargs)
        if in_order:
            state = PartialState()
            for rank in range(state.num_processes):
                if rank == state.process_index:
                    self.logger.log(level, message, *args, **options)
                state.wait_for_everyone()
        elif self._should_log(main_process_only):
            self.logger.log(level, message, *args, **options)

    def warning_once(self, *args: Any, **kwargs: Any) -> None:
        """As `warning`, but the same call speaks only once."""
        key = (args, tuple(sorted(kwargs.items())))
        if key not in self._warned:
            self._warned.add(key)
            kwargs.setdefault("stacklevel", 3)
            self.warning(*args, **kwargs)


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """The logger `name`, for several processes; its level from `log_level`, else ACCELERATE_LOG_LEVEL."""
    level = log_level if log_level is not None else os.environ.get("ACCELERATE_LOG_LEVEL")
    logger = logging.getLogger(name)
    if level is not None:
        logger.setLevel(level.upper())
        logger.root.setLevel(level.upper())
    return MultiProcessAdapter(logger, {})
