"""One run of mode "prove" as the tuner keeps it: losses, metrics, data, weights, memory, step by step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hotloop.tune.rung import Rung
from hotloop.tune.trial import Nursery, Trial, TrialError, TrialOverError

__all__ = ["Run", "find_loss", "finish_run", "start_run"]

_OTHER_DATA = ("val", "test", "eval", "dev")


@dataclass
class Run:
    """What a run told.

    Attributes:
        values: name -> step -> value; several rows of one step are averaged.
        updates: for each update (samples, hash of them). marks: hash of the weights after it. rates: learning rates.
        constants: step -> numbers of optimizers and layers that were other than before.
        memory: (step, bytes in use). steps: made so far. finished: the script came to its own end.
        draws: a step draws random numbers. weights: hash of the final state. evaluated: [samples, hash] of data seen
            without gradients. gradient: of the first step, thinned out.
        precision: the number format in force. error: how it ended, if badly.
    """

    values: dict[str, dict[int, float]] = field(default_factory=dict)
    updates: list[tuple[int, str]] = field(default_factory=list)
    marks: list[str] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    constants: dict[int, dict[str, float]] = field(default_factory=dict)
    memory: list[tuple[int, int]] = field(default_factory=list)
    steps: int = 0
    finished: bool = False
    draws: bool = False
    weights: str = ""
    evaluated: list[Any] = field(default_factory=list)
    skipped: int = 0
    gradient: npt.NDArray[np.float32] | None = None
    precision: str = "fp32"
    facts: dict[str, Any] = field(default_factory=dict)
    error: TrialError | None = None
    _counts: dict[tuple[str, int], int] = field(default_factory=dict)

    def take(self, message: dict[str, Any]) -> None:
        """Add a block's or the last message."""
        for step, named in message.get("rows", []):
            for name, value in named.items():
                series = self.values.setdefault(name, {})
                count = self._counts.get((name, step), 0)
                series[step] = (series.get(step, 0.0) * count + value) / (count + 1)
                self._counts[name, step] = count + 1
        self.updates += [(int(n), str(h)) for n, h in message.get("updates", [])]
        self.marks += message.get("marks", [])
        self.rates += message.get("rates", [])
        self.constants |= {int(step): now for step, now in message.get("constants", [])}
        self.steps = int(message.get("step", message.get("steps", self.steps)))
        if message["event"] == "block":
            self.memory.append((self.steps, int(message["memory_bytes"])))
        else:
            self.finished = bool(message["finished"])
            self.draws = bool(message.get("draws"))
            self.weights = message.get("weights", "")
            self.evaluated = message.get("evaluated", [])
            self.skipped = int(message.get("skipped", 0))
            self.facts = message.get("facts", {})
            self.precision = str(self.facts.get("values", {}).get("precision", "fp32"))


def find_loss(run: Run) -> str | None:
    """The name of the training loss among logged values: "loss", else the most frequent name that has it in it."""
    named = {
        name: len(series)
        for name, series in run.values.items()
        if "loss" in name.lower() and not name.lower().startswith(_OTHER_DATA)
    }
    if "loss" in named:
        return "loss"
    return max(named, key=lambda name: named[name]) if named else None


def start_run(
    nursery: Nursery,
    rungs: Sequence[Rung],
    *,
    horizon: int,
    block: int,
    seed: int,
    shift: int = 0,
    dropout: bool = True,
) -> tuple[Trial, Path]:
    """Start a run of mode "prove"; returns it and the file in which the first gradient will be."""
    path = nursery.folder / f"gradient{nursery.started + 1}.npy"
    trial = nursery.start(
        rungs,
        "prove",
        horizon=horizon,
        block=block,
        seed=seed,
        shift=shift,
        dropout=dropout,
        gradients=str(path),
    )
    return trial, path


def finish_run(
    trial: Trial,
    gradient: Path,
    *,
    limit_s: float,
    watch: Callable[[Run], bool] = lambda run: True,
    until: Callable[[], float] = lambda: math.inf,
) -> Run:
    """Hear a run to its end.

    Args:
        limit_s: longest silence. watch: called with the run after each block; False ends it.
        until: seconds that may still be spent.
    """
    run = Run()
    try:
        while True:
            message = trial.hear("block", min(limit_s, max(until(), 1.0)))
            run.take(message)
            _load_gradient(run, gradient)
            if not watch(run):
                trial.kill()
                return run
    except TrialOverError as over:
        run.take(over.message)
        _load_gradient(run, gradient)
        watch(run)
    except TrialError as error:
        run.error = error
    return run


def _load_gradient(run: Run, path: Path) -> None:
    if run.gradient is None and path.exists():
        run.gradient = np.load(path)
        path.unlink()
