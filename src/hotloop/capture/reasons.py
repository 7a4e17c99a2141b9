"""Why a step is not captured, in words: the user's own line in a traceback, bytes, names that are understood."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["cause_of", "first_line", "host_names", "is_library", "megabytes"]


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    text = str(error).strip()
    return text.splitlines()[0][:160] if text else type(error).__name__


def cause_of(error: BaseException) -> str:
    """The innermost line of the user's own code in a traceback, and what was said there."""
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if "/torch/" not in f.filename and "/hotloop/" not in f.filename
    ]
    if not frames:
        return first_line(error)
    last = frames[-1]
    return f"{last.filename.rsplit('/', 1)[-1]}:{last.lineno} `{last.line}`: {first_line(error)}"


def is_library(file: str) -> bool:
    """Whether a source file is of an installed package, not of the user's own code."""
    return any(f"{os.sep}{folder}{os.sep}" in file for folder in ("site-packages", "dist-packages"))


def megabytes(count: int) -> str:
    """A number of bytes for a person."""
    return f"{count / 2**20:,.1f} MiB"


def host_names(function: Callable[..., Any]) -> frozenset[str]:
    """Names by which `function` knows objects of hotloop, and optimizers, whose methods a recording understands."""
    function = getattr(function, "__func__", function)
    scope = dict(getattr(function, "__globals__", {}))
    code = getattr(function, "__code__", None)
    for name, cell in zip(
        code.co_freevars if code else (), getattr(function, "__closure__", None) or (), strict=True
    ):
        try:
            scope[name] = cell.cell_contents
        except ValueError:
            continue
    ours = {name for name, value in scope.items() if type(value).__module__.split(".")[0] == "hotloop"}
    return frozenset(
        ours | {name for name, value in scope.items() if isinstance(value, torch.optim.Optimizer)}
    )
