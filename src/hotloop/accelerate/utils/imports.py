"""`accelerate.utils.imports` by its own name."""

from hotloop.accelerate.installed import *  # noqa: F403
from hotloop.accelerate.installed import __all__ as __all__
