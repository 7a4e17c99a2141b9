"""From nodes to C text."""

from hotloop.native.emit.source import Emitted, emit_library
from hotloop.native.emit.writer import Target

__all__ = ["Emitted", "Target", "emit_library"]
