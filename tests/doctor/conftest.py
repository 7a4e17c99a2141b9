"""Where the recorded traces are, and a machine that makes traces of programs whose true times are known."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def shared_traces() -> Path:
    """The folder of recorded traces; tests that need it are skipped where it is absent."""
    shared = Path(os.environ.get("HOTLOOP_SHARED", ROOT.parent / "shared"))
    return shared / "cases" / "traces"


@pytest.fixture(scope="session")
def traces() -> Path:
    folder = shared_traces()
    if not folder.is_dir():
        pytest.skip(f"no recorded traces in {folder}")
    return folder


class Machine:
    """A host and a device that run a program and record it as the profiler would.

    The host spends `launch_us` in each launch; work starts `delay_us` after its launch began, or `gap_us` after the
    stream's earlier work. All numbers are exact, so that what a changed program takes is known by running it.
    """

    launch_us, delay_us, gap_us = 4.0, 6.0, 1.0

    def __init__(self, device: str = "NVIDIA H100 80GB HBM3", start_us: float = 1000.0) -> None:
        self.now = start_us
        self.free: dict[int, float] = {}
        self.events: list[dict[str, Any]] = []
        self.correlation = 0
        self.steps = 0
        self.header: dict[str, Any] = {
            "schemaVersion": 1,
            "deviceProperties": [
                {"id": 0, "name": device, "computeMajor": 9, "computeMinor": 0, "numSms": 132}
            ],
        }

    def _add(self, category: str, name: str, start: float, took: float, **args: Any) -> None:
        gpu = category in ("kernel", "gpu_memcpy", "gpu_memset")
        tid = args.get("stream", 7) if gpu else 1
        self.events.append(
            {"ph": "X", "cat": category, "name": name, "pid": 0 if gpu else 10, "tid": tid, "ts": start, "dur": took,
             "args": args}
        )  # fmt: skip

    def think(self, us: float) -> None:
        self.now += us

    @contextmanager
    def span(self, name: str, category: str = "cpu_op", **args: Any) -> Iterator[None]:
        start, place = self.now, len(self.events)
        yield
        self._add(category, name, start, self.now - start, **args)
        self.events.insert(place, self.events.pop())

    @contextmanager
    def step(self) -> Iterator[None]:
        self.steps += 1
        with self.span(f"ProfilerStep#{self.steps}", "user_annotation"):
            yield

    def launch(self, took: float, name: str = "gemm_bf16", stream: int = 7, **args: Any) -> float:
        """Start a kernel; returns when it will end."""
        self.correlation += 1
        start = max(self.now + self.delay_us, self.free.get(stream, 0.0) + self.gap_us)
        self._add("cuda_runtime", "cudaLaunchKernel", self.now, self.launch_us, correlation=self.correlation)
        self._add(
            "kernel", name, start, took, stream=stream, device=0, correlation=self.correlation, grid=[528, 1, 1],
            block=[256, 1, 1], **args
        )  # fmt: skip
        self.free[stream] = start + took
        self.now += self.launch_us
        return start + took

    def copy(
        self, took: float, kind: str = "HtoD", *, blocking: bool, stream: int = 7, size: int = 10**6
    ) -> float:
        self.correlation += 1
        start = max(self.now + self.delay_us, self.free.get(stream, 0.0) + self.gap_us)
        memory = "Pageable" if blocking else "Pinned"
        name = (
            f"Memcpy {kind} ({memory} -> Device)" if kind == "HtoD" else f"Memcpy {kind} (Device -> {memory})"
        )
        end = start + took
        self.free[stream] = end
        call = end + 2.0 - self.now if blocking else self.launch_us
        self._add("cuda_runtime", "cudaMemcpyAsync", self.now, call, correlation=self.correlation)
        self._add(
            "gpu_memcpy", name, start, took, stream=stream, device=0, correlation=self.correlation, bytes=size
        )
        self.now += call
        return end

    def sync(self, name: str = "cudaStreamSynchronize") -> None:
        self.correlation += 1
        until = max(self.now + 3.0, max(self.free.values(), default=0.0) + 2.0)
        self._add("cuda_runtime", name, self.now, until - self.now, correlation=self.correlation)
        self.now = until

    def item(self, took: float = 2.0) -> None:
        """`.item()`: a copy to the host and a synchronisation, inside the operators that torch shows."""
        with self.span("aten::item"), self.span("aten::_local_scalar_dense"):
            self.correlation += 1
            start = max(self.now + self.delay_us, self.free.get(7, 0.0) + self.gap_us)
            self._add(
                "cuda_runtime", "cudaMemcpyAsync", self.now, self.launch_us, correlation=self.correlation
            )
            self._add(
                "gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", start, took, stream=7, device=0,
                correlation=self.correlation, bytes=4,
            )  # fmt: skip
            self.free[7] = start + took
            self.now += self.launch_us
            self.sync()

    @property
    def end_us(self) -> float:
        """When everything is done."""
        return max(self.now, *self.free.values())

    def text(self) -> str:
        return json.dumps({**self.header, "traceEvents": self.events, "traceName": "made"})

    def write(self, path: Path) -> Path:
        path.write_text(self.text())
        return path


@pytest.fixture
def machine() -> type[Machine]:
    return Machine
