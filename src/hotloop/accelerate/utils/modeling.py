"""`accelerate.utils.modeling` by its own name."""

from hotloop.accelerate.weights import *  # noqa: F403
from hotloop.accelerate.weights import __all__ as __all__
