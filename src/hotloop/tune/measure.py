"""Which of two is faster: alternating stretches of steps, each in its own living process, judged in pairs.

Both processes are warm and wait; in each round first the one, then the other (and the next time the other way round)
runs a stretch of steps. What a round says is the logarithm of the ratio of both times, so that whatever slows the
machine for longer than a round slows both. Looks are taken after 3, 4, 6, 9, 14 and 20 rounds; at each, Student's
interval of the mean at 1 - 0.05/6 is formed (Bonferroni over the looks), so that a rung without effect is kept with a
probability of at most 2.5 %. It is kept once all of the interval lies above the least gain, dropped once it reaches no
further or, from four rounds on, one at 60 % does not, and left undecided where 20 rounds as noisy as those so far would
not decide it.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hotloop.tune.rung import Rung
from hotloop.tune.student import t_quantile
from hotloop.tune.trial import Nursery, Script, Trial, TrialError, TrialOverError

__all__ = ["LEAST_GAIN", "LOOKS", "Contender", "Gain", "compare", "interval", "is_hopeless", "judge"]

LOOKS = (3, 4, 6, 9, 14, 20)
LEAST_GAIN = 0.01
_ERROR = 0.05
_DROP_ERROR = 0.4
_GIVE_UP_AFTER = 6


@dataclass
class Gain:
    """How many times as fast the second of two is.

    Attributes:
        ratio: the mean over rounds (geometric); low, high: its interval at the last look. rounds: how many.
        verdict: "faster", "not faster" or "undecided".
        first, second: seconds per step in each round.
    """

    ratio: float
    low: float
    high: float
    rounds: int
    verdict: str
    first: list[float] = field(default_factory=list)
    second: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.ratio:.2f}x [{self.low:.2f}, {self.high:.2f}]"


def interval(logs: Sequence[float], error: float = _ERROR / len(LOOKS)) -> tuple[float, float]:
    """Student's interval of the mean of `logs`, two-sided, at confidence 1 - `error`."""
    mean = statistics.fmean(logs)
    half = t_quantile(1 - error / 2, len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return mean - half, mean + half


def judge(logs: Sequence[float], least: float = LEAST_GAIN) -> str | None:
    """ "faster" or "not faster" by the logarithms of the ratios; None if that is not decided yet."""
    least = math.log1p(least)
    if interval(logs)[0] > least:
        return "faster"
    # to leave a rung out asks for less than to keep it: a mistake costs some speed, and nothing else
    if len(logs) > LOOKS[0] and interval(logs, _DROP_ERROR)[1] < least:
        return "not faster"
    if interval(logs)[1] < least:
        return "not faster"
    return None


def is_hopeless(logs: Sequence[float], most: int, least: float = LEAST_GAIN) -> bool:
    """Whether `most` rounds as noisy as those so far would not decide it either."""
    half = t_quantile(1 - _ERROR / len(LOOKS) / 2, most - 1) * statistics.stdev(logs) / math.sqrt(most)
    return abs(statistics.fmean(logs) - math.log1p(least)) < half


class Contender:
    """The script with some rungs, warm and waiting; started anew when it comes to its end.

    Attributes:
        facts: what its probe saw. warm_up_s, warmed: seconds and steps from its first start until it was warm.
        warm_up: steps that a start takes.
        memory_bytes: its peak. slices: times of all stretches, seconds per step.
    """

    def __init__(
        self,
        nursery: Nursery,
        rungs: Sequence[Rung],
        *,
        warm_up: int,
        seed: int | None,
        script: Script | None = None,
    ) -> None:
        self.rungs = list(rungs)
        self.warm_up = warm_up
        self.facts: dict[str, Any] = {}
        self.warm_up_s = 0.0
        self.warmed = 0
        self.memory_bytes = 0
        self.slices: list[float] = []
        self.waited_share = 0.0
        self._nursery = nursery
        self.seed = seed
        self._script = script
        self._trial: Trial | None = None
        self._skip = 0

    def start(self, limit_s: float) -> None:
        """Start it and wait until it is warm.

        Raises:
            TrialError: it crashed or hung.
            TrialOverError: the script is over before it is warm.
        """
        self._trial = self._nursery.start(
            self.rungs, "measure", script=self._script, warm_up=self.warm_up, seed=self.seed
        )
        ready = self._trial.hear("ready", limit_s)
        facts = ready["facts"]
        if not self.facts:
            self.warm_up_s, self.warmed = facts["ready_s"], facts["steps"]
        self.facts = facts
        workers = facts.get("workers") or 0
        # batches that were fetched while it stood still come for nothing
        self._skip = min(2 + workers * int(facts.get("values", {}).get("prefetch") or 2), 20)

    def run(self, steps: int, limit_s: float) -> float:
        """Seconds per step over a stretch of `steps`.

        Raises:
            TrialError: it crashed or hung.
        """
        for attempt in range(3):
            try:
                if self._trial is None:
                    self.start(limit_s)
                assert self._trial is not None
                self._trial.ask({"run": steps, "skip": self._skip})
                told = self._trial.hear("slice", limit_s)
                break
            except TrialOverError as over:
                self._trial = None
                if attempt == 2:
                    needed = self.warm_up + self._skip + steps
                    text = f"the script ends after {over.message['steps']} updates; measuring takes {needed}"
                    raise TrialError("length", text, []) from None
        self.memory_bytes = max(self.memory_bytes, int(told["memory_bytes"]))
        self.waited_share = told["waited_s"] / max(told["seconds"], 1e-9)
        self.slices.append(told["seconds"] / told["steps"])
        return self.slices[-1]

    def rows(self) -> list[list[Any]]:
        """What it has logged since it was started: [step, {name: number}]; empty if it cannot be asked."""
        if self._trial is None:
            return []
        try:
            self._trial.ask({"rows": True})
            return list(self._trial.hear("rows", 30.0)["rows"])
        except (TrialError, TrialOverError):
            self._trial = None
            return []

    def stop(self) -> None:
        """End its process."""
        if self._trial is not None:
            self._trial.kill()
            self._trial = None


def compare(
    first: Contender,
    second: Contender,
    steps: int | tuple[int, int],
    *,
    limit_s: float,
    until_s: float = math.inf,
    looks: Sequence[int] = LOOKS,
    tell: Callable[[str], None] = lambda text: None,
) -> Gain:
    """How many times as fast `second` is as `first`.

    Args:
        steps: of a stretch, or of each one's. limit_s: for each stretch.
        until_s: no round begins after this (`time.monotonic`).

    Raises:
        TrialError: one of the two crashed or hung.
    """
    lengths = (steps, steps) if isinstance(steps, int) else steps
    times: tuple[list[float], list[float]] = ([], [])
    logs: list[float] = []
    verdict: str | None = None
    for number in range(1, looks[-1] + 1):
        order = (0, 1) if number % 2 else (1, 0)
        for side in order:
            times[side].append((first, second)[side].run(lengths[side], limit_s))
        logs.append(math.log(times[0][-1] / times[1][-1]))
        tell(f"round {number}: {math.exp(statistics.fmean(logs)):.2f}x")
        if number in looks:
            verdict = judge(logs)
            if verdict is not None or (number >= _GIVE_UP_AFTER and is_hopeless(logs, looks[-1])):
                break
        if time.monotonic() > until_s and number >= looks[0]:
            break
    low, high = interval(logs)
    return Gain(
        math.exp(statistics.fmean(logs)),
        math.exp(low),
        math.exp(high),
        len(logs),
        verdict or "undecided",
        *times,
    )
