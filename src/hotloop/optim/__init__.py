"""Optimizers: gradients, clipping, refused updates, schedules run ahead."""

from hotloop.optim.gradients import as_real_dense, clip_coefficient, gradients_of, total_norm
from hotloop.optim.shadow import ShadowSchedule, is_metric_driven
from hotloop.optim.skipping import MaskedStep, choose_route, prefer_fused, takes_device_rate

__all__ = [
    "MaskedStep",
    "ShadowSchedule",
    "as_real_dense",
    "choose_route",
    "clip_coefficient",
    "gradients_of",
    "is_metric_driven",
    "prefer_fused",
    "takes_device_rate",
    "total_norm",
]
