"""hotloop: your own PyTorch loop, made as fast as the machine allows, and proven to be still the same loop."""

from typing import TYPE_CHECKING

from hotloop.deferred import deferred as _deferred

if TYPE_CHECKING:
    from hotloop.errors import HotloopError, NonFiniteError
    from hotloop.loop import Every, Loop
    from hotloop.parallel.plan import Plan
    from hotloop.precision.formats import Precision

__all__ = ["Every", "HotloopError", "Loop", "NonFiniteError", "Plan", "Precision", "__version__"]

__version__ = "0.1.0"

_PARTS = (
    "accelerate",
    "capture",
    "data",
    "doctor",
    "errors",
    "kernels",
    "metrics",
    "native",
    "optim",
    "precision",
    "runs",
    "tune",
)

# `hotloop --help` need not wait for torch
__getattr__ = _deferred(
    __name__,
    {
        "Every": "hotloop.loop",
        "HotloopError": "hotloop.errors",
        "Loop": "hotloop.loop",
        "NonFiniteError": "hotloop.errors",
        "Plan": "hotloop.parallel.plan",
        "Precision": "hotloop.precision.formats",
        # as with torch.optim, the package alone has to be imported
        **{name: f"hotloop.{name}" for name in _PARTS},
    },
)


def __dir__() -> list[str]:
    return sorted(__all__)
