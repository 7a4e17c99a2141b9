"""Data parallelism beside the user's module: a DistributedDataParallel that holds it, not one that hides it."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import nn

from hotloop.hardware.processes import Processes
from hotloop.hardware.recording import recording_stream, run_on
from hotloop.parallel.plan import Plan

__all__ = ["make_replica"]


def make_replica(module: nn.Module, device: torch.device, processes: Processes, plan: Plan) -> Any:
    """A DistributedDataParallel over `module`, or None where there is nothing to exchange.

    Parameters and buffers of rank 0 are sent to all ranks. Calling the result runs `module` itself.
    """
    if processes.world == 1 or not any(p.requires_grad for p in module.parameters()):
        return None
    from torch.nn.parallel import DistributedDataParallel

    # torch 2.13 renamed the switch and warns of the old name
    known = inspect.signature(DistributedDataParallel).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    renamed: dict[str, Any] = {buffers: plan.broadcast_buffers}
    make = functools.partial(
        DistributedDataParallel,
        module,
        device_ids=[device.index] if device.type == "cuda" else None,
        find_unused_parameters=plan.find_unused_parameters,
        static_graph=plan.static_graph,
        bucket_cap_mb=plan.bucket_mb,
        gradient_as_bucket_view=True,
        **renamed,
    )
    return run_on(recording_stream(device), make) if plan.capture and device.type == "cuda" else make()
