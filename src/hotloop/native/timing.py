"""Measuring a compiled model from C: pinned, warmed, every call noted; and what this core can do at most."""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hotloop.native.compiler import compile_shared, find_target
from hotloop.native.library import Library

__all__ = ["Core", "Samples", "cache_folder", "measure_calls", "measure_core", "pinned", "tick_rate"]


def cache_folder() -> Path:
    """Where compiled helpers are kept: $XDG_CACHE_HOME/hotloop or ~/.cache/hotloop."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(base) / "hotloop" / "native"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@cache
def _driver() -> ctypes.CDLL:
    source = Path(__file__).parent / "driver.c"
    target = find_target()
    key = hashlib.sha256(source.read_bytes() + target.name.encode()).hexdigest()[:16]
    library = cache_folder() / f"driver-{key}.so"
    if not library.exists():
        compile_shared(source, library, target)
    loaded = ctypes.CDLL(str(library))
    for name in ("tick_rate", "read_rate", "multiply_rate"):
        getattr(loaded, name).restype = ctypes.c_double
    loaded.empty_call.restype = ctypes.c_void_p
    return loaded


@cache
def tick_rate() -> float:
    """Ticks a second of the time-stamp counter."""
    return float(_driver().tick_rate(50))


@contextmanager
def pinned(core: int | None = None) -> Iterator[int]:
    """Keep this thread on one core (default: the last one it may use), with real-time priority where allowed."""
    before = os.sched_getaffinity(0)
    chosen = max(before) if core is None else core
    os.sched_setaffinity(0, {chosen})
    policy = None
    try:
        policy = os.sched_getscheduler(0), os.sched_getparam(0)
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except OSError:
        policy = None
    try:
        yield chosen
    finally:
        if policy is not None:
            os.sched_setscheduler(0, *policy)
        os.sched_setaffinity(0, before)


@dataclass(frozen=True)
class Samples:
    """Nanoseconds of each call, by blocks; the timer's own cost is inside (`timer_ns`)."""

    blocks: list[npt.NDArray[np.float64]]
    timer_ns: float

    def percentile(self, q: float, *, quietest: bool = True) -> float:
        """A percentile of the block with the lowest median, or of all calls."""
        if quietest:
            best = min(self.blocks, key=lambda block: float(np.median(block)))
            return float(np.percentile(best, q))
        return float(np.percentile(np.concatenate(self.blocks), q))

    def highest(self) -> float:
        """The slowest call of all."""
        return float(max(block.max() for block in self.blocks))


def _run(
    library: Library, call: int, *, prep: bool, spoil: int, junk_bytes: int, count: int
) -> npt.NDArray[np.float64]:
    driver = _driver()
    rows = 16
    rng = np.random.default_rng(0)
    arrays = []
    for index, item in enumerate(library.inputs):
        shape = (rows if index == 0 else 1, *item.shape)
        data = rng.standard_normal(shape) if item.dtype.startswith("float") else rng.integers(0, 2, shape)
        arrays.append(np.ascontiguousarray(data, np.dtype(item.dtype)))
    outs = [np.zeros(item.shape, np.float32) for item in library.outputs]
    pointers = (ctypes.c_void_p * len(arrays))(*(a.ctypes.data for a in arrays))
    targets = (ctypes.c_void_p * len(outs))(*(o.ctypes.data for o in outs))
    ticks = np.zeros(count, np.uint32)
    junk = np.zeros(junk_bytes if spoil == 1 else 64, np.uint8)
    driver.measure(
        ctypes.c_void_p(call),
        ctypes.c_void_p(library.table.prep if prep else None),
        ctypes.c_void_p(library.instance),
        pointers,
        targets,
        ctypes.c_int(len(arrays)),
        ctypes.c_long(rows),
        ctypes.c_long(arrays[0].nbytes // rows),
        ctypes.c_int(spoil),
        ctypes.c_void_p(junk.ctypes.data),
        ctypes.c_long(junk_bytes),
        ctypes.c_long(count),
        ctypes.c_void_p(ticks.ctypes.data),
    )
    return ticks.astype(np.float64) * (1e9 / tick_rate())


def measure_calls(
    library: Library,
    *,
    calls: int = 20_000,
    blocks: int = 10,
    prep: bool = False,
    cold: bool = False,
    idle_us: float = 0.0,
    asleep_us: float = 0.0,
    core: int | None = None,
) -> Samples:
    """Time `blocks` blocks of `calls` calls. `prep`: of a state machine only the commit. `cold`: every cache is
    filled with other data before each call. `idle_us`: before each call the core waits, awake. `asleep_us`: the
    thread sleeps before each call, as one does that waits for the system to wake it (less than a second)."""
    spoil = 1 if cold else 2 if idle_us else 3 if asleep_us else 0
    junk = 64 << 20 if cold else int(asleep_us * 1e3) if asleep_us else int(idle_us * 1e-6 * tick_rate())
    driver = _driver()
    with pinned(core):
        call = int(library.table.call)
        _run(library, call, prep=prep, spoil=0, junk_bytes=0, count=max(2000, calls // 10))
        empty = int(driver.empty_call())
        timer = min(
            float(np.median(_run(library, empty, prep=False, spoil=0, junk_bytes=0, count=2000)))
            for _ in range(3)
        )
        found = [
            _run(library, call, prep=prep, spoil=spoil, junk_bytes=junk, count=calls) for _ in range(blocks)
        ]
    return Samples(found, timer)


@dataclass(frozen=True)
class Core:
    """What one core does at most: bytes a second by cache level, multiply-adds a second, cache sizes in bytes."""

    l1_rate: float
    l2_rate: float
    l3_rate: float
    multiply_rate: float
    l1_bytes: int
    l2_bytes: int


def _cache_bytes(index: int, fallback: int) -> int:
    try:
        text = Path(f"/sys/devices/system/cpu/cpu0/cache/index{index}/size").read_text().strip()
        return int(text[:-1]) * {"K": 1 << 10, "M": 1 << 20}[text[-1]]
    except (OSError, ValueError, KeyError):
        return fallback


@cache
def measure_core() -> Core:
    """Measure this core, about a fifth of a second; the best of several tries, for other processes only slow it."""
    driver, rate = _driver(), tick_rate()
    l1, l2 = _cache_bytes(0, 32 << 10), _cache_bytes(2, 1 << 20)
    data = np.ones((16 << 20) // 4 + 16, np.float32)
    start = (data.ctypes.data + 63) // 64 * 64

    def read(size: int) -> float:
        turns = max(1, (16 << 20) // size)
        tries = (
            driver.read_rate(
                ctypes.c_void_p(start), ctypes.c_long(size), ctypes.c_int(turns), ctypes.c_double(rate)
            )
            for _ in range(8)
        )
        return float(max(tries))

    with pinned():
        multiply = max(driver.multiply_rate(ctypes.c_int(50_000), ctypes.c_double(rate)) for _ in range(8))
        return Core(read(l1 // 2), read(l2 // 2), read(min(8 << 20, 8 * l2)), float(multiply), l1, l2)
