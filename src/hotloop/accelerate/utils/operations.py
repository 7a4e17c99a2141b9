"""`accelerate.utils.operations` by its own name."""

from hotloop.accelerate.operations import *  # noqa: F403
from hotloop.accelerate.operations import __all__ as __all__
