"""How the tensors of one part lie in their file: the safetensors format, with what it cannot say beside it.

A file is eight bytes (length of the header, little endian), a JSON header padded to a multiple of eight, and
the tensors' bytes without gaps. Any reader of safetensors can open it. Under `__metadata__` the header lists,
in the order given, each name with the name that its data is stored under, its torch dtype where the format
has no code for it (complex and rare floats are stored as real pairs or bytes), and its strides where they are
not row-major.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Place", "lay_out", "read_layout", "restore", "view_bytes"]

_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_COMPLEX_CODES = {torch.complex128: "F64", torch.complex64: "F32", torch.complex32: "F16"}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
_NOTES = "hotloop"


@dataclass(frozen=True)
class Place:
    """Where one stored tensor lies: bytes `start` to `stop` after the header, read as `dtype` and `shape`."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


def lay_out(tensors: Mapping[str, Tensor]) -> tuple[bytes, list[Tensor]]:
    """The header of a file that holds `tensors`, and the tensors in the order in which their bytes follow.

    Names that hold the same Python tensor are stored once.
    """
    stored: dict[int, tuple[str, Tensor]] = {}
    notes: list[list[Any]] = []
    for name, tensor in tensors.items():
        if id(tensor) not in stored:
            stored[id(tensor)] = (_storable(name, len(stored), tensors), tensor)
        dtype = None if tensor.dtype in _CODES else str(tensor.dtype).removeprefix("torch.")
        strides = None if tensor.is_contiguous() else list(tensor.stride())
        notes.append([name, stored[id(tensor)][0], dtype, strides])
    # Wide elements first: then every tensor starts at a multiple of its element's size, without padding.
    ordered = sorted(stored.values(), key=lambda pair: -pair[1].element_size())
    header: dict[str, Any] = {
        "__metadata__": {"format": "pt", _NOTES: json.dumps(notes, separators=(",", ":"))}
    }
    start = 0
    for name, tensor in ordered:
        stop = start + tensor.numel() * tensor.element_size()
        code, shape = _code_and_shape(tensor)
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, [tensor for _, tensor in ordered]


def read_layout(header: bytes) -> tuple[dict[str, Place], list[list[Any]]]:
    """Places by stored name, in the order of their bytes, and the notes that `restore` needs.

    Raises:
        ValueError, KeyError, TypeError: the bytes are no header that `lay_out` made.
    """
    entries = json.loads(header[8:])
    notes = json.loads(entries.pop("__metadata__")[_NOTES])
    real_dtypes = {stored: dtype for _, stored, dtype, _ in notes if dtype is not None}
    places = {}
    for stored, entry in entries.items():
        dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
        if stored in real_dtypes:
            dtype, shape = getattr(torch, real_dtypes[stored]), shape[:-1]
        start, stop = entry["data_offsets"]
        places[stored] = Place(dtype, shape, start, stop)
    return places, notes


def restore(stored: Mapping[str, Tensor], notes: list[list[Any]]) -> dict[str, Tensor]:
    """The tensors under the names, in the order and with the strides that they were given with."""
    made: dict[str, Tensor] = {}
    result = {}
    for name, stored_name, _, strides in notes:
        if stored_name not in made:
            tensor = stored[stored_name]
            if strides is not None:
                tensor = torch.empty_strided(tensor.size(), strides, dtype=tensor.dtype).copy_(tensor)
            made[stored_name] = tensor
        result[name] = made[stored_name]
    return result


def view_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor as bytes, without a copy."""
    if tensor.numel() == 0:
        return memoryview(b"")
    content: Any = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()
    return memoryview(content)


def _code_and_shape(tensor: Tensor) -> tuple[str, list[int]]:
    shape = list(tensor.size())
    if tensor.dtype in _CODES:
        return _CODES[tensor.dtype], shape
    if tensor.dtype in _COMPLEX_CODES:
        return _COMPLEX_CODES[tensor.dtype], [*shape, 2]
    return "U8", [*shape, tensor.element_size()]


def _storable(name: str, position: int, names: Mapping[str, Tensor]) -> str:
    """The format keeps one name for itself, and readers refuse text that is no valid Unicode."""
    if name != "__metadata__" and not any("\ud800" <= letter <= "\udfff" for letter in name):
        return name
    candidate = f"tensor-{position}"
    while candidate in names:
        candidate += "_"
    return candidate
