"""Seeds, and random states made equal on all ranks."""

from __future__ import annotations

from typing import Any

import torch

from hotloop.accelerate.kinds import RNGType
from hotloop.accelerate.state import AcceleratorState, PartialState
from hotloop.accelerate.unsupported import refuse
from hotloop.errors import SettingError
from hotloop.seeds import seed_everything

__all__ = ["set_seed", "synchronize_rng_state", "synchronize_rng_states"]


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed python, numpy and torch (every device).

    Args:
        seed: the seed.
        device_specific: add this process's rank, so that ranks draw different numbers.
        deterministic: also switch to deterministic algorithms.
    """
    if device_specific:
        seed += AcceleratorState().process_index
    seed_everything(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def synchronize_rng_state(rng_type: RNGType | None = None, generator: torch.Generator | None = None) -> None:
    """Give every rank the state that the generator has on rank 0.

    Raises:
        SettingError: "generator" without a generator.
        UnsupportedError: a kind of device that hotloop does not drive.
    """
    processes = PartialState().processes
    if rng_type == RNGType.TORCH:
        torch.set_rng_state(processes.broadcast_object(torch.get_rng_state()))
    elif rng_type == RNGType.GENERATOR:
        if generator is None:
            raise SettingError("rng type 'generator' needs the generator whose state is to be made equal")
        generator.set_state(processes.broadcast_object(generator.get_state()))
    elif rng_type in (RNGType.CUDA, RNGType.XPU):
        module: Any = torch.cuda if rng_type == RNGType.CUDA else torch.xpu
        module.set_rng_state(processes.broadcast_object(module.get_rng_state()))
    else:
        refuse(f"random state of {rng_type}", "use 'torch', 'cuda', 'xpu' or 'generator'")


def synchronize_rng_states(rng_types: list[Any], generator: torch.Generator | None = None) -> None:
    """`synchronize_rng_state` for each of the types, given as members of `RNGType` or their values."""
    for rng_type in rng_types:
        synchronize_rng_state(RNGType(rng_type), generator=generator)
