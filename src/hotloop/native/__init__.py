"""From a trained model to microseconds: exported graph, C source and header, shared library, Python callable."""

from hotloop.native.build import build
from hotloop.native.estimate import Estimate, estimate
from hotloop.native.faults import (
    BuildError,
    InputError,
    LibraryError,
    NativeError,
    PrecisionLossError,
    StatefulError,
    StreamingError,
    UnsupportedOpError,
    VerificationError,
)
from hotloop.native.handle import CompiledModel, load
from hotloop.native.lowering import list_operations
from hotloop.native.verify import Check, verify

__all__ = [
    "BuildError",
    "Check",
    "CompiledModel",
    "Estimate",
    "InputError",
    "LibraryError",
    "NativeError",
    "PrecisionLossError",
    "StatefulError",
    "StreamingError",
    "UnsupportedOpError",
    "VerificationError",
    "build",
    "estimate",
    "list_operations",
    "load",
    "verify",
]
