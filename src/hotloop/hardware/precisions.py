"""Which number formats a device computes in."""

from __future__ import annotations

import functools

import torch

__all__ = ["cuda_precisions", "supported_precisions"]


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
    if torch.version.hip is not None:
        return tuple((name, "in silicon") for name in ("fp32", "fp16", "bf16"))
    return tuple(cuda_precisions(torch.cuda.get_device_capability(index)).items())


def cuda_precisions(capability: tuple[int, int]) -> dict[str, str]:
    """The number formats of an NVIDIA GPU of this compute capability, (major, minor), and how it has them.

    >>> list(cuda_precisions((9, 0)))
    ['fp32', 'fp16', 'tf32', 'bf16', 'fp8']
    """
    found = ["fp32", "fp16"]
    if capability >= (8, 0):
        found += ["tf32", "bf16"]
    if capability >= (8, 9):
        found.append("fp8")
    return dict.fromkeys(found, "in silicon")


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
