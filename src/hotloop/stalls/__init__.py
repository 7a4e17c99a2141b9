"""Where and why the host waits for the device, and where its steps end."""

from hotloop.stalls.marks import LISTENERS, mark_step
from hotloop.stalls.syncs import Sync, record_syncs

__all__ = ["LISTENERS", "Sync", "mark_step", "record_syncs"]
