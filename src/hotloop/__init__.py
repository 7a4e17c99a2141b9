"""hotloop: your own PyTorch loop, made as fast as the machine allows, and proven to be still the same loop."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hotloop.errors import HotloopError, NonFiniteError
    from hotloop.loop import Every, Loop
    from hotloop.parallel.plan import Plan

__all__ = ["Every", "HotloopError", "Loop", "NonFiniteError", "Plan", "__version__"]

__version__ = "0.1.0"

# Where each name lives. Looked up on first use, so that `hotloop --help` need not wait for torch.
_HOMES = {
    "Every": "hotloop.loop",
    "HotloopError": "hotloop.errors",
    "Loop": "hotloop.loop",
    "NonFiniteError": "hotloop.errors",
    "Plan": "hotloop.parallel.plan",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hotloop' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
