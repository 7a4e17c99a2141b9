"""Forwards in 16 bits: autocast around a call, results back in float32."""

from __future__ import annotations

from typing import Any

import torch

from hotloop.nested import map_tensors

__all__ = ["autocast_context", "outputs_to_float32"]

_SIXTEEN_BIT = (torch.bfloat16, torch.float16)


def autocast_context(device: torch.device, dtype: torch.dtype | None) -> torch.autocast:
    """A `torch.autocast` for `device`; one that changes nothing if `dtype` is None."""
    if dtype is None:
        return torch.autocast(device.type, enabled=False)
    return torch.autocast(device.type, dtype)


def outputs_to_float32(outputs: Any) -> Any:
    """`outputs` with 16-bit floating tensors as float32, so that losses are summed in full precision."""
    if isinstance(outputs, torch.Tensor):
        return outputs.float() if outputs.dtype in _SIXTEEN_BIT else outputs
    return map_tensors(outputs, lambda t: t.float() if t.dtype in _SIXTEEN_BIT else t)
