"""`accelerate.utils.environment` by its own name."""

from hotloop.accelerate.environment import *  # noqa: F403
from hotloop.accelerate.environment import __all__ as __all__
