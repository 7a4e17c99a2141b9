"""What objects are called in messages."""

from __future__ import annotations

from typing import Any

__all__ = ["get_pretty_name"]


def get_pretty_name(obj: Any) -> str:
    """The name of a class or function, or of an object's class."""
    named = obj if hasattr(obj, "__qualname__") or hasattr(obj, "__name__") else type(obj)
    return str(getattr(named, "__qualname__", None) or named.__name__)
