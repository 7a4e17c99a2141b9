"""The Python callable of a compiled model: an extension type, compiled once for this Python and numpy."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.machinery
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import torch

from hotloop.native.compiler import compile_shared, find_target
from hotloop.native.faults import InputError
from hotloop.native.library import Library, Tensor, open_library
from hotloop.native.timing import cache_folder

__all__ = ["CompiledModel", "load", "make_handle"]

# DLPack's codes: signed integer, unsigned, float, bool.
_KINDS = {"i": 0, "u": 1, "f": 2, "b": 6}


class CompiledModel(Protocol):
    """What `load` and `build` return. Inputs are numpy arrays, CPU tensors or buffers of exactly the built dtype and
    shape (dimensions of size 1 may be left out), C-contiguous; they are read in place.

    Raises:
        InputError: an input or output has another shape, dtype or layout; the text names what was expected.
    """

    facts: Mapping[str, Any]

    def __call__(self, *inputs: Any) -> Any:
        """Compute into a float32 numpy array of the caller's, or a tuple of them.

        The memory of a small result serves a later call once nobody holds the array, a view or a tensor on it; to
        change its size in place numpy therefore wants `refcheck=False`.
        """

    def into(self, *arrays: Any) -> None:
        """Compute into arrays that are given after the inputs."""

    def scalar(self, *inputs: Any) -> float:
        """The only element of the only output."""

    def prep(self) -> None:
        """Of a state machine: compute what does not depend on the next event."""

    def reset(self) -> None:
        """Of a state machine: forget all events."""

    def warm(self, times: int = 100) -> None:
        """Touch all memory and run on zeros; the state stays as it is."""

    def instance(self) -> CompiledModel:
        """Another instance with memory and state of its own."""

    def state_save(self) -> bytes:
        """The state."""

    def state_load(self, state: bytes) -> None:
        """Go on from a saved state."""


@cache
def _extension() -> ModuleType:
    source = Path(__file__).parent / "handle.c"
    include = [Path(sysconfig.get_paths()["include"]), Path(np.get_include())]
    key = f"{sys.version}|{np.__version__}".encode() + source.read_bytes()
    suffix = sysconfig.get_config_var("EXT_SUFFIX") or ".so"
    library = cache_folder() / f"hotloop_handle_{hashlib.sha256(key).hexdigest()[:16]}{suffix}"
    if not library.exists():
        compile_shared(source, library, find_target("generic"), include=include)
    loader = importlib.machinery.ExtensionFileLoader("hotloop_handle", str(library))
    spec = importlib.util.spec_from_file_location("hotloop_handle", library, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    module.use_fault(InputError)
    if hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        module.use_tensors(torch.Tensor)
    return module


def _ports(tensors: list[Tensor]) -> tuple[tuple[Any, ...], ...]:
    found = []
    for item in tensors:
        dtype = np.dtype(item.dtype)
        found.append((item.name, item.shape, item.dtype, dtype.num, _KINDS[dtype.kind], dtype.itemsize * 8))
    return tuple(found)


def load(path: str | os.PathLike[str]) -> CompiledModel:
    """Load a library that hotloop.native built, with an instance of its own.

    Raises:
        LibraryError: the file is no such library.
    """
    library = open_library(path)
    return make_handle(library)


def make_handle(library: Library, *, use_own_instance: bool = False) -> CompiledModel:
    """A callable on a loaded library. `use_own_instance`: on the library's instance, not on one of its own."""
    facts = {"description": library.description, "report": library.report, "path": str(library.path)}
    model: CompiledModel = _extension().Handle(
        ctypes.addressof(library.table),
        library,
        _ports(library.inputs),
        _ports(library.outputs),
        facts,
        library.instance if use_own_instance else 0,
    )
    return model
