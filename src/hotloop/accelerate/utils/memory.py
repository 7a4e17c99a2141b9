"""`accelerate.utils.memory` by its own name."""

from hotloop.accelerate.memory import *  # noqa: F403
from hotloop.accelerate.memory import __all__ as __all__
