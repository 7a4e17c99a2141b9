"""`accelerate.utils.constants` by its own name."""

from hotloop.accelerate.filenames import *  # noqa: F403
from hotloop.accelerate.filenames import __all__ as __all__
