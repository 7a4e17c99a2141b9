"""`accelerate.utils.versions` by its own name."""

from hotloop.accelerate.versions import *  # noqa: F403
from hotloop.accelerate.versions import __all__ as __all__
