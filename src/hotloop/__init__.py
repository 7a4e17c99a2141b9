"""hotloop: your own PyTorch loop, made as fast as the machine allows, and proven to be still the same loop."""

__version__ = "0.1.0"

from hotloop.errors import HotloopError, NonFiniteError
from hotloop.loop import Every, Loop
from hotloop.parallel.plan import Plan

__all__ = ["Every", "HotloopError", "Loop", "NonFiniteError", "Plan", "__version__"]
