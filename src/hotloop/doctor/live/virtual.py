"""Without a GPU: which lines of a script would make one wait, found by following what comes from the parameters.

A tensor counts as living on the device if it is a parameter, or was computed from one. Where Python asks such a tensor
for its values, or for a result whose size depends on them, a GPU would have to be waited for. Data that meets no
parameter stays on the host, so that reading a batch's labels is no alarm.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from hotloop.doctor.live.stall_log import Stall, StallLog
from hotloop.doctor.live.steps import StepMarks

__all__ = ["VirtualDevice"]

_TORCH = str(Path(torch.__file__).parent) + os.sep
_PROJECT = str(Path(__file__).parents[2]) + os.sep

# what asks for values; what has a result of unknown size
_READS = frozenset(
    [
        "item",
        "tolist",
        "cpu",
        "numpy",
        "__bool__",
        "__float__",
        "__int__",
        "__index__",
        "__complex__",
        "__format__",
        "__repr__",
        "__array__",
        "__contains__",
        "equal",
        "allclose",
        "is_nonzero",
    ]
)
_SIZES = frozenset(
    ["nonzero", "argwhere", "unique", "unique_consecutive", "masked_select", "bincount", "_unique2"]
)


class VirtualDevice(TorchFunctionMode):
    """While it is entered, notes each line of this thread that would wait for a device which holds the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.log = StallLog()
        self._on_device = WeakIdKeyDictionary()
        self._marks = StepMarks(self._after_step)

    def __enter__(self) -> VirtualDevice:
        self._marks.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._marks.close()
        super().__exit__(*exception)

    def _after_step(self) -> None:
        self.log.steps += 1

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run `func`; note it if it would wait, and follow its results."""
        kwargs = kwargs or {}
        if not any(self._is_there(value) for value in (*args, *kwargs.values())):
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if self._waits(name, args, kwargs):
            if not _inside_loop(sys._getframe(1)):
                self.log.note(name)
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        self._follow(result)
        return result

    def _is_there(self, value: Any) -> bool:
        if isinstance(value, torch.Tensor):
            return isinstance(value, torch.nn.Parameter) or value in self._on_device
        return isinstance(value, (list, tuple)) and any(self._is_there(item) for item in value)

    def _follow(self, result: Any) -> None:
        if isinstance(result, torch.Tensor):
            # a parameter needs no mark, and one that is remembered weakly could not be moved in its place
            if not isinstance(result, torch.nn.Parameter) and not result.is_cuda:
                self._on_device[result] = True
        elif isinstance(result, (list, tuple)):
            for item in result:
                self._follow(item)

    def _waits(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if name in _READS or name in _SIZES:
            return True
        if name == "to":
            # a torch.device is mostly another tensor's: here that is the CPU, on a GPU it would be the GPU
            return any(
                value == "cpu" for value in (*args[1:], kwargs.get("device")) if isinstance(value, str)
            )
        if name == "where":
            return len(args) == 1
        if name == "__getitem__" and len(args) > 1:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            return any(isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in index)
        return False

    def stalls(self) -> list[Stall]:
        """What would wait, the most frequent first."""
        return self.log.stalls()


def _inside_loop(frame: FrameType | None) -> bool:
    """Whether it is a `Loop` that asks, which asks nothing of a GPU, but by `read`."""
    while frame is not None and (
        frame.f_code.co_filename.startswith(_TORCH) or frame.f_code.co_filename == __file__
    ):
        frame = frame.f_back
    mine = frame is not None and frame.f_code.co_filename.startswith(_PROJECT)
    return mine and frame is not None and frame.f_code.co_name != "read"
