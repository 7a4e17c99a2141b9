"""Batches and their order: samplers, fetching, prefetch to the device, resident data, resizing, position and resume."""

from typing import TYPE_CHECKING

from hotloop.data.loader import Loader
from hotloop.data.move import count_samples, move
from hotloop.deferred import deferred

if TYPE_CHECKING:
    from hotloop.data.images import ResidentImages, whitening_filters
    from hotloop.data.resident import ResidentArrays, ResidentLoader
    from hotloop.data.resizing import Resizing, Stage, refresh_norms, resize_images
    from hotloop.data.windows import ResidentWindows, window_starts
    from hotloop.kernels.augment import Augment

__all__ = [
    "Augment",
    "Loader",
    "ResidentArrays",
    "ResidentImages",
    "ResidentLoader",
    "ResidentWindows",
    "Resizing",
    "Stage",
    "count_samples",
    "move",
    "refresh_norms",
    "resize_images",
    "whitening_filters",
    "window_starts",
]

__getattr__ = deferred(
    __name__,
    {
        "Augment": "hotloop.kernels.augment",
        "ResidentArrays": "hotloop.data.resident",
        "ResidentImages": "hotloop.data.images",
        "ResidentLoader": "hotloop.data.resident",
        "ResidentWindows": "hotloop.data.windows",
        "Resizing": "hotloop.data.resizing",
        "Stage": "hotloop.data.resizing",
        "refresh_norms": "hotloop.data.resizing",
        "resize_images": "hotloop.data.resizing",
        "whitening_filters": "hotloop.data.images",
        "window_starts": "hotloop.data.windows",
    },
)
