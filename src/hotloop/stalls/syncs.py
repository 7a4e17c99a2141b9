"""Synchronising calls of a stretch of code, each with the exact source line and a cure in words."""

from __future__ import annotations

import linecache
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

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
        pageable: a copy that was to be asynchronous, but comes from memory that is not pinned.
    """

    file: str
    line: int
    text: str
    pageable: bool = False

    @property
    def reason(self) -> str:
        """Why it waits and what to do, in a few words."""
        if self.pageable:
            return "copies from pageable memory, where non_blocking has no effect: pin_memory() it beforehand"
        for pattern, cause, cure in _CURES:
            if re.search(pattern, self.text):
                return f"{cause}: {cure}"
        return "waits for the device: move it out of the step"

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line} `{self.text}` {self.reason}"


@contextmanager
def record_syncs(device: torch.device, *, copies: bool = False) -> Iterator[list[Sync]]:
    """The synchronising calls made inside, in order; the list fills as they happen.

    CUDA only (through `torch.cuda.set_sync_debug_mode("warn")`, which is process-wide while it lasts); elsewhere the
    list stays empty.

    Args:
        device: the one that is waited for.
        copies: see `Tensor.to`, `cuda` and `copy_` with `non_blocking=True` from pageable memory as well: they hold
            the host, and the debug mode does not see them.
    """
    found: list[Sync] = []
    if device.type != "cuda":
        yield found
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(), ExitStack() as stack:
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
        if copies:
            stack.enter_context(_watch_copies(found))
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)


@contextmanager
def _watch_copies(found: list[Sync]) -> Iterator[None]:
    """Note asynchronous copies to a CUDA device whose source is not pinned."""

    def watched(method: Callable[..., Any], to_self: bool) -> Callable[..., Any]:
        def call(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            result = method(self, *args, **kwargs)
            source, target = (args[0] if args else kwargs.get("src"), self) if to_self else (self, result)
            if (
                isinstance(source, torch.Tensor)
                and source.device.type == "cpu"
                and target.is_cuda
                and (kwargs.get("non_blocking") or any(value is True for value in args))
                and not source.is_pinned()
            ):
                found.append(_locate(sys._getframe(1), pageable=True))
            return result

        return call

    # set on Tensor, these hide the methods of its C base class; deleting them brings those back
    before = {name: vars(torch.Tensor).get(name) for name in ("to", "cuda", "copy_")}
    for name in before:
        setattr(torch.Tensor, name, watched(getattr(torch.Tensor, name), name == "copy_"))
    try:
        yield
    finally:
        for name, method in before.items():
            if method is None:
                delattr(torch.Tensor, name)
            else:
                setattr(torch.Tensor, name, method)


def _locate(frame: FrameType | None, *, pageable: bool = False) -> Sync:
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
    return Sync(frame.f_code.co_filename, frame.f_lineno, text, pageable)
