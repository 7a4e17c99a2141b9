"""`accelerate.utils.random` by its own name."""

from hotloop.accelerate.seeding import *  # noqa: F403
from hotloop.accelerate.seeding import __all__ as __all__
