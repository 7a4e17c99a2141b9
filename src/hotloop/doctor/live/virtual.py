"""Without a GPU: which lines of a script would make one wait, found by following what comes from the parameters.

A tensor counts as living on the device if it is a parameter, or was computed from one. Where Python asks such a tensor
for its values, or for a result whose size depends on them, a GPU would have to be waited for. Data that meets no
parameter stays on the host, so that reading a batch's labels is no alarm.
"""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["Stall", "VirtualDevice"]

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
_WHY = {
    "item": "a value is read", "tolist": "values are read", "numpy": "values are read", "cpu": "a copy to the host",
    "to": "a copy to the host", "__bool__": "a branch on a tensor's value", "__format__": "a tensor is printed",
    "__repr__": "a tensor is printed", "__getitem__": "indexing with a boolean mask",
    "where": "where with one argument",
}  # fmt: skip
_SKIPPED = tuple(
    str(Path(folder).resolve()) + os.sep
    for folder in (Path(torch.__file__).parent, Path(__file__).parents[2], sysconfig.get_paths()["stdlib"])
)


@dataclass(frozen=True)
class Stall:
    """A line that would make a GPU wait.

    Attributes:
        file, line, text: where. op: what was called on the tensor. count: how often. steps: optimizer steps meanwhile.
    """

    file: str
    line: int
    text: str
    op: str
    count: int
    steps: int

    @property
    def why(self) -> str:
        """In words."""
        return _WHY.get(self.op, "a result of unknown size" if self.op in _SIZES else "a value is read")

    def __str__(self) -> str:
        often = f"{self.count / self.steps:.3g} a step" if self.steps else f"{self.count} times"
        return f"{self.file}:{self.line}  {self.op}, {often}: {self.why}\n    {self.text}"


class VirtualDevice(TorchFunctionMode):
    """While it is entered, notes each line of this thread that would wait for a device which holds the parameters.

    Attributes:
        steps: steps of the first optimizer used inside.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self._on_device = WeakIdKeyDictionary()
        self._seen: Counter[tuple[str, int, str]] = Counter()
        self._optimizer: int | None = None
        self._hook: Any = None

    def __enter__(self) -> VirtualDevice:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._hook = register_optimizer_step_post_hook(self._after_step)
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._hook.remove()
        super().__exit__(*exception)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._optimizer is None:
            self._optimizer = id(optimizer)
        self.steps += id(optimizer) == self._optimizer

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
            where = _users_frame(sys._getframe(1))
            if where is not None:
                self._seen[(where.f_code.co_filename, where.f_lineno, name)] += 1
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
        return [
            Stall(file, line, linecache.getline(file, line).strip(), op, count, self.steps)
            for (file, line, op), count in self._seen.most_common()
        ]


def _users_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame outside torch, hotloop and the standard library."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith("<") and not str(Path(file).resolve()).startswith(_SKIPPED):
            return frame
        frame = frame.f_back
    return None
