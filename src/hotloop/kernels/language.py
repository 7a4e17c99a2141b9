"""Triton, where there is one: the language that the programs are written in, and where they can run."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["jit", "runs_on", "tl", "triton"]

triton: Any
tl: Any
try:
    triton = importlib.import_module("triton")
    tl = importlib.import_module("triton.language")
except ImportError:  # builds of torch for CPUs come without it
    triton = tl = None


def jit(function: Callable[..., Any] | None = None, *, any_value: tuple[str, ...] = ()) -> Any:
    """`triton.jit`; without Triton the function stays as it is, never to be launched.

    Args:
        any_value: names of integer arguments (seeds, counts) whose value no compiled program may depend on; Triton
            compiles anew for others where they are 1 or a multiple of 16.
    """
    if function is None:
        return lambda given: jit(given, any_value=any_value)
    return function if triton is None else triton.jit(function, do_not_specialize=list(any_value) or None)


def runs_on(device: torch.device) -> bool:
    """Whether programs can be launched on `device`: CUDA of capability 8.0 or more, or the interpreter on a CPU.

    `TRITON_INTERPRET=1` in the environment makes Triton run programs in numpy: slow, for tests.
    """
    if triton is None:
        return False
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
