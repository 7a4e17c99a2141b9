"""Pieces of device work that do not depend on each other, issued so that the device may do them at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

__all__ = ["run_beside"]

# Chains of small kernels leave most of a device idle; beyond a few at once nothing is won.
_MOST_STREAMS = 4
_streams: dict[torch.device, list[torch.cuda.Stream]] = {}


def run_beside(works: Sequence[Callable[[], None]], device: torch.device) -> None:
    """Call every one of `works`; on a CUDA device each on one of a few streams that part and join the current one.

    In a recording the parts become branches of the graph. What a work makes for itself is freed for its own stream;
    what it reads must outlive the call.
    """
    if device.type != "cuda" or len(works) < 2:
        for work in works:
            work()
        return
    current = torch.cuda.current_stream(device)
    streams = _streams.setdefault(device, [])
    while len(streams) < min(len(works), _MOST_STREAMS):
        streams.append(torch.cuda.Stream(device))
    used = streams[: len(works)]
    for stream in used:
        stream.wait_stream(current)
    for i, work in enumerate(works):
        with torch.cuda.stream(used[i % len(used)]):
            work()
    for stream in used:
        current.wait_stream(stream)
