"""The stream that device work is recorded on, and what a recording that failed leaves behind in torch, put right."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

__all__ = ["mend_failed_recording", "own_casts", "recording_stream", "run_on"]


def recording_stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream of this process on which work of a CUDA `device` with exchanges between processes is recorded.

    Autograd runs the gradient accumulation of a parameter on the stream on which its node was made, and
    DistributedDataParallel makes and keeps those nodes when it is built: what is to be recorded has to be made here.
    """
    return _stream(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _stream(index: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(index)


def run_on(stream: torch.cuda.Stream, work: Callable[[], Any]) -> Any:
    """Do `work` on `stream`, in order with what the current stream did before and does after; gives its result."""
    outer = torch.cuda.current_stream(stream.device)
    stream.wait_stream(outer)
    with torch.cuda.stream(stream):
        result = work()
    outer.wait_stream(stream)
    return result


@contextmanager
def own_casts() -> Iterator[None]:
    """What is recorded while it is open casts weights itself, also inside an autocast that was entered before.

    Autocast keeps casts until it is left. A recording that reads one from before reads memory that is given back then,
    and the weights as they were; and one that is made in a recording is not there before that is launched.
    """
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


def mend_failed_recording(stream: torch.cuda.Stream) -> None:
    """After a CUDA graph's recording on `stream` that failed: the generators still think that they are being recorded.

    Torch puts them right at the end of a recording that succeeds, and only then.
    """
    with suppress(RuntimeError):
        torch.cuda.synchronize(stream.device)
    graph = torch.cuda.CUDAGraph()
    with suppress(RuntimeError), torch.cuda.stream(stream), warnings.catch_warnings():
        # it is empty, and torch says so
        warnings.simplefilter("ignore")
        graph.capture_begin(capture_error_mode="thread_local")
        graph.capture_end()
