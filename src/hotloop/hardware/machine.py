"""This machine in one dictionary of plain values, for the record of a run and for `hotloop env`."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from hotloop.hardware.cores import (
    available_memory_bytes,
    cgroup_cores,
    cgroup_memory_bytes,
    physical_cores,
    usable_cores,
)
from hotloop.hardware.precisions import cuda_precisions, supported_precisions

__all__ = ["cpu_model", "describe_links", "describe_machine"]

T = TypeVar("T")

# Instruction sets that decide how fast a model trains on the CPU: x86 names, then ARM names.
_CPU_FLAGS = (
    "avx2",
    "fma",
    "avx_vnni",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_int8",
    "amx_bf16",
    "amx_fp16",
    "asimd",
    "sve",
    "bf16",
    "i8mm",
)
_OPTIONAL_PACKAGES = (
    "safetensors",
    "triton",
    "tensorboard",
    "accelerate",
    "lightning",
    "torchvision",
    "torchao",
    "scikit-learn",
    "ray",
    "rich",
    "nvidia-ml-py",
)
_VARIABLES = re.compile(
    r"(HOTLOOP|CUDA|HIP|ROCR|NVIDIA|NCCL|GLOO|OMP|MKL|KMP|GOMP|OPENBLAS|TORCH\w*|PYTORCH|TRITON|SLURM)_\w+"
    r"|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|PYTHONPATH|PYTHONHASHSEED|LD_PRELOAD"
)
_SECRETS = re.compile(r"TOKEN|KEY|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)
_TOOL_TIMEOUT_S = 15


def describe_machine() -> dict[str, Any]:
    """What this machine is and has, as plain values that fit JSON. Never raises: what cannot be read is None.

    Keys: versions (hotloop, torch, python, numpy, cuda, hip, driver, cudnn, nccl), system, hostname, cpu
    (model, architecture, physical_cores, logical_cores, usable_cores, affinity, cgroup_cores, flags), memory
    (total_bytes, available_bytes, cgroup_bytes), accelerators (a list: kind, index, name, memory_bytes,
    capability, precisions), cpu_precisions, processes, variables, packages.

    CUDA is asked through nvidia-smi unless this process uses it already, so that no context is made.
    """
    accelerators, driver = _read(_accelerators) or ([], None)
    return {
        "versions": {
            "hotloop": _read(lambda: sys.modules["hotloop"].__version__),
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            "numpy": _read(lambda: importlib.metadata.version("numpy")),
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
            "driver": driver,
            "cudnn": _read(_cudnn_version),
            "nccl": _read(_nccl_version),
        },
        "system": _read(platform.platform),
        "hostname": _read(socket.gethostname),
        "cpu": {
            "model": cpu_model(),
            "architecture": platform.machine(),
            "physical_cores": _read(physical_cores),
            "logical_cores": os.cpu_count(),
            "usable_cores": _read(usable_cores),
            "affinity": _read(lambda: len(os.sched_getaffinity(0))),
            "cgroup_cores": _read(cgroup_cores),
            "flags": _read(_cpu_flags),
        },
        "memory": {
            "total_bytes": _read(lambda: os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")),
            "available_bytes": _read(available_memory_bytes),
            "cgroup_bytes": _read(cgroup_memory_bytes),
        },
        "accelerators": accelerators,
        "cpu_precisions": _read(lambda: supported_precisions(torch.device("cpu"))),
        "processes": _read(_processes),
        "variables": _read(_variables),
        "packages": _read(_packages),
    }


def describe_links() -> dict[str, str] | None:
    """How the NVIDIA GPUs of this machine are joined, such as {"0-1": "NV18"}; None where it is not known.

    Asks `nvidia-smi topo -m`, which may take a second; the words are its own (NV18: 18 NVLink lanes; PIX,
    PXB, PHB, NODE, SYS: PCI Express, ever farther apart).
    """
    return _read(lambda: _parse_links(_ask("nvidia-smi", "topo", "-m")))


def _read(part: Callable[[], T]) -> T | None:
    """The value of `part`, or None if it cannot be read: a description must never stop a run."""
    try:
        return part()
    except Exception:
        return None


def _ask(*command: str) -> str:
    program = shutil.which(command[0])
    if program is None:
        raise FileNotFoundError(command[0])
    return subprocess.run(
        [program, *command[1:]],
        capture_output=True,
        text=True,
        check=True,
        timeout=_TOOL_TIMEOUT_S,
        stdin=subprocess.DEVNULL,
    ).stdout


def _accelerators() -> tuple[list[dict[str, Any]], str | None]:
    """Accelerators that this process can see, and the driver's version."""
    if torch.version.cuda is not None and not torch.cuda.is_initialized():
        # device_count asks NVML and makes no context
        if torch.cuda.device_count() == 0:
            return [], _read(_driver)
        found = _read(_ask_nvidia_smi)
        if found is not None and len(found[0]) == torch.cuda.device_count():
            return found
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return [], None
    return [_describe_device(accelerator.type, i) for i in range(torch.accelerator.device_count())], _read(
        _driver
    )


def _describe_device(kind: str, index: int) -> dict[str, Any]:
    module = getattr(torch, kind)
    properties = _read(lambda: module.get_device_properties(index))
    major, minor = getattr(properties, "major", None), getattr(properties, "minor", None)
    return {
        "kind": kind,
        "index": index,
        "name": getattr(properties, "name", None),
        "memory_bytes": getattr(properties, "total_memory", None),
        "capability": None if major is None else f"{major}.{minor}",
        "precisions": _read(lambda: supported_precisions(torch.device(kind, index))),
    }


def _ask_nvidia_smi() -> tuple[list[dict[str, Any]], str | None]:
    fields = "index,uuid,name,memory.total,compute_cap,driver_version"
    text = _ask("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits")
    return _parse_nvidia_smi(text, os.environ.get("CUDA_VISIBLE_DEVICES"))


def _parse_nvidia_smi(text: str, visible: str | None) -> tuple[list[dict[str, Any]], str | None]:
    """Devices in the order in which CUDA numbers them for this process, and the driver's version.

    Raises:
        KeyError: CUDA_VISIBLE_DEVICES names something else than whole GPUs by number or UUID.
    """
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]
    if visible is not None:
        by_name = {row[0]: row for row in rows} | {row[1]: row for row in rows}
        rows = [by_name[name.strip()] for name in visible.split(",") if name.strip()]
    devices = []
    for index, (_, _, name, memory_mib, capability, _) in enumerate(rows):
        major, minor = map(int, capability.split("."))
        devices.append(
            {
                "kind": "cuda",
                "index": index,
                "name": name,
                "memory_bytes": int(memory_mib) * 2**20,
                "capability": capability,
                "precisions": cuda_precisions((major, minor)),
            }
        )
    return devices, rows[0][5] if rows else None


def _parse_links(text: str) -> dict[str, str]:
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    rows = [line.split() for line in plain.splitlines() if re.match(r"GPU\d+\s", line)]
    return {f"{i}-{j}": rows[i][1 + j] for i in range(len(rows)) for j in range(i + 1, len(rows))}


def _driver() -> str | None:
    with open("/proc/driver/nvidia/version") as file:
        found = re.search(r"\s(\d+\.\d+(\.\d+)?)\s", file.readline())
    return found.group(1) if found else None


def _cudnn_version() -> int | None:
    return torch.backends.cudnn.version() if torch.version.cuda or torch.version.hip else None


def _nccl_version() -> str | None:
    if torch.version.cuda is None and torch.version.hip is None:
        return None
    return ".".join(str(part) for part in torch.cuda.nccl.version())


def cpu_model() -> str | None:
    """The processor's name; None where the system does not tell."""
    return _read(_cpu_model)


def _cpu_model() -> str | None:
    for line in _cpu_lines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model", "cpu model"):
            return value.strip()
    return platform.processor() or None


def _cpu_flags() -> list[str]:
    for line in _cpu_lines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            have = set(value.split())
            return [flag for flag in _CPU_FLAGS if flag in have]
    return []


def _cpu_lines() -> list[str]:
    """The first processor's lines of /proc/cpuinfo; the others repeat them."""
    with open("/proc/cpuinfo") as file:
        lines = []
        for line in file:
            if not line.strip():
                break
            lines.append(line)
    return lines


def _processes() -> dict[str, int] | None:
    """Rank and world as the environment gives them; starts nothing."""
    names = {
        "rank": "RANK",
        "world": "WORLD_SIZE",
        "local_rank": "LOCAL_RANK",
        "local_world": "LOCAL_WORLD_SIZE",
    }
    return {
        name: int(os.environ[variable]) for name, variable in names.items() if variable in os.environ
    } or None


def _variables() -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if _VARIABLES.fullmatch(name) and not _SECRETS.search(name)
    }


def _packages() -> dict[str, str | None]:
    def version(name: str) -> str | None:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None

    return {name: version(name) for name in _OPTIONAL_PACKAGES}
