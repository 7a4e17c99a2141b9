"""What kind of machine this is, as far as the fastest settings depend on it."""

from __future__ import annotations

import platform

import torch

from hotloop.hardware.cores import usable_cores
from hotloop.hardware.devices import find_device
from hotloop.hardware.processes import find_local_rank

__all__ = ["machine_kind"]


def machine_kind(device: str | None = None) -> dict[str, str | int]:
    """The accelerator's type and name, or the processor's model and the number of usable cores.

    Settings found on one kind of machine hold on others of the same kind.

    Args:
        device: as for `Loop`; None takes what is there.
    """
    found = find_device(device, local_rank=find_local_rank())
    if found.type == "cpu":
        return {"device": "cpu", "name": _cpu_name(), "cores": usable_cores()}
    module = getattr(torch, found.type)
    if hasattr(module, "get_device_properties"):
        return {"device": found.type, "name": str(module.get_device_properties(found).name)}
    return {"device": found.type, "name": platform.machine()}


def _cpu_name() -> str:
    from hotloop.hardware.machine import cpu_model

    return cpu_model() or platform.machine()
