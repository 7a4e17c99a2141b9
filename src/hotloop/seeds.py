"""Random state: one seed for everything, streams derived from it, and states saved and put back."""

from __future__ import annotations

import hashlib
import random
import sys
from typing import Any

import numpy as np
import torch

__all__ = ["derive_seed", "rng_state", "seed_everything", "set_rng_state"]


def derive_seed(seed: int, *keys: object) -> int:
    """A 63-bit seed that depends on `seed` and on every key, the same on every machine and run.

    >>> derive_seed(0, "epoch", 1) == derive_seed(0, "epoch", 1)
    True
    >>> derive_seed(0, "epoch", 1) == derive_seed(0, "epoch", 2)
    False
    """
    digest = hashlib.blake2b(repr((seed, *keys)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_everything(seed: int) -> None:
    """Seed python's, numpy's and torch's generators, on the CPU and every accelerator, with `seed`.

    The same calls a careful script makes by hand: `random.seed`, `numpy.random.seed` (32 bits), and
    `torch.manual_seed`. Nothing else is switched: deterministic kernels are a choice of their own.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def rng_state(device: torch.device | None = None) -> dict[str, Any]:
    """State of python's, numpy's, torch's and (if given) an accelerator's generator.

    The result holds only tensors, numbers and strings, so that it loads with `weights_only=True`.
    """
    version, internal, gauss = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=False)
    state: dict[str, Any] = {
        "python": [version, list(internal), gauss],
        "numpy": [
            str(numpy_state["bit_generator"]),
            torch.from_numpy(np.asarray(numpy_state["state"]["key"], dtype=np.uint32).astype(np.int64)),
            int(numpy_state["state"]["pos"]),
            int(numpy_state["has_gauss"]),
            float(numpy_state["gauss"]),
        ],
        "torch": torch.get_rng_state(),
    }
    if device is not None and device.type != "cpu":
        state["device"] = _device_module(device).get_rng_state(device)
    return state


def set_rng_state(state: dict[str, Any], device: torch.device | None = None) -> None:
    """Put back what `rng_state` returned."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, key, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, key.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if device is not None and device.type != "cpu" and "device" in state:
        _device_module(device).set_rng_state(state["device"], device)


def _device_module(device: torch.device) -> Any:
    return getattr(torch, device.type, sys.modules.get(f"torch.{device.type}"))
