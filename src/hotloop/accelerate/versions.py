"""Comparing versions of installed packages."""

from __future__ import annotations

import importlib.metadata
import re
from functools import lru_cache
from typing import Any

from hotloop.accelerate.filenames import STR_OPERATION_TO_FUNC
from hotloop.errors import SettingError

__all__ = ["compare_versions", "is_torch_version"]


def compare_versions(library_or_version: Any, operation: str, requirement_version: str) -> bool:
    """Whether an installed library (by name) or a version stands in `operation` to `requirement_version`.

    Raises:
        SettingError: `operation` is not one of ==, !=, <, <=, >, >=.
    """
    if operation not in STR_OPERATION_TO_FUNC:
        raise SettingError(
            f"cannot compare versions by {operation!r}; use one of {list(STR_OPERATION_TO_FUNC)}"
        )
    if isinstance(library_or_version, str):
        version = importlib.metadata.version(library_or_version)
    else:
        version = str(library_or_version)
    return bool(STR_OPERATION_TO_FUNC[operation](_sort_key(version), _sort_key(requirement_version)))


def is_torch_version(operation: str, version: str) -> bool:
    """Whether the installed torch stands in `operation` to `version`."""
    return bool(STR_OPERATION_TO_FUNC[operation](_sort_key(_torch_version()), _sort_key(version)))


@lru_cache
def _torch_version() -> str:
    return importlib.metadata.version("torch")


def _sort_key(version: str) -> Any:
    try:
        from packaging.version import Version
    except ImportError:
        # without `packaging` only the release numbers count, padded so that 2.1 equals 2.1.0
        numbers = [int(part) for part in re.findall(r"\d+", version.split("+")[0])[:4]]
        return tuple(numbers + [0] * (4 - len(numbers)))
    return Version(version)
