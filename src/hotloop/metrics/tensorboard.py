"""Rows into TensorBoard's event files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from hotloop.errors import HotloopError
from hotloop.state.ring import Row

__all__ = ["TensorBoard"]


class TensorBoard:
    """The sink that writes numbers as scalars and strings as texts for `tensorboard --logdir FOLDER`.

    Raises:
        HotloopError: the `tensorboard` package is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise HotloopError(
                f"logging to TensorBoard needs the package `tensorboard` ({error}); "
                'install it with `pip install "hotloop[track]"`'
            ) from error
        self._writer: Any = SummaryWriter(os.fspath(folder))

    def write_rows(self, rows: Sequence[Row]) -> None:
        """Queue every value of `rows` under its name, at its step and time."""
        for row in rows:
            for name, value in row.values.items():
                add = self._writer.add_text if isinstance(value, str) else self._writer.add_scalar
                add(name, value, global_step=row.step, walltime=row.time_s)

    def flush(self) -> None:
        """Write queued values to disk."""
        self._writer.flush()

    def close(self) -> None:
        """Write queued values to disk and close the event file."""
        self._writer.close()
