"""What a probe sees of the script's Loop: device, loaders, modules, captured functions, logged rows, memory."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hotloop.hardware import usable_cores
from hotloop.hardware.precisions import supported_precisions
from hotloop.state.ring import Row

__all__ = ["Sight"]


class _Rows:
    """The sink that keeps rows for the probe."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def write_rows(self, rows: Any) -> None:
        """Keep `rows`."""
        self.rows += rows

    def close(self) -> None:
        """Nothing is open."""


class Sight:
    """A Loop as the probe knows it.

    Attributes:
        loop: the script's first Loop; None before it is made.
    """

    def __init__(self) -> None:
        self.loop: Any = None
        self._sink = _Rows()
        self._taken = 0
        self._total: tuple[str, int] | None = None
        self._captured: list[Any] = []
        self._backward: str | None = None

    def quiet(self, loop: Any) -> None:
        """Let `loop` write, show, save and resume nothing."""
        loop._session.log.sinks[:] = []
        loop._saver.save = lambda *args, **kwargs: False
        loop.resume = lambda path: False

    def attach(self, loop: Any) -> None:
        """Watch `loop`."""
        self.loop = loop
        self.quiet(loop)
        loop._session.log.sinks.append(self._sink)
        for name in ("epochs", "steps"):
            setattr(loop, name, self._noting_total(name, getattr(loop, name)))
        capture, backward = loop.capture, loop.backward

        def noting_capture(function: Any = None, **options: Any) -> Any:
            if function is None:
                return lambda f: noting_capture(f, **options)
            step = capture(function, **options)
            self._captured.append(step)
            return step

        def noting_backward(*args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            self._backward = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            del loop.backward
            return backward(*args, **kwargs)

        loop.capture, loop.backward = noting_capture, noting_backward

    def _noting_total(self, name: str, function: Any) -> Any:
        def call(n: int) -> Any:
            self._total = (name, n)
            return function(n)

        return call

    # ------------------------------------------------------------------------------------------------ what is there

    def modules(self) -> list[nn.Module]:
        """Prepared modules."""
        return list(self.loop._preparer.registry.modules)

    def parameters(self) -> list[torch.Tensor]:
        """Parameters of prepared modules that learn."""
        found = {id(p): p for m in self.modules() for p in m.parameters() if p.requires_grad}
        return list(found.values())

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.loop is not None:
            if self.loop.device.type != "cpu":
                torch.accelerator.synchronize()
        elif torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()

    def waited_s(self) -> float:
        """Seconds that the script has waited for its training loader so far."""
        loader = None if self.loop is None else self.loop._preparer.training_loader()
        return 0.0 if loader is None else float(loader.waited_s)

    def memory_bytes(self) -> int:
        """Peak memory: the device's, or this process's on the CPU."""
        if self.loop is not None and self.loop.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated())
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def memory_now_bytes(self) -> int:
        """Memory in use: the device's, or this process's on the CPU."""
        if self.loop is not None and self.loop.device.type == "cuda":
            return int(torch.cuda.memory_allocated())
        try:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
        except (OSError, ValueError):
            return self.memory_bytes()
        return pages * os.sysconf("SC_PAGE_SIZE")

    def take_rows(self) -> list[list[Any]]:
        """Logged rows that were not taken before: [step, {name: number}]."""
        if self.loop is not None:
            self.loop._session.log.flush()
        rows = self._sink.rows[self._taken :]
        self._taken += len(rows)
        return [
            [row.step, {k: float(v) for k, v in row.values.items() if isinstance(v, int | float)}]
            for row in rows
        ]

    def facts(self) -> dict[str, Any]:
        """Everything that the ladder asks about, as plain values."""
        loop = self.loop
        if loop is None:
            return {"loop": False}
        window, loader = loop._window, loop._preparer.training_loader()
        source = getattr(loader, "source", None)
        modules = self.modules()
        kinds = {type(m).__name__ for top in modules for m in top.modules()}
        epoch = _length(loader)
        epoch_steps = None if epoch is None else -(-epoch // window.every)
        return {
            "loop": True,
            "device": loop.device.type,
            "device_name": _name(loop.device),
            "supported": supported_precisions(loop.device),
            "values": {k: v for k, v in loop.settings.values.items() if isinstance(v, int | str | bool)},
            "from_file": {
                name: loop.settings.values[name]
                for name, source in loop.settings.sources.items()
                if source.endswith(".toml") and isinstance(loop.settings.values[name], int | float | str)
            },
            "epoch_steps": epoch_steps,
            "batch_size": getattr(source, "batch_size", None),
            "accumulation": window.every,
            "total_steps": self._total_steps(epoch_steps),
            "convolutions": any(p.dim() == 4 for p in self.parameters()),
            "dropout": bool(kinds & {"Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout"}),
            "parameters": sum(p.numel() for p in self.parameters()),
            "optimizers": [
                {
                    "type": type(o).__name__,
                    "torch": type(o).__module__.startswith("torch."),
                    "fused": bool(o.param_groups[0].get("fused")),
                }
                for o in loop._preparer.registry.optimizers
            ],
            "loader": None if loader is None else type(source).__name__,
            "by_index": bool(source is not None and hasattr(source, "num_workers") and not _streams(source)),
            "workers": getattr(source, "num_workers", None),
            "threads": torch.get_num_threads(),
            "cores": usable_cores(),
            "captured": [
                {
                    "name": getattr(step, "name", "?"),
                    "mode": getattr(step, "mode", "?"),
                    "reason": getattr(step, "reason", None),
                }
                for step in self._captured
            ],
            "backward": self._backward,
            "notes": list(loop._session.notes.lines),
            "world": loop.processes.world,
        }

    def _total_steps(self, epoch_steps: int | None) -> int | None:
        if self._total is None:
            return None
        name, n = self._total
        if name == "steps":
            return n
        return None if epoch_steps is None else n * epoch_steps


def _length(loader: Any) -> int | None:
    try:
        return None if loader is None else len(loader)
    except (TypeError, NotImplementedError):
        return None


def _streams(source: Any) -> bool:
    from torch.utils.data import IterableDataset

    return isinstance(getattr(source, "dataset", None), IterableDataset)


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    from hotloop.hardware.machine import cpu_model

    return cpu_model() or "CPU"
