"""torch's profiler as the doctor uses it, and its notices kept off the program's stderr."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

__all__ = ["make_profiler", "without_notices"]


def make_profiler(*, cuda: bool, **options: Any) -> Any:
    """A `torch.profiler.profile` of the CPU, and with `cuda` of the device; `options` are its own."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    # newer versions warn on stderr, which is the program's, unless events are kept
    if "acc_events" in inspect.signature(profile).parameters:
        options.setdefault("acc_events", True)
    return profile(activities=activities, **options)


@contextlib.contextmanager
def without_notices() -> Iterator[None]:
    """Keep off the program's stderr what the profiler's C++ writes there when it starts and stops."""
    try:
        sys.stderr.flush()
        kept = os.dup(2)
    except (OSError, ValueError, AttributeError):
        # there is no stderr to keep clean
        yield
        return
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            for line in file.read().splitlines(keepends=True):
                if not line.startswith(b"USDT:"):
                    os.write(2, line)
