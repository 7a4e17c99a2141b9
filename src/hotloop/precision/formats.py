"""Number formats by name, and whether a device has them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hotloop.errors import PrecisionError
from hotloop.hardware.precisions import supported_precisions

__all__ = ["Precision", "find_precision"]


@dataclass(frozen=True)
class Precision:
    """How a model computes: `autocast` is the 16-bit dtype of its forwards, None to compute as stored.

    Attributes:
        name: fp32, tf32, bf16 or fp16.
        autocast: dtype for `torch.autocast`, or None.
        scaled: the loss is scaled up before the backward pass, since small fp16 gradients would vanish
            (Micikevicius et al., 2018, "Mixed Precision Training").
    """

    name: str
    autocast: torch.dtype | None = None
    scaled: bool = False


_FORMATS = {
    "fp32": Precision("fp32"),
    "tf32": Precision("tf32"),
    "bf16": Precision("bf16", torch.bfloat16),
    "fp16": Precision("fp16", torch.float16, scaled=True),
}


def find_precision(name: str, device: torch.device) -> Precision:
    """The format of that name, if `device` computes in it.

    "tf32" lets float32 matrix products round their inputs to 19 bits; it is a process-wide switch of torch.

    Raises:
        PrecisionError: the device cannot; names the formats that it can.
    """
    supported = supported_precisions(device)
    if name not in supported:
        raise PrecisionError(
            f"precision={name!r} is not available on {device}; available there: {', '.join(sorted(supported))}"
        )
    return _FORMATS[name]
