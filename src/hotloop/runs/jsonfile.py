"""JSON files that are always whole: any Python value made plain, published in one rename."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import json
import math
import os
import re
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import torch

__all__ = ["looks_secret", "to_plain", "write_json"]

_DEEPEST = 20
_LONGEST_TEXT = 10_000
_MOST_ITEMS = 10_000
_MOST_ELEMENTS = 64
# Whole words at the end only: `num_key_value_heads` and `max_tokens` are no secrets.
_SECRET = re.compile(
    r"(^|[^a-z])(pass(word|wd)?|secret|credentials?|token|(api|access|private|secret|auth)[_-]?(key|token))$",
    re.IGNORECASE,
)
_WITHHELD = "<withheld>"


def write_json(path: Path, content: Any, *, sync: bool = True) -> None:
    """Replace `path` by `content` (plain values) in one step: a reader sees the old or the new file, whole.

    `sync` waits until it is on the disk.

    Raises:
        OSError: it cannot be written; `path` is what it was.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(part, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1, allow_nan=False, ensure_ascii=False)
            file.write("\n")
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def looks_secret(name: str) -> bool:
    """Whether an option or key of this name would hold a password or token.

    >>> [looks_secret(name) for name in ("hf_token", "--api-key", "max_tokens", "key_size")]
    [True, True, False, False]
    """
    return _SECRET.search(name) is not None


def to_plain(value: Any, _depth: int = 0) -> Any:
    """`value` as JSON can hold it: dicts with string keys, lists, strings, numbers, bools, None.

    Namespaces and dataclasses become dicts, paths and devices strings, small tensors lists with their
    dtype, large ones a summary, NaN and infinities the strings "NaN", "Infinity", "-Infinity", all else
    its `repr`. Texts under a key that names a secret are withheld. What is too deep or too long is cut,
    visibly.

    >>> to_plain(argparse.Namespace(lr=0.1, out=Path("runs"), api_key="abc"))
    {'lr': 0.1, 'out': 'runs', 'api_key': '<withheld>'}
    """
    if value is None or type(value) in (bool, int):
        return value
    if isinstance(value, str):
        text = str(value)
        # Lone surrogates (undecodable file names) have no UTF-8 form.
        text = text.encode("utf-8", "backslashreplace").decode()
        return text if len(text) <= _LONGEST_TEXT else text[:_LONGEST_TEXT] + f"… ({len(text)} characters)"
    if isinstance(value, enum.Enum):
        return to_plain(value.value, _depth + 1)
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if _depth >= _DEEPEST:
        return f"… (deeper than {_DEEPEST} levels)"
    if isinstance(value, torch.Tensor):
        return _describe_tensor(value)
    if isinstance(value, argparse.Namespace):
        return to_plain(vars(value), _depth)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
        return to_plain(fields, _depth)
    if isinstance(value, Mapping):
        return {str(to_plain(str(k))): _plain_under(str(k), v, _depth) for k, v in value.items()}
    if isinstance(value, list | tuple | Set):
        if len(value) > _MOST_ITEMS:
            return f"… ({type(value).__name__} of {len(value)} items)"
        return [to_plain(item, _depth + 1) for item in value]
    if isinstance(value, os.PathLike):
        return to_plain(os.fsdecode(value), _depth)
    if isinstance(value, torch.device | torch.dtype):
        return str(value)
    if hasattr(value, "item") and getattr(value, "size", None) == 1:  # numpy scalars
        return to_plain(value.item(), _depth + 1)
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{getattr(value, '__module__', '?')}.{value.__qualname__}"
    return to_plain(_repr(value), _depth)


def _plain_under(key: str, value: Any, depth: int) -> Any:
    """`value` under `key` of a dict."""
    return _WITHHELD if isinstance(value, str) and value and looks_secret(key) else to_plain(value, depth + 1)


def _describe_tensor(tensor: torch.Tensor) -> str:
    """Small tensors with their values, others by shape alone."""
    if tensor.numel() <= _MOST_ELEMENTS and not tensor.is_meta:
        return repr(tensor.detach())
    shape = "x".join(str(size) for size in tensor.shape)
    return f"tensor {shape} {tensor.dtype} on {tensor.device}"


def _repr(value: Any) -> str:
    """`repr`, also of objects whose repr fails."""
    try:
        return repr(value)[:1000]
    except Exception as error:
        return f"<{type(value).__qualname__}; its repr fails: {error}>"
