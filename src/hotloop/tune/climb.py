"""The climb: measure the script as it is, then one rung after the other on top of the best so far."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from hotloop.errors import HotloopError
from hotloop.hardware import machine_kind
from hotloop.tune.checks import check_repeat
from hotloop.tune.ladder import Shares, build_ladder
from hotloop.tune.measure import Contender, Gain, compare
from hotloop.tune.proof import REFERENCE, Prover
from hotloop.tune.result import Result, Tried
from hotloop.tune.run import Run
from hotloop.tune.rung import Rung
from hotloop.tune.tolerance import tolerance_of
from hotloop.tune.trial import Nursery, Script, TrialError, TrialOverError

__all__ = ["Climb", "tune"]

Tell = Callable[[str, str], None]

_FIRST_WARM_UP = 10
_SLICE_S = 0.3
_LEAST_STEPS = 20
_MORE_STEPS = f"have it make more than {_LEAST_STEPS}, by its arguments say"
_AUTO_DECIDES = 80
# a rung whose interval reaches this far deserves a second trial
_MAY_HELP = 1.05
_PROOF_SHARE = 0.3
_FINAL_ROUNDS = 6
_START_LIMIT_S = 120.0


def tune(
    target: str,
    arguments: Sequence[str] = (),
    *,
    module: bool = False,
    budget_s: float = 600.0,
    exact: bool = False,
    seeds: int = 3,
    rungs: Sequence[Rung] = (),
    only: Sequence[Rung] | None = None,
    tell: Tell = lambda kind, text: None,
) -> Result:
    """Find the settings that make a script fastest and leave its training the same. Nothing is edited or written.

    Args:
        target, arguments, module: what to run, and how.
        budget_s: seconds that it may take; what is not reached is listed.
        exact: keep only what is bitwise equal to the script as it is.
        seeds: reference runs with other seeds, for the band.
        rungs: rungs of your own, tried first. only: these instead of the ladder.
        tell: called with ("line", text) for what stays on the screen and ("now", text) for what is being done.

    Raises:
        HotloopError: there is no such script, it makes no Loop or too few steps, or it fails as it is.
    """
    script = Script(target, arguments, module=module)
    began = time.monotonic()
    tell("now", "starting")
    with Nursery(script) as nursery:
        budget_s -= time.monotonic() - began
        climb = Climb(nursery, budget_s=budget_s, exact=exact, seeds=seeds, rungs=rungs, only=only, tell=tell)
        try:
            climb.run()
        except KeyboardInterrupt:
            if not climb.result.facts:
                raise
            climb.result.interrupted = "interrupted"
        return climb.finish()


class Climb:
    """One tuning.

    Attributes:
        result: what is found so far.
    """

    def __init__(
        self,
        nursery: Nursery,
        *,
        budget_s: float,
        exact: bool,
        seeds: int,
        rungs: Sequence[Rung],
        only: Sequence[Rung] | None,
        tell: Tell,
    ) -> None:
        self._nursery = nursery
        self._began = time.monotonic()
        self._budget_s = budget_s
        self._deadline = self._began + budget_s
        self._exact = exact
        self._seeds = seeds
        self._extra = list(rungs)
        self._only = None if only is None else list(only)
        self._tell = tell
        self._seed = 0
        self._warm_up = _FIRST_WARM_UP
        self._steps = 0
        self._limit_s = _START_LIMIT_S
        self.result = Result(nursery.script.target, exact=exact, seeds=seeds)
        self._best: Contender
        self._best_run: Run | None = None
        self._prover: Prover | None = None

    # ------------------------------------------------------------------------------------------------ the stations

    def run(self) -> None:
        """All of it; `result` fills up meanwhile."""
        self._measure_as_it_is()
        self._ask_doctor()
        result = self.result
        facts = result.facts
        shares = Shares(facts["data_share"], facts["update_share"], self._run_s())
        if self._only is None:
            findings = (result.findings_before or {}).get("findings", [])
            ladder = build_ladder(facts, findings, shares=shares, exact=self._exact, extra=self._extra)
            result.pruned = ladder.pruned
            rungs = ladder.rungs
        else:
            rungs = self._only
        self._tell("line", f"ladder: {', '.join(rung.name for rung in rungs) or 'empty'}")
        for pruned in result.pruned:
            self._tell("line", f"  not tried: {pruned.name}: {pruned.why}")
        for rung in rungs:
            if self._left_s() < self._reserve_s():
                result.tried.append(Tried(rung, "not reached", "the budget was spent"))
                continue
            reason = self._hopeless(rung)
            tried = Tried(rung, "not faster", reason) if reason else self._try(rung)
            result.tried.append(tried)
            self._tell("line", _line(tried))
        self._try_again()
        self._verify()

    def _try_again(self) -> None:
        """What noise left open is tried once more, on top of all that was kept."""
        result = self.result
        for i, before in enumerate(result.tried):
            if before.outcome != "not faster" or before.gain is None or before.gain.high < _MAY_HELP:
                continue
            if self._left_s() < 2 * self._reserve_s() or self._hopeless(before.rung):
                continue
            again = self._try(before.rung)
            if again.outcome != "failed":
                result.tried[i] = again
            self._tell("line", f"once more:{_line(again)}")

    def finish(self) -> Result:
        """Stop what runs; the result."""
        with contextlib.suppress(AttributeError):
            self._best.stop()
        self.result.seconds = time.monotonic() - self._began
        self.result.trials = self._nursery.started
        return self.result

    def _left_s(self) -> float:
        return self._deadline - time.monotonic()

    def _reserve_s(self) -> float:
        """What the verification at the end takes, about."""
        step_s = self.result.step_s
        return 2 * _FINAL_ROUNDS * self._steps * step_s + 2 * self._warm_up * step_s + 3.0

    def _run_s(self) -> float | None:
        total = self.result.total_steps
        return None if total is None else total * self.result.step_s

    def _measure_as_it_is(self) -> None:
        self._tell("now", "running the script as it is")
        try:
            self._measure_first()
        except TrialOverError as over:
            raise HotloopError(_too_short(self._nursery.script.target, over.message)) from None
        except TrialError as error:
            if error.kind == "length":
                raise HotloopError(f"{self._nursery.script.target}: {error}: have it make more") from None
            raise HotloopError(_failing(self._nursery.script.target, error)) from None

    def _measure_first(self) -> None:
        first = Contender(self._nursery, [], warm_up=_FIRST_WARM_UP, seed=None)
        self._best = first
        first.start(max(self._left_s(), 30.0))
        facts = first.facts
        if not facts.get("loop"):
            first.stop()
            raise HotloopError(
                f"{self._nursery.script.target} makes steps but no hotloop.Loop: settings have nothing to act on. "
                "See the quickstart for the five lines"
            )
        result = self.result
        result.facts, result.total_steps = facts, facts["total_steps"]
        result.machine = machine_kind(facts["device"])
        self._seed = facts["values"].get("seed") or 0
        self._plan_stretches(facts)
        if facts["values"].get("seed") is None:
            # trials have a seed: this one starts anew with it
            first.stop()
            first = self._best = Contender(self._nursery, [], warm_up=self._warm_up, seed=self._seed)
            first.start(self._limit_s)
        else:
            first.seed = self._seed
            if self._warm_up > first.warm_up:
                first.run(self._warm_up - first.warm_up, max(self._limit_s, _START_LIMIT_S))
                first.warm_up = self._warm_up
        times = [self._best.run(self._steps, self._limit_s) for _ in range(3)]
        result.step_s = statistics.median(times)
        result.memory_bytes = self._best.memory_bytes
        values = facts["values"]
        captured = any(step["mode"] != "off" for step in facts["captured"])
        result.baseline_is_fp32 = values.get("precision") == "fp32" and not captured
        self._tell(
            "line",
            f"as it is: {1 / result.step_s:.4g} steps/s on {facts['device_name']}, {values.get('precision')}, "
            f"{facts['data_share']:.0%} waiting for data, {facts['update_share']:.0%} in the optimizer",
        )

    def _plan_stretches(self, facts: dict[str, Any]) -> None:
        """How many steps are warm-up and how many are timed at a stretch."""
        step_s = max(facts["step_s"], 1e-6)
        steps = max(2, math.ceil(_SLICE_S / step_s))
        epoch, total = facts["epoch_steps"], self.result.total_steps
        warm_up = _FIRST_WARM_UP
        if epoch is not None and epoch * step_s < 4.0:
            # the last batch of an epoch and an evaluation have shapes of their own: they are warmed up too, and each
            # stretch holds as many of them as another
            warm_up = max(warm_up, epoch + 2)
            steps = -(-steps // epoch) * epoch
        if facts["device"] != "cpu" and facts["captured"] and facts["values"].get("capture") == "auto":
            # by then it has decided whether to compile, and has
            warm_up = max(warm_up, _AUTO_DECIDES)
        if total is not None:
            room = total - warm_up - 6
            if room < 2:
                warm_up = max(2, total // 3)
                room = total - warm_up - 6
            steps = max(2, min(steps, room))
            if epoch is not None and epoch <= steps:
                steps = steps // epoch * epoch
        self._warm_up, self._steps = warm_up, steps
        self._limit_s = max(60.0, 20 * (warm_up + steps) * step_s, min(self._budget_s / 3, 300.0))

    def _ask_doctor(self) -> None:
        self._tell("now", "the doctor looks at a few steps")
        self.result.findings_before = self._doctor([])
        told = self.result.findings_before
        if told is None:
            self._tell("line", "doctor: nothing was recorded")
            return
        self._tell("line", f"doctor: {told['verdict']}")
        for finding in told["findings"]:
            place = f" at {finding['place']['text']}" if finding["place"] else ""
            self._tell("line", f"  {finding['rule']}{place}: {finding['title']}")
            for line in finding["fix"].splitlines():
                self._tell("line", f"      {line}")

    def _doctor(self, rungs: Sequence[Rung]) -> dict[str, Any] | None:
        trial = self._nursery.start(rungs, "doctor", seed=self._seed, skip=min(self._warm_up, 20), active=3)
        try:
            facts: dict[str, Any] | None = trial.hear("doctor", self._limit_s)["facts"]
        except (TrialError, TrialOverError):
            facts = None
        finally:
            trial.kill()
        return facts

    def _reference(self) -> Prover:
        """The reference runs, made when the first rung is faster."""
        if self._prover is None:
            self._prover = self._make_reference()
        return self._prover

    def _make_reference(self) -> Prover:
        result = self.result
        facts = result.facts
        # on a GPU the host's cores are not what a run needs; on a CPU runs share them
        most = 4 if facts["device"] != "cpu" else 2
        beside = 1 if self._exact else max(1, min(most, facts["cores"] // 2, self._seeds))
        if facts["device"] == "cpu" and facts["cores"] >= 2 and not self._exact:
            beside = 2
        runs = 1 if self._exact else 1 + 1.5 * math.ceil(self._seeds / beside)
        spare_s = min(_PROOF_SHARE * self._budget_s, 0.5 * max(self._left_s(), 0.0))
        affordable = int(spare_s / (runs * 1.3 * result.step_s))
        horizon = max(_LEAST_STEPS, affordable)
        whole = result.total_steps is not None and horizon >= result.total_steps
        if whole:
            horizon = int(result.total_steps or 0)
        self._tell("now", f"{self._seeds + 1} reference runs of {horizon} steps in fp32")
        prover = Prover(
            self._nursery,
            seed=self._seed,
            seeds=self._seeds,
            horizon=horizon,
            exact=self._exact,
            limit_s=self._limit_s,
            whole=whole,
        )
        prover.precision = str(facts["values"].get("precision", "fp32"))
        prover.prepare(facts["threads"], beside)
        result.horizon, result.loss, result.notes = prover.horizon, prover.loss, prover.notes
        if prover.loss is not None:
            result.losses["fp32, eager"] = prover.reference.values[prover.loss]
            for i, other in enumerate(prover.others, 1):
                result.losses[f"seed +{i}"] = other.values.get(prover.loss, {})
            band = prover.bands.get(prover.loss)
            if band is not None:
                rows = zip(band.blocks, band.same.tolist(), band.unit.tolist(), strict=True)
                result.band = [(a, b, same, unit) for (a, b), same, unit in rows]
        extent = ", the whole run" if prover.reference.finished else ""
        self._tell("line", f"reference: {prover.horizon} steps{extent}, {len(prover.others) + 1} seeds")
        if result.baseline_is_fp32 or self._exact:
            self._best_run = prover.reference
        return prover

    # ------------------------------------------------------------------------------------------------ one rung

    def _hopeless(self, rung: Rung) -> str:
        """Why a rung need not be tried after what was kept; else empty."""
        kept = {r.lever: r for r in self.result.kept}
        if rung.settings.get("precision") == "tf32" and "precision" in kept:
            return f"{kept['precision'].name} is kept, which computes with fewer bits than tf32"
        if rung.settings.get("precision") == "fp16" and kept.get("precision") and rung.lever == "precision":
            return f"{kept['precision'].name} is kept, which is as fast and needs no loss scale"
        if rung.lever == "capture" and "capture" in kept and kept["capture"].settings["capture"] == "full":
            return "capture=full is kept, which includes it"
        return ""

    def _try(self, rung: Rung) -> Tried:
        kept = [r for r in self.result.kept if r.lever != rung.lever]
        contender = Contender(self._nursery, [*kept, rung], warm_up=self._warm_up, seed=self._seed)
        self._tell("now", f"trying {rung.name}")
        tried = Tried(rung, "failed")
        try:
            contender.start(max(self._limit_s, min(self._left_s(), 300.0)))
            gain = compare(
                self._best,
                contender,
                self._steps,
                limit_s=self._limit_s,
                until_s=self._deadline - self._reserve_s(),
                tell=lambda text: self._tell("now", f"trying {rung.name}: {text}"),
            )
            self._note_costs(tried, contender, gain)
            self._decide(tried, contender, gain, [*kept, rung])
        except TrialError as error:
            tried.why, tried.lines = str(error), error.lines
            if error.kind == "memory":
                tried.why += "; beside it only the best so far was running"
        except TrialOverError:
            tried.why = "the script ended before it was warm"
        finally:
            if tried.outcome == "kept":
                self._best.stop()
                self._best = contender
                self.result.kept = [*kept, rung]
            else:
                contender.stop()
        return tried

    def _note_costs(self, tried: Tried, contender: Contender, gain: Gain) -> None:
        tried.gain = gain
        tried.step_s = statistics.median(gain.second)
        tried.memory_bytes = contender.memory_bytes
        before_s = statistics.median(gain.first)
        once = contender.warm_up_s - contender.warmed * tried.step_s
        once_before = self._best.warm_up_s - self._best.warmed * before_s
        tried.extra_s = max(0.0, once - once_before)
        saved = before_s - tried.step_s
        if tried.extra_s > 0.5 and saved > 0:
            tried.break_even = math.ceil(tried.extra_s / saved)

    def _decide(self, tried: Tried, contender: Contender, gain: Gain, rungs: list[Rung]) -> None:
        if gain.verdict != "faster":
            tried.outcome = "not faster"
            tried.why = "within the noise" if gain.verdict == "undecided" else "not faster"
            return
        total = self.result.total_steps
        if tried.break_even is not None and total is not None and tried.break_even > total:
            tried.outcome = "does not pay"
            tried.why = (
                f"takes {tried.extra_s:.3g} s more to begin with, won back after {tried.break_even} steps; "
                f"the run has {total}"
            )
            return
        prover = self._reference()
        self._tell("now", f"proving {tried.rung.name}")
        verdict = prover.prove(rungs, self._best_run)
        tried.verdict, tried.fault = verdict, verdict.fault
        if tried.fault is None:
            allowed = tolerance_of(verdict.run.precision)
            tried.fault = check_repeat(contender.rows(), verdict.run, prover.loss, allowed)
        if tried.fault is not None:
            tried.outcome, tried.why = "rejected", str(tried.fault)
            self._keep_curve(tried.rung.name, verdict.run, prover)
            return
        tried.outcome = "kept"
        tried.why = "; ".join(verdict.notes[len(self.result.notes) :])
        self._best_run = verdict.run
        self._keep_curve("tuned", verdict.run, prover)
        self._keep_metrics(verdict.run, prover)

    def _keep_curve(self, name: str, run: Run, prover: Prover) -> None:
        if prover.loss is not None:
            self.result.losses[name] = run.values.get(prover.loss, {})

    def _keep_metrics(self, run: Run, prover: Prover) -> None:
        """Last value of each metric: (tuned, reference, what seeds differ by)."""
        for name, band in prover.bands.items():
            series = run.values.get(name, {})
            if name != prover.loss and series:
                last = max(series)
                self.result.metrics[name] = (
                    series[last],
                    prover.reference.values[name].get(last, math.nan),
                    float(band.unit[-1]),
                )

    # ------------------------------------------------------------------------------------------------ the end

    def _verify(self) -> None:
        """Measure all kept rungs together against the script as it is, in processes of which none was chosen."""
        result = self.result
        if not result.kept:
            return
        self._tell("now", "verifying the whole against the script as it is")
        looks = (_FINAL_ROUNDS,)
        tuned = Contender(self._nursery, result.kept, warm_up=self._warm_up, seed=self._seed)
        plain = Contender(self._nursery, [], warm_up=self._warm_up, seed=self._seed)
        fp32 = Contender(self._nursery, [REFERENCE], warm_up=self._warm_up, seed=self._seed)
        self._best.stop()
        try:
            tuned.start(self._limit_s)
            plain.start(self._limit_s)
            result.gain = compare(plain, tuned, self._steps, limit_s=self._limit_s, looks=looks)
            plain.stop()
            if result.baseline_is_fp32:
                result.gain_fp32 = result.gain
            else:
                fp32.start(self._limit_s)
                result.gain_fp32 = compare(fp32, tuned, self._steps, limit_s=self._limit_s, looks=looks)
        except (TrialError, TrialOverError) as error:
            result.interrupted = f"the verification at the end failed: {error}"
        finally:
            for contender in (tuned, plain, fp32):
                contender.stop()
        if self._left_s() > 5:
            self._tell("now", "the doctor looks again")
            result.findings_after = self._doctor(result.kept)


def _line(tried: Tried) -> str:
    gain = f"{tried.gain}, {tried.gain.rounds} rounds" if tried.gain is not None else ""
    parts = [part for part in (gain, tried.outcome, tried.why if tried.why != tried.outcome else "") if part]
    if tried.break_even is not None and tried.outcome == "kept":
        parts.append(f"won back after {tried.break_even} steps")
    return f"  {tried.rung.name}: {'; '.join(parts)}"


def _too_short(target: str, message: dict[str, Any]) -> str:
    if not message.get("loops"):
        return f"{target} makes no hotloop.Loop: settings have nothing to act on. See the quickstart for the five lines"
    return f"{target} ends after {message['steps']} updates, too few to be measured: {_MORE_STEPS}"


def _failing(target: str, error: TrialError) -> str:
    text = "".join(f"\n  {line}" for line in error.lines)
    if any("EOFError" in line for line in error.lines):
        text += "\ntrials have no standard input: have the script take by arguments what it asks for"
    return f"{target} fails as it is: {error}{text}"
