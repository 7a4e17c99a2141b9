"""Synchronising calls of a stretch of code, each with the exact source line and a cure in words."""

from __future__ import annotations

import linecache
import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

import torch

__all__ = ["Sync", "record_syncs"]

# What stands on a line that waits, why it does, and what to write instead; the first that matches is taken.
_CURES = (
    (
        r"\.item\(\)|float\(|int\(",
        "reads a value back",
        "keep the tensor; `loop.log` or `loop.read` it after the step",
    ),
    (
        r"\.tolist\(\)|\.cpu\(\)|\.numpy\(\)",
        "copies to the host",
        "do it outside the step, or with `loop.read`",
    ),
    (
        r"\bif\b|\bwhile\b|\bassert\b|bool\(|isnan|isfinite",
        "decides by a value",
        "use torch.where; `nonfinite=` guards",
    ),
    (
        r"nonzero|masked_select|\[[^\]]*[<>=!]=?[^\]]*\]|unique",
        "has a result of unknown size",
        "use torch.where or a mask",
    ),
    (r"print\(", "prints a value", "use `loop.log`, or print after the step"),
    (
        r"\.to\(|\.cuda\(|tensor\(",
        "copies from pageable memory",
        "let `prepare`d loaders bring it, or make it beforehand",
    ),
)


@dataclass(frozen=True)
class Sync:
    """One wait of the host for the device.

    Attributes:
        file: source file of the innermost frame outside torch and hotloop.
        line: line number there.
        text: that line.
    """

    file: str
    line: int
    text: str

    @property
    def reason(self) -> str:
        """Why it waits and what to do, in a few words."""
        for pattern, cause, cure in _CURES:
            if re.search(pattern, self.text):
                return f"{cause}: {cure}"
        return "waits for the device: move it out of the step"

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line} `{self.text}` {self.reason}"


@contextmanager
def record_syncs(device: torch.device) -> Iterator[list[Sync]]:
    """The synchronising calls made inside, in order; the list fills as they happen.

    CUDA only (through `torch.cuda.set_sync_debug_mode("warn")`, which is process-wide while it lasts); elsewhere the
    list stays empty. Pageable `non_blocking` copies are not seen.
    """
    found: list[Sync] = []
    if device.type != "cuda":
        yield found
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        show = warnings.showwarning

        def notice(
            message: Warning | str, category: type[Warning], filename: str, lineno: int, *rest: object
        ) -> None:
            if "synchronizing CUDA operation" in str(message):
                found.append(_locate(sys._getframe(1)))
            elif "debug mode is a prototype" not in str(message):
                show(message, category, filename, lineno)

        warnings.showwarning = notice  # type: ignore[assignment]
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)


def _locate(frame: FrameType | None) -> Sync:
    """The innermost frame that is the user's own."""
    ours = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    theirs = os.path.dirname(os.path.abspath(torch.__file__))
    first = frame
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((ours, theirs)) and not file.endswith(("warnings.py", "contextlib.py")):
            break
        frame = frame.f_back
    frame = frame or first
    assert frame is not None
    text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    return Sync(frame.f_code.co_filename, frame.f_lineno, text)
