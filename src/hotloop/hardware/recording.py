"""What a recording of device work that failed leaves behind in torch, put right."""

from __future__ import annotations

import warnings
from contextlib import suppress

import torch

__all__ = ["mend_failed_recording"]


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
