"""Every error that hotloop raises by itself: each says what was seen, where, and what to do."""

from __future__ import annotations

__all__ = [
    "CaptureError",
    "CheckpointError",
    "DataError",
    "HotloopError",
    "KernelError",
    "LaunchError",
    "NonFiniteError",
    "OptimizerError",
    "PrecisionError",
    "PrepareError",
    "ProcessError",
    "SettingError",
]


class HotloopError(Exception):
    """Base of all errors raised by hotloop."""


class SettingError(HotloopError, ValueError):
    """A setting has a name or a value that hotloop does not know; the text lists the valid ones."""


class PrecisionError(HotloopError, ValueError):
    """The device cannot compute in the wanted number format; the text names those that it can."""


class PrepareError(HotloopError, TypeError):
    """An object given to `Loop.prepare` cannot be prepared, or was not prepared where it had to be."""


class OptimizerError(HotloopError, TypeError):
    """An optimizer cannot do what a setting asks of it, such as skipping an update on the device."""


class DataError(HotloopError, RuntimeError):
    """A loader cannot deliver: ranks disagree, a rank never had a batch, or a position does not fit."""


class CheckpointError(HotloopError, RuntimeError):
    """A checkpoint is missing, incomplete, altered or foreign; the text names the file and the fault."""


class ProcessError(HotloopError, RuntimeError):
    """The processes of a run do not fit together: rank, world size, group or backend."""


class LaunchError(HotloopError, RuntimeError):
    """A launch was asked for that cannot be carried out, or one of its processes failed."""


class CaptureError(HotloopError, RuntimeError):
    """A step cannot be captured as asked; the text names the source line, the cause and the cure."""


class KernelError(HotloopError, ValueError):
    """A kernel was given what it does not take, or does not compute what its twin does; the text says where."""


class NonFiniteError(HotloopError, ArithmeticError):
    """A loss or gradient was not finite and `nonfinite="stop"` was in force.

    Attributes:
        step: the update (counted from 0) in which it was first seen.
        indices: dataset indices of the batches of that update on this rank, or None if unknown.
    """

    def __init__(self, message: str, *, step: int = -1, indices: list[object] | None = None) -> None:
        super().__init__(message)
        self.step = step
        self.indices = indices
