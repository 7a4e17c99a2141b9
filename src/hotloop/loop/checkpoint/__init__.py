"""Checkpoints on disk: saved atomically beside training, verified when loaded, never half there."""

from hotloop.loop.checkpoint.folder import list_checkpoints, newest
from hotloop.loop.checkpoint.snapshot import Snapshot
from hotloop.loop.checkpoint.store import Checkpoints

__all__ = ["Checkpoints", "Snapshot", "list_checkpoints", "newest"]
