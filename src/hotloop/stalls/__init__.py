"""Where and why the host waits for the device."""

from hotloop.stalls.syncs import Sync, record_syncs

__all__ = ["Sync", "record_syncs"]
