"""What this computer is, and which process of how many this is."""

from hotloop.hardware.cores import usable_cores
from hotloop.hardware.machine import describe_links, describe_machine
from hotloop.hardware.processes import Processes, find_processes

__all__ = ["Processes", "describe_links", "describe_machine", "find_processes", "usable_cores"]
