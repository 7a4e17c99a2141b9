"""Names of a package that are looked up on first use, so that importing it loads only what is needed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["deferred"]


def deferred(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """A module-level `__getattr__` (PEP 562) for `package`: name -> the module that it lives in, or is."""

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(homes[name])
        own = homes[name] == f"{package}.{name}"
        # of a module whose name a function of it has, the function is meant; a package is meant itself
        value = (
            module
            if own and (hasattr(module, "__path__") or not hasattr(module, name))
            else getattr(module, name)
        )
        setattr(sys.modules[package], name, value)
        return value

    return find
