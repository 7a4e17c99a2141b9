"""Whether hotloop's kernels take the place of stock ones: only in steps whose forwards are compiled.

Elsewhere a step's arithmetic stays torch's own, to the bit. A compiled forward rounds otherwise than an eager one
anyway; there the kernels cost no promise.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["chosen", "kernels_chosen", "kernels_wanted"]

_chosen = False


def kernels_wanted() -> bool:
    """Whether compiled steps are to use hotloop's kernels at all: unless `HOTLOOP_KERNELS` in the environment is 0."""
    return os.environ.get("HOTLOOP_KERNELS", "1") not in ("0", "off", "false", "no")


@contextmanager
def kernels_chosen(on: bool = True) -> Iterator[None]:
    """Steps issued while it is open use hotloop's kernels where they run."""
    global _chosen
    before, _chosen = _chosen, on
    try:
        yield
    finally:
        _chosen = before


def chosen() -> bool:
    """Whether kernels are chosen now."""
    return _chosen
