"""Kernels where the stock ones lose: each with an eager twin that says what it computes, and a measured reason."""

from typing import TYPE_CHECKING

from hotloop.deferred import deferred

if TYPE_CHECKING:
    from hotloop.kernels.adamw import adamw_eager, adamw_runs_on, fused_adamw
    from hotloop.kernels.cross_entropy import cross_entropy_eager, linear_cross_entropy
    from hotloop.kernels.norms import clip_norm, clip_norm_eager, scale_all
    from hotloop.kernels.tables import Tables

__all__ = [
    "Tables",
    "adamw_eager",
    "adamw_runs_on",
    "clip_norm",
    "clip_norm_eager",
    "cross_entropy_eager",
    "fused_adamw",
    "linear_cross_entropy",
    "scale_all",
]

__getattr__ = deferred(
    __name__,
    {
        "Tables": "hotloop.kernels.tables",
        "adamw_eager": "hotloop.kernels.adamw",
        "adamw_runs_on": "hotloop.kernels.adamw",
        "clip_norm": "hotloop.kernels.norms",
        "clip_norm_eager": "hotloop.kernels.norms",
        "cross_entropy_eager": "hotloop.kernels.cross_entropy",
        "fused_adamw": "hotloop.kernels.adamw",
        "linear_cross_entropy": "hotloop.kernels.cross_entropy",
        "scale_all": "hotloop.kernels.norms",
    },
)
