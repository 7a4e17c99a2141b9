"""Notebooks: which cell is running, so that running it again continues the same run."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["current_cell"]


def current_cell() -> str | None:
    """Identity of the notebook cell now running; None outside a notebook.

    The front end's cell id where it sends one; else the number of the code's file, which ipykernel derives from the
    cell's text.
    """
    ipython = sys.modules.get("IPython")
    shell: Any = ipython.get_ipython() if ipython is not None else None
    kernel = getattr(shell, "kernel", None)
    if kernel is None:
        return None
    try:
        cell = kernel.get_parent("shell").get("metadata", {}).get("cellId")
    except (AttributeError, KeyError, TypeError):
        cell = None
    if cell:
        return str(cell)
    frame = sys._getframe()
    while frame.f_back is not None:
        if frame.f_globals is shell.user_ns and frame.f_code.co_name == "<module>":
            return frame.f_code.co_filename
        frame = frame.f_back
    return None
