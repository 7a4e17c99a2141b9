"""Which format "auto" is: by what the device has in silicon."""

from __future__ import annotations

import torch

from hotloop.hardware.precisions import supported_precisions

__all__ = ["choose_precision"]


def choose_precision(device: torch.device) -> tuple[str, str]:
    """The format to train in on `device` unless something is known of the model, and why, in one line.

    bf16 where matrix units have it: the range of fp32, so no loss scale and no settings to find. fp16 where they have
    that alone. fp8 and 16-bit weights are never chosen: they change more than a rounding, so one asks by name.

    >>> choose_precision(torch.device("meta"))[0]
    'fp32'
    """
    found = supported_precisions(device)
    if device.type == "cuda":
        card = torch.cuda.get_device_name(device)
        if "bf16" in found:
            return "bf16", f"{card} multiplies bf16 in matrix units, which keep the range of fp32"
        if torch.cuda.get_device_capability(device) >= (7, 0):
            return "fp16", f"{card} has matrix units for fp16 but none for bf16; the loss is scaled"
        return "fp32", f"{card} has no matrix units"
    if device.type == "cpu":
        if found.get("bf16") == "in silicon":
            return "bf16", "this CPU multiplies bf16 in silicon (AMX or AVX512-BF16)"
        return "fp32", "this CPU has no units for bf16 (neither AMX nor AVX512-BF16)"
    return "fp32", f"hotloop is not tested in 16 bits on {device.type}"
