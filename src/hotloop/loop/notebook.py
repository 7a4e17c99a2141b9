"""Notebooks: which cell is running, so that running it again continues the same run."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

__all__ = ["Cell", "current_cell"]


@dataclass(frozen=True)
class Cell:
    """A notebook cell that is running.

    Attributes:
        name: the front end's cell id where it sends one; else the number of the code's file, which ipykernel derives
            from the cell's text.
        execution: which execution of the notebook's cells this is; another number if the cell is run again.
    """

    name: str
    execution: int


def current_cell() -> Cell | None:
    """The notebook cell now running; None outside a notebook."""
    ipython = sys.modules.get("IPython")
    shell: Any = ipython.get_ipython() if ipython is not None else None
    kernel = getattr(shell, "kernel", None)
    if kernel is None:
        return None
    try:
        cell = kernel.get_parent("shell").get("metadata", {}).get("cellId")
    except (AttributeError, KeyError, TypeError):
        cell = None
    execution = int(getattr(shell, "execution_count", 0))
    if cell:
        return Cell(str(cell), execution)
    frame = sys._getframe()
    while frame.f_back is not None:
        if frame.f_globals is shell.user_ns and frame.f_code.co_name == "<module>":
            return Cell(frame.f_code.co_filename, execution)
        frame = frame.f_back
    return None
