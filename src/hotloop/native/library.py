"""A compiled model on disk: its description, its report, and its functions by address."""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hotloop.native.compiler import missing_instructions
from hotloop.native.faults import LibraryError

__all__ = ["Library", "Table", "Tensor", "open_library", "write_report"]

_MARK = b"HOTLOOP-REPORT "


@dataclass(frozen=True)
class Tensor:
    """Name, shape and dtype of an input or output."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class Table(ctypes.Structure):
    """`struct hotloop_table` of the generated source."""

    _fields_ = (
        ("version", ctypes.c_int32),
        ("inputs", ctypes.c_int32),
        ("outputs", ctypes.c_int32),
        ("streaming", ctypes.c_int32),
        ("size", ctypes.c_void_p),
        ("create", ctypes.c_void_p),
        ("call", ctypes.c_void_p),
        ("prep", ctypes.c_void_p),
        ("reset", ctypes.c_void_p),
        ("warm", ctypes.c_void_p),
        ("state_size", ctypes.c_void_p),
        ("state_save", ctypes.c_void_p),
        ("state_load", ctypes.c_void_p),
        ("describe", ctypes.c_void_p),
        ("report", ctypes.c_void_p),
    )


class Library:
    """A loaded library and one instance in memory of its own."""

    def __init__(self, path: Path, loaded: ctypes.CDLL) -> None:
        self.path = path
        self._loaded = loaded
        self.table = Table.in_dll(loaded, "hotloop_table")
        describe = ctypes.CFUNCTYPE(ctypes.c_char_p)(self.table.describe)
        self.description: dict[str, Any] = json.loads(describe())
        self.report: dict[str, Any] = json.loads(
            ctypes.string_at(self.table.report).removeprefix(_MARK).decode() or "{}"
        )
        self.inputs = [Tensor(i["name"], tuple(i["shape"]), i["dtype"]) for i in self.description["inputs"]]
        self.outputs = [Tensor(i["name"], tuple(i["shape"]), i["dtype"]) for i in self.description["outputs"]]
        self.size = int(ctypes.CFUNCTYPE(ctypes.c_size_t)(self.table.size)())
        self._memory: np.ndarray[Any, np.dtype[np.uint8]] | None = None
        self._address = 0

    @property
    def instance(self) -> int:
        """The address of the library's own instance, made when first asked for."""
        if self._memory is None:
            self._memory, self._address = self.make_instance()
        return self._address

    def make_instance(self) -> tuple[np.ndarray[Any, np.dtype[np.uint8]], int]:
        """Memory of a new instance (keep it) and its address."""
        memory = np.zeros(self.size + 64, np.uint8)
        address = (memory.ctypes.data + 63) // 64 * 64
        ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(self.table.create)(address)
        return memory, address


def open_library(path: str | os.PathLike[str]) -> Library:
    """Load a library that hotloop built.

    Raises:
        LibraryError: it is missing, no shared library, not one of hotloop's, of another version, or for instructions
            that this processor lacks.
    """
    file = Path(path).absolute()
    if not file.is_file():
        raise LibraryError(f"there is no file {file}")
    # under a name of its own: the loader would hand out what it once loaded from this path, though it was rebuilt
    alias = Path(tempfile.gettempdir()) / f"hotloop-{os.getpid()}-{secrets.token_hex(8)}.so"
    try:
        alias.symlink_to(file)
        loaded = ctypes.CDLL(str(alias), mode=os.RTLD_LOCAL | os.RTLD_NOW)
        version = Table.in_dll(loaded, "hotloop_table").version
    except (OSError, ValueError) as error:
        raise LibraryError(f"{file} is no library that hotloop.native built: {error}") from None
    finally:
        alias.unlink(missing_ok=True)
    if version != 1:
        raise LibraryError(
            f"{file} was built by another version of hotloop (table {version}, here 1); build it again"
        )
    library = Library(file, loaded)
    target = str(library.description["target"])
    missing = missing_instructions(target)
    if missing:
        raise LibraryError(
            f"{file} was built for target {target!r}; this processor lacks {', '.join(missing)}"
        )
    return library


def write_report(path: Path, report: dict[str, Any], room: int) -> None:
    """Store what the check found in the compiled library and keep it whole throughout."""
    data = bytearray(path.read_bytes())
    start = data.find(_MARK + b"{}")
    text = _MARK + json.dumps(report).encode()
    if start < 0 or len(text) >= room:
        raise LibraryError(f"{path} has no room for its report")
    data[start : start + len(text) + 1] = text + b"\0"
    temporary = path.with_name(f".{path.name}.report")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.chmod(0o755)
    os.replace(temporary, path)
