"""What this computer is, and which process of how many this is."""

from typing import TYPE_CHECKING

from hotloop.deferred import deferred
from hotloop.hardware.processes import Processes, find_processes

if TYPE_CHECKING:
    from hotloop.hardware.cores import usable_cores
    from hotloop.hardware.kind import machine_kind
    from hotloop.hardware.machine import describe_links, describe_machine

__all__ = [
    "Processes",
    "describe_links",
    "describe_machine",
    "find_processes",
    "machine_kind",
    "usable_cores",
]

# only records and the command line describe the machine
__getattr__ = deferred(
    __name__,
    {
        "describe_links": "hotloop.hardware.machine",
        "describe_machine": "hotloop.hardware.machine",
        "machine_kind": "hotloop.hardware.kind",
        "usable_cores": "hotloop.hardware.cores",
    },
)
