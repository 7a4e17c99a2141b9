"""What this computer is, and which process of how many this is."""

from hotloop.hardware.processes import Processes, find_processes

__all__ = ["Processes", "find_processes"]
