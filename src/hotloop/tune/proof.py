"""The proof that a rung is still the same training: beside the float32 eager reference, stopped once it is not."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hotloop.errors import HotloopError
from hotloop.tune.band import Band, Cusum, block_means, make_band
from hotloop.tune.checks import (
    EARLY,
    Fault,
    check_constants,
    check_data,
    check_early,
    check_growth,
    check_length,
    check_rates,
    check_updates,
)
from hotloop.tune.run import Run, find_loss, finish_run, start_run
from hotloop.tune.rung import Rung, join
from hotloop.tune.tolerance import Tolerance, tolerance_of
from hotloop.tune.trial import Nursery, Trial

__all__ = ["REFERENCE", "Prover", "Verdict"]

REFERENCE = Rung("fp32, eager", {"precision": "fp32", "capture": "off"}, lever="reference")
_MOST_BLOCKS = 20
_LEAST_BLOCK = 4
_LEAST_UNIT = 1e-3


@dataclass
class Verdict:
    """What the proof says of a rung.

    Attributes:
        fault: what differs; None if nothing that seeds or rounding do not explain. run: its evidence.
        notes: what could not be seen, and what was seen besides.
    """

    fault: Fault | None
    run: Run
    notes: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """It is still the same training."""
        return self.fault is None


class Prover:
    """Holds the reference runs and judges others by them.

    Args:
        exact: the reference is the script as it is, and only what is bitwise equal to it holds.
        limit_s: longest silence of a run. seeds: further reference seeds.
        whole: `horizon` is all that the script does; runs are not stopped there but end by themselves.

    Attributes:
        horizon, block: in steps. reference: the run with the seed that trials have. others: those with other seeds.
        loss: name of the loss; None if none is logged. bands: by name of the logged value.
        precision: that of the script as it is.
    """

    def __init__(
        self,
        nursery: Nursery,
        *,
        seed: int,
        seeds: int,
        horizon: int,
        exact: bool,
        limit_s: float,
        whole: bool = False,
    ) -> None:
        self._nursery = nursery
        self._seed = seed
        self._seeds = seeds
        self._exact = exact
        self._limit_s = limit_s
        self.horizon = horizon
        self._stop_at = 10**9 if whole else horizon
        self.block = max(_LEAST_BLOCK, -(-horizon // _MOST_BLOCKS))
        self.blocks = [
            (first, min(first + self.block - 1, horizon)) for first in range(1, horizon + 1, self.block)
        ]
        self.reference = Run()
        self.others: list[Run] = []
        self.loss: str | None = None
        self.bands: dict[str, Band] = {}
        self.notes: list[str] = []
        self.precision = "fp32"
        self._without_dropout: Run | None = None

    def prepare(self, threads: int, beside: int) -> None:
        """Run the reference, and with other seeds `beside` at a time with fewer threads.

        Raises:
            HotloopError: the reference itself cannot be run, or its loss is not finite.
        """
        base = [] if self._exact else [REFERENCE]
        self.reference = self._run(base)
        if self.reference.error is not None:
            error = self.reference.error
            raise HotloopError(
                f"the reference run in fp32 came to nothing: {error}\n" + "\n".join(error.lines)
            )
        if self.reference.finished:
            self.horizon = self.reference.steps
        self.loss = find_loss(self.reference)
        if self.loss is None:
            self.notes.append("the script logs no loss by loop.log(loss=…): the proof rests on data, "
                              "first gradient, weights and memory")  # fmt: skip
        if not any(n for n, _ in self.reference.updates):
            self.notes.append("batches come from no loader that can be watched: their order is not compared")
        last = self.horizon if self.reference.finished else self.horizon - 1
        self.blocks = [(a, min(b, last)) for a, b in self.blocks if a <= last]
        if not self._exact:
            fewer = Rung("threads", {"threads": max(1, threads // beside)}) if beside > 1 else None
            waiting = list(range(1, self._seeds + 1))
            while waiting:
                now, waiting = waiting[:beside], waiting[beside:]
                started = [self._begin(base + ([fewer] if fewer else []), shift=shift) for shift in now]
                self.others += [finish_run(*trial, limit_s=self._limit_s) for trial in started]
            failed = [run.error for run in self.others if run.error is not None]
            self.others = [run for run in self.others if run.error is None]
            if not self.others:
                raise HotloopError(
                    f"no reference run with another seed came to its end, so there is no band: {failed[0]}\n"
                    + "\n".join(failed[0].lines)
                )
        self._make_bands()

    def _make_bands(self) -> None:
        runs = [self.reference, *self.others]
        for name, series in self.reference.values.items():
            shared = [run.values.get(name, {}) for run in runs]
            if name == self.loss:
                if not all(math.isfinite(v) for v in series.values()):
                    raise HotloopError("the loss of the reference run in fp32 is not finite")
                self.bands[name] = make_band(shared, self.blocks, _LEAST_UNIT)
            elif all(math.isfinite(v) for v in series.values()):
                steps = sorted(series)
                rare = len(steps) <= len(self.blocks)
                self.bands[name] = make_band(
                    shared, [(s, s) for s in steps] if rare else self.blocks, _LEAST_UNIT
                )

    def _begin(self, rungs: Sequence[Rung], *, shift: int = 0) -> tuple[Trial, Path]:
        return start_run(
            self._nursery, rungs, horizon=self._stop_at, block=self.block, seed=self._seed, shift=shift
        )

    def _run(self, rungs: Sequence[Rung]) -> Run:
        return finish_run(*self._begin(rungs), limit_s=self._limit_s)

    # ------------------------------------------------------------------------------------------------ judging

    def prove(self, rungs: Sequence[Rung], before: Run | None = None) -> Verdict:
        """Run with `rungs`, and judge block by block.

        Args:
            before: the run without the last of them, which holds: what that one adds is judged more narrowly.
        """
        watcher = _Watcher(self, str(join(list(rungs))[0].get("precision", self.precision)))
        trial = start_run(self._nursery, rungs, horizon=self._stop_at, block=self.block, seed=self._seed)
        run = finish_run(*trial, limit_s=self._limit_s, watch=watcher.look)
        notes = list(self.notes)
        fault = watcher.fault or self._error_of(run) or self._at_end(run)
        if fault is None and not self._exact:
            fault = self._early(run, rungs, before, notes)
        if fault is not None and fault.kind in ("arithmetic", "loss", "metric", "bits"):
            fault = self._repeats(run, rungs) or fault
        return Verdict(fault, run, notes)

    def _repeats(self, run: Run, rungs: Sequence[Rung]) -> Fault | None:
        """A run that differs from the reference may differ from itself too: then that is what is wrong with it."""
        again = self._short(rungs, dropout=True)
        fault = None if again.error else check_early(again, run, self.loss, tolerance_of("fp32"), "fp32")
        if fault is None:
            return None
        plain = self._short([] if self._exact else [REFERENCE], dropout=True)
        alike = tolerance_of("fp32")
        if plain.error is None and check_early(plain, self.reference, self.loss, alike, "fp32"):
            text = "two runs of the script differ with the same seed, without this rung too: see what draws"
            return Fault("repeatability", f"{text} unseeded numbers", fault.step)
        return Fault("repeatability", "two runs with the same seed differ in their first steps", fault.step)

    def _error_of(self, run: Run) -> Fault | None:
        error = run.error
        if error is None:
            return None
        last = error.lines[-1] if error.lines else ""
        if "NonFiniteError" in last:
            said = last.partition("NonFiniteError: ")[2]
            update = re.search(r"update (\d+)", said)
            step = int(update[1]) + 1 if update else run.steps + 1
            return Fault("loss", said.partition(";")[0], step)
        kind = {"memory": "out of memory"}.get(error.kind, error.kind)
        return Fault(kind, str(error), run.steps or None)

    def _at_end(self, run: Run) -> Fault | None:
        fault = check_growth(run, self.reference)
        if fault is None and self._exact and run.weights != self.reference.weights:
            fault = Fault(
                "bits", f"the weights after {run.steps} updates are not bitwise the same", run.steps
            )
        return fault

    def _early(self, run: Run, rungs: Sequence[Rung], before: Run | None, notes: list[str]) -> Fault | None:
        """The first steps agree with the reference's, and with those of the run before more narrowly."""
        name = run.precision
        allowed = tolerance_of(name)
        # micro-batches log their own losses, each of a part of the samples; the gradient is of all
        loss = None if join(list(rungs))[0].get("micro_batch") else self.loss
        fault = check_early(run, self.reference, loss, allowed, name)
        if fault is None and before is not None and rungs and rungs[-1].lever != "precision":
            narrow = Tolerance(allowed.gradient / 2, allowed.scale / 2, allowed.loss)
            fault = check_early(run, before, loss, narrow, name)
        if fault is None or not self.reference.draws:
            return fault
        # it may have drawn other random numbers: compare where none are drawn
        plain = [] if self._exact else [REFERENCE]
        if self._without_dropout is None:
            self._without_dropout = self._short(plain)
        mine = self._short(rungs)
        if mine.error is not None or self._without_dropout.error is not None:
            return fault
        fault = check_early(mine, self._without_dropout, loss, allowed, name)
        if fault is not None and self._without_dropout.draws:
            notes.append("its steps draw other random numbers, beyond dropout: first steps are not compared")
            return None
        if fault is None:
            notes.append("draws other random numbers: the first steps were compared with dropout off")
        return fault

    def _short(self, rungs: Sequence[Rung], *, dropout: bool = False) -> Run:
        trial = start_run(self._nursery, rungs, horizon=EARLY, block=EARLY, seed=self._seed, dropout=dropout)
        return finish_run(*trial, limit_s=self._limit_s)


class _Watcher:
    """Judges a run while it goes on."""

    def __init__(self, prover: Prover, precision: str) -> None:
        self._prover = prover
        rounding = tolerance_of(precision).loss
        self._tests = {name: Cusum(band, rounding) for name, band in prover.bands.items()}
        self._judged = dict.fromkeys(self._tests, 0)
        self.fault: Fault | None = None
        self.began = time.monotonic()

    def look(self, run: Run) -> bool:
        """False if the run is not the same training, and need not go on."""
        prover = self._prover
        reference = prover.reference
        self.fault = (
            check_data(run, reference)
            or check_length(run, reference)
            or check_updates(run, reference)
            or check_rates(run, reference)
            or check_constants(run, reference)
            or (self._bits(run) if prover._exact else self._bands(run))
        )
        return self.fault is None

    def _bits(self, run: Run) -> Fault | None:
        for i, (mine, theirs) in enumerate(zip(run.marks, self._prover.reference.marks, strict=False), 1):
            if mine != theirs:
                return Fault("bits", "the weights are not bitwise the same", i)
        return None

    def _bands(self, run: Run) -> Fault | None:
        for name, test in self._tests.items():
            blocks = test.band.blocks
            # what belongs to a step is logged after it: a block is judged once the run is past it
            complete = sum(
                1 for _, last in blocks if last < run.steps or (run.finished and last == run.steps)
            )
            means = block_means(run.values.get(name, {}), blocks[:complete])
            for block in range(self._judged[name], complete):
                self._judged[name] = block + 1
                if test.add(block, float(means[block])):
                    return self._left(name, test, float(means[block]), block)
        return None

    def _left(self, name: str, test: Cusum, mean: float, block: int) -> Fault:
        band = test.band
        kind = "loss" if name == self._prover.loss else "metric"
        first, last = band.blocks[block]
        where = f"in steps {first}-{last}" if last > first else f"at step {first}"
        text = (
            f"{name} left the band of {len(band.seeds)} seeds at step {test.left_at}: {mean:.4g} {where}, "
            f"the reference {band.same[block]:.4g}"
        )
        if math.isfinite(mean):
            away = abs(mean - band.same[block]) / test.unit[block]
            text += f" ({away:.1f} times what seeds differ by)"
        return Fault(kind, text, test.left_at)
