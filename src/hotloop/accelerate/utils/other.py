"""`accelerate.utils.other` by its own name: files, unwrapping, and small things."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

from hotloop.accelerate.environment import get_free_port
from hotloop.accelerate.files import clean_state_dict_for_safetensors, load, save
from hotloop.accelerate.models import (
    compile_regions,
    extract_model_from_parallel,
    get_module_children_bottom_up,
    has_compiled_regions,
    is_compiled_module,
    model_has_dtensor,
)
from hotloop.accelerate.names import get_pretty_name
from hotloop.accelerate.state import PartialState

__all__ = [
    "check_os_kernel",
    "clean_state_dict_for_safetensors",
    "compile_regions",
    "convert_bytes",
    "extract_model_from_parallel",
    "get_free_port",
    "get_module_children_bottom_up",
    "get_pretty_name",
    "has_compiled_regions",
    "is_compiled_module",
    "is_port_in_use",
    "load",
    "merge_dicts",
    "model_has_dtensor",
    "recursive_getattr",
    "save",
    "wait_for_everyone",
]


def wait_for_everyone() -> None:
    """Return once every process has arrived."""
    PartialState().wait_for_everyone()


def merge_dicts(source: Mapping[str, Any], destination: dict[str, Any]) -> dict[str, Any]:
    """`destination` with everything of `source` in it, dicts merged key by key."""
    for key, value in source.items():
        if isinstance(value, dict):
            merge_dicts(value, destination.setdefault(key, {}))
        else:
            destination[key] = value
    return destination


def recursive_getattr(obj: Any, attr: str) -> Any:
    """`getattr` along a dotted path."""
    for name in attr.split("."):
        obj = getattr(obj, name)
    return obj


def is_port_in_use(port: int | None = None) -> bool:
    """Whether something listens on `port` (29500) of this machine."""
    with socket.socket() as probe:
        return probe.connect_ex(("localhost", 29500 if port is None else port)) == 0


def convert_bytes(size: float) -> str:
    """`size` in bytes as text in the largest unit that keeps it above 1."""
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if size < 1024:
            return f"{round(size, 2)} {unit}"
        size /= 1024
    return f"{round(size, 2)} PB"


def check_os_kernel() -> None:
    """Nothing: no kernel that runs this Python is known to hang."""
