"""How the work of one model is spread over processes."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Plan"]


@dataclass(frozen=True)
class Plan:
    """Data parallelism over all processes, on torch's DistributedDataParallel.

    Attributes:
        find_unused_parameters: parameters may go without a gradient in some steps; costs a walk over the graph.
        static_graph: the same parameters get gradients in every step.
        bucket_mb: gradients are exchanged in buckets of about so many MiB.
        broadcast_buffers: buffers are taken from rank 0 at each training forward.
        capture: captured steps record their collectives too (NCCL); every rank has to make the same steps. Without it,
            captured steps of several processes run eagerly.
    """

    find_unused_parameters: bool = False
    static_graph: bool = False
    bucket_mb: float = 25.0
    broadcast_buffers: bool = True
    capture: bool = False
