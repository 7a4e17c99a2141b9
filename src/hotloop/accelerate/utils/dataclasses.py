"""`accelerate.utils.dataclasses` by its own name."""

from hotloop.accelerate.kinds import *  # noqa: F403
from hotloop.accelerate.kinds import __all__ as __all__
