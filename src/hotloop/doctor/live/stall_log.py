"""Lines of a script at which a GPU would have to be waited for, as they are met."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

from hotloop.doctor.trace.places import silenced

__all__ = ["Stall", "StallLog", "users_frame"]

_SIZES = frozenset(
    [
        "nonzero",
        "argwhere",
        "unique",
        "unique_consecutive",
        "masked_select",
        "bincount",
        "_unique2",
        "unique_dim",
    ]
)
_WHY = {
    "item": "a value is read", "tolist": "values are read", "numpy": "values are read", "cpu": "a copy to the host",
    "to": "a copy to the host", "__bool__": "a branch on a tensor's value", "__format__": "a tensor is printed",
    "__repr__": "a tensor is printed", "__getitem__": "indexing with a boolean mask",
    "__setitem__": "an assignment through a boolean mask", "where": "where with one argument",
    "equal": "a comparison of whole tensors", "repeat_interleave": "a result of unknown size: pass output_size=",
    "linalg": "a check for errors: the functions with _ex have none",
    "ctc_loss": "lengths are read",
    "histc": "the range is read: pass min= and max=",
    "synchronize": "waiting for the device by name",
    "to the host": "a copy to the host",
    "to the device": "a copy from pageable memory: the host is held until it is done; pin it",
}  # fmt: skip
_SKIPPED = tuple(
    str(Path(folder).resolve()) + os.sep
    for folder in (Path(torch.__file__).parent, Path(__file__).parents[2], sysconfig.get_paths()["stdlib"])
)


@dataclass(frozen=True)
class Stall:
    """A line that would make a GPU wait.

    Attributes:
        file, line, text: where. op: what was called on the tensor. count: how often.
        steps: steps meanwhile. in_steps: steps in which it happened.
    """

    file: str
    line: int
    text: str
    op: str
    count: int
    steps: int
    in_steps: int = 0

    @property
    def recurs(self) -> bool:
        """Whether it belongs to the loop: it comes back in at least half of the steps, if there are several."""
        return self.steps < 2 or self.in_steps >= max(2, self.steps // 2)

    @property
    def why(self) -> str:
        """In words."""
        return _WHY.get(self.op, "a result of unknown size" if self.op in _SIZES else "a value is read")

    def __str__(self) -> str:
        once = "once" if self.count == 1 else f"{self.count} times"
        often = f"{self.count / self.steps:.3g} a step" if self.steps else once
        return f"{self.file}:{self.line}  {self.op}, {often}: {self.why}\n    {self.text}"


class StallLog:
    """Counts stalls by line and operation.

    Attributes:
        steps: steps of the program meanwhile; whoever counts them adds here.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._seen: Counter[tuple[str, int, str]] = Counter()
        self._last: dict[tuple[str, int, str], tuple[int, int]] = {}

    def place(self) -> tuple[str, int] | None:
        """File and line of the program's own that the caller works for."""
        frame = users_frame(sys._getframe(1))
        if frame is None and threading.current_thread() is not threading.main_thread():
            # a thread of autograd works for the line that the main thread stands in
            frame = users_frame(sys._current_frames().get(threading.main_thread().ident or 0))
        return None if frame is None else (frame.f_code.co_filename, frame.f_lineno)

    def note(self, op: str) -> None:
        """The caller stands where a GPU would have to be waited for."""
        place = self.place()
        if place is not None:
            key = (*place, op)
            self._seen[key] += 1
            step, steps = self._last.get(key, (-1, 0))
            self._last[key] = (self.steps, steps + (step != self.steps))

    def stalls(self) -> list[Stall]:
        """What would wait, the most frequent first; without the lines that say it is meant to."""
        found = [
            Stall(
                *key[:2], linecache.getline(*key[:2]).strip(), key[2], count, self.steps, self._last[key][1]
            )
            for key, count in self._seen.most_common()
        ]
        return [stall for stall in found if not silenced(stall.text) & {"host-sync", "blocking-copy"}]


def users_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame outside torch, hotloop and the standard library."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith("<") and not str(Path(file).resolve()).startswith(_SKIPPED):
            return frame
        frame = frame.f_back
    return None
