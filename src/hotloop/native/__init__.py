"""From a trained model to microseconds: exported graph, C source and header, shared library, Python callable."""

from hotloop.native.build import build
from hotloop.native.faults import (
    BuildError,
    InputError,
    LibraryError,
    NativeError,
    PrecisionLossError,
    StreamingError,
    UnsupportedOpError,
    VerificationError,
)
from hotloop.native.handle import CompiledModel, load
from hotloop.native.lowering import list_operations

__all__ = [
    "BuildError",
    "CompiledModel",
    "InputError",
    "LibraryError",
    "NativeError",
    "PrecisionLossError",
    "StreamingError",
    "UnsupportedOpError",
    "VerificationError",
    "build",
    "list_operations",
    "load",
]
