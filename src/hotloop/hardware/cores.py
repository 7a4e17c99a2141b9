"""How many cores and how much memory this process may use: machine, affinity and control group."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["available_memory_bytes", "cgroup_cores", "cgroup_memory_bytes", "physical_cores", "usable_cores"]

_CGROUPS = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Whole logical cores that this process can keep busy: the least of affinity and cgroup quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup_cores()
    return max(1, cores if quota is None else min(cores, int(quota)))


def physical_cores() -> int | None:
    """Cores of the machine without counting hyperthreads; None where the system does not tell."""
    siblings = set()
    for file in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/topology/thread_siblings_list"):
        siblings.add(file.read_text().strip())
    return len(siblings) or None


def cgroup_cores() -> float | None:
    """Processor time that the control group allows, in cores; None if it sets no limit."""
    limits = []
    for folder in _cgroup_folders("cpu"):
        quota, period = None, None
        if (text := _read(folder / "cpu.max")) is not None:
            quota, period = text.split()[:2]
        elif (text := _read(folder / "cpu.cfs_quota_us")) is not None:
            quota, period = text, _read(folder / "cpu.cfs_period_us")
        if quota and period and quota not in ("max", "-1"):
            limits.append(int(quota) / int(period))
    return min(limits, default=None)


def cgroup_memory_bytes() -> int | None:
    """Memory that the control group allows, in bytes; None if it sets no limit."""
    limits = []
    for folder in _cgroup_folders("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = _read(folder / name)
            if text and text != "max" and int(text) < 2**60:  # version 1 says "no limit" by a huge number
                limits.append(int(text))
    return min(limits, default=None)


def available_memory_bytes() -> int | None:
    """Memory of the machine that can be had without swapping, in bytes (Linux's MemAvailable)."""
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _cgroup_folders(controller: str) -> Iterator[Path]:
    """Folders of this process's control group and of those around it; each may set a limit."""
    text = _read(Path("/proc/self/cgroup")) or ""
    for line in text.splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            root = _CGROUPS
        elif controller in controllers.split(","):
            root = _CGROUPS / controller
        else:
            continue
        inside = root / path.lstrip("/")
        while inside != root:
            yield inside
            inside = inside.parent
        yield root


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
