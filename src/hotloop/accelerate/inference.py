"""Pipelines for inference: named only."""

from __future__ import annotations

from hotloop.accelerate.unsupported import unsupported_function

__all__ = ["prepare_pippy"]

prepare_pippy = unsupported_function(
    "prepare_pippy", "pipelines are not part of the look-alike; use torch.distributed.pipelining itself"
)
