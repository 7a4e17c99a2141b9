"""Which device this process computes on."""

from __future__ import annotations

import torch

from hotloop.errors import SettingError

__all__ = ["find_device", "has_stream"]


def find_device(override: str | torch.device | None = None, *, local_rank: int = 0) -> torch.device:
    """The device for this process: CUDA or ROCm, else what `torch.accelerator` reports, else the CPU.

    Args:
        override: use this one ("cpu", "cuda", "cuda:1", …); a type without an index gets `local_rank`.
        local_rank: number of this process on its node; it takes the accelerator of that number.

    Intel (xpu) and Apple (mps) accelerators are found through torch.accelerator; hotloop is not tested on them.

    Raises:
        SettingError: the override is no device, or one that this computer does not have.
    """
    if override is not None:
        return _check(override, local_rank)
    if torch.cuda.is_available():
        return _numbered("cuda", local_rank)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        return _numbered(accelerator.type, local_rank)
    return torch.device("cpu")


def has_stream(device: torch.device) -> bool:
    """True if work on `device` runs behind the host on a stream, so that reading a value makes the host wait."""
    return device.type != "cpu"


def _check(override: str | torch.device, local_rank: int) -> torch.device:
    try:
        device = torch.device(override)
    except RuntimeError:
        raise SettingError(f"device={override!r} is not a device; this computer has: {_present()}") from None
    if device.type == "cpu":
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != device.type:
        raise SettingError(f"device={str(override)!r} is not there; this computer has: {_present()}")
    return _numbered(device.type, local_rank if device.index is None else device.index)


def _numbered(kind: str, index: int) -> torch.device:
    count = torch.accelerator.device_count()
    if index >= count:
        raise SettingError(
            f"process {index} of this node has no {kind} device of its own: there are {count}; start at most "
            f"{count} processes per node, or choose device='cpu'"
        )
    device = torch.device(kind, index)
    if kind == "cuda":
        torch.cuda.set_device(device)
    return device


def _present() -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    names = ["cpu"]
    if accelerator is not None:
        names += [f"{accelerator.type}:{i}" for i in range(torch.accelerator.device_count())]
    return ", ".join(names)
