"""A stretch of code recorded and judged: `with doctor.window():` around some steps."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch

from hotloop.doctor.live.recorder import make_profiler
from hotloop.doctor.live.steps import StepMarks
from hotloop.doctor.recorded import Trace, read

__all__ = ["Window", "window"]


@dataclass
class Window:
    """What `window` yields; `trace` is there once the block has ended."""

    trace: Trace | None = None


@contextmanager
def window(*, stacks: bool = True, file: TextIO | None = None) -> Iterator[Window]:
    """Record the steps inside, and print what is slow in them when the block ends.

    Steps are marked by the first optimizer that is used, or by a `Loop`; warm the loop up before. Recording slows the
    host down, with `stacks` more than without.

    Args:
        stacks: record Python stacks, for source lines.
        file: where the page goes; default: stderr.
    """
    from hotloop.doctor.report import format_page, gather_facts

    found = Window()
    with tempfile.TemporaryDirectory(prefix="hotloop-doctor-") as folder:
        path = Path(folder) / "window.json"
        profiler = make_profiler(cuda=torch.cuda.is_available(), with_stack=stacks, record_shapes=True)

        with StepMarks(profiler.step), profiler:
            yield found
        profiler.export_chrome_trace(str(path))
        found.trace = read(path)
    print(format_page(gather_facts(found.trace)), file=sys.stderr if file is None else file)
