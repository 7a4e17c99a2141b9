"""What one checkpoint holds: the step, tensors by part, objects by name, and a few words about the run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hotloop.errors import CheckpointError

__all__ = ["Snapshot"]


@dataclass
class Snapshot:
    """The state of a run at one step, as given to `Checkpoints.save` and returned by `Checkpoints.load`.

    Attributes:
        step: how far the run is, at least 0; names the checkpoint's folder.
        tensors: part name -> tensor name -> dense tensor of any dtype, shape, stride and device. Each part is
            one `.safetensors` file. Names that were the same memory when saved are the same tensor when
            loaded. Loaded tensors are on the CPU, with the values' bits and the memory order that they had.
        objects: name -> nested plain containers of numbers, strings, tensors and arrays (see
            `hotloop.loop.checkpoint.plain`); each is one `.pt` file. Types come back as they were.
        meta: JSON values by string name. Versions of format, hotloop and torch and the time are added when
            saved.
    """

    step: int
    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Raise CheckpointError if the step, a name or the meta values cannot be written."""
        if isinstance(self.step, bool) or not isinstance(self.step, int) or self.step < 0:
            raise CheckpointError(f"Snapshot.step is {self.step!r}; it must be an int of at least 0")
        for part, tensors in self.tensors.items():
            _check_name(part, "Snapshot.tensors")
            for name in tensors:
                _check_name(name, f"Snapshot.tensors[{part!r}]")
        for name in self.objects:
            _check_name(name, "Snapshot.objects")
        _check_json(self.meta, "Snapshot.meta")


def _check_name(name: object, where: str) -> None:
    if not isinstance(name, str):
        raise CheckpointError(
            f"{where} has the key {name!r} of type {type(name).__name__}; names are strings"
        )


def _check_json(value: object, where: str) -> None:
    """JSON would turn int keys into strings without a word; here they are an error that says where."""
    if isinstance(value, dict):
        for key, item in value.items():
            _check_name(key, where)
            _check_json(item, f"{where}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for position, item in enumerate(value):
            _check_json(item, f"{where}[{position}]")
    elif not (value is None or isinstance(value, (bool, int, float, str))):
        raise CheckpointError(
            f"{where} is of type {type(value).__module__}.{type(value).__qualname__}, which JSON cannot "
            "hold; put it into Snapshot.objects or turn it into numbers and strings"
        )
