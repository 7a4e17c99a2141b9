"""What can go wrong between a model and its C library: each error names what was seen, where, and what to do."""

from __future__ import annotations

from hotloop.errors import HotloopError

__all__ = [
    "BuildError",
    "InputError",
    "LibraryError",
    "NativeError",
    "NoForm",
    "PrecisionLossError",
    "StatefulError",
    "StreamingError",
    "UnsupportedOpError",
    "VerificationError",
]


class NativeError(HotloopError, RuntimeError):
    """Base of the errors of `hotloop.native`."""


class UnsupportedOpError(NativeError):
    """The model uses an operation that has no C form; names module path, source line, nearest supported form."""


class StreamingError(NativeError):
    """The model cannot be turned into a one-event state machine as asked; the text names the cause."""


class StatefulError(NativeError):
    """The model keeps something of one call for the next in a buffer of its own; names the buffer."""


class BuildError(NativeError):
    """The compiler is missing or refused the generated source; holds its first messages."""


class NoForm(Exception):  # noqa: N818  never seen by a user: it becomes an UnsupportedOpError with the place
    """Raised by a form of ours for arguments it does not cover; the text says what it would take."""


class VerificationError(NativeError):
    """The compiled library does not agree with float64 PyTorch within the stated bound."""


class PrecisionLossError(NativeError):
    """int8 differs from fp32 by more than the stated bound on the calibration data."""


class LibraryError(NativeError):
    """A shared library is not one that hotloop built, or its sidecar does not fit it."""


class InputError(NativeError, ValueError, TypeError):
    """An array or tensor given to a compiled model has another shape, type or layout than the model was built for."""
