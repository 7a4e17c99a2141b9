"""Which number formats a device computes in."""

from __future__ import annotations

import functools

import torch

__all__ = ["supported_precisions"]


def supported_precisions(device: torch.device) -> dict[str, str]:
    """Precisions that `device` can train in, each with how it does so.

    >>> supported_precisions(torch.device("cpu"))["fp32"]
    'in silicon'
    """
    if device.type == "cpu":
        return dict(_cpu_precisions())
    if device.type == "cuda":
        return dict(_cuda_precisions(device.index or 0))
    # xpu and mps: what torch's autocast accepts there; not tested by hotloop
    return {"fp32": "in silicon", "bf16": "untested on this device", "fp16": "untested on this device"}


@functools.cache
def _cpu_precisions() -> tuple[tuple[str, str], ...]:
    flags = _cpu_flags()
    fast = "in silicon" if {"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16"} & flags else "emulated, slow"
    found = [("fp32", "in silicon"), ("bf16", fast)]
    if {"avx512_fp16", "amx_fp16"} & flags:
        found.append(("fp16", "in silicon"))
    return tuple(found)


@functools.cache
def _cuda_precisions(index: int) -> tuple[tuple[str, str], ...]:
    found = [("fp32", "in silicon"), ("fp16", "in silicon")]
    if torch.version.hip is not None:
        return (*found, ("bf16", "in silicon"))
    capability = torch.cuda.get_device_capability(index)
    if capability >= (8, 0):
        found += [("tf32", "in silicon"), ("bf16", "in silicon")]
    if capability >= (8, 9):
        found.append(("fp8", "in silicon"))
    return tuple(found)


@functools.cache
def _cpu_flags() -> frozenset[str]:
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith(("flags", "Features")):
                    return frozenset(line.split(":", 1)[1].split())
    except OSError:
        pass
    return frozenset()
