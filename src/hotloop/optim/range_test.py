"""The learning rate range test: a loss for each of many growing rates, smoothed, judged and drawn.

Smith (2015, 2017), "Cyclical Learning Rates for Training Neural Networks": train a few steps while the rate grows by
the same factor each step; the loss first stays, then falls, then explodes. Good rates lie where it falls.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from hotloop.errors import SettingError
from hotloop.optim.curves import Curve, Mark, draw_page, draw_svg, draw_text
from hotloop.optim.rates import Piece, Rate

__all__ = ["RangeTest", "Sweep", "judge_range"]

# The share of a fall that is its beginning: before that much the rates were too low to do anything.
_SLIGHT = 0.05
# Steps that a smoothed loss needs to be worth judging.
_FEWEST = 10


@dataclass
class Sweep:
    """The course of a range test: which rate comes next, and whether it is over.

    Args:
        low, high: first and last rate; they grow by the same factor from step to step.
        steps: how many.
        smoothing: how much of the running mean of the loss stays at each step.
        stop: over as soon as the smoothed loss is this many times its lowest value (for losses below 0 or near it: that
            many times its fall so far) above the lowest.

    Attributes:
        rates, losses: those tried so far.
        diverged: the loss exploded or was not finite any more.

    Raises:
        SettingError: `low` is not below `high`, fewer than 10 steps, or `smoothing` is not a share.
    """

    low: float = 1e-7
    high: float = 10.0
    steps: int = 100
    smoothing: float = 0.9
    stop: float = 4.0
    rates: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    diverged: bool = False

    def __post_init__(self) -> None:
        if not 0.0 < self.low < self.high < math.inf:
            raise SettingError(f"low={self.low} and high={self.high}: give 0 < low < high")
        if self.steps < _FEWEST:
            raise SettingError(f"steps={self.steps}: a range test needs at least {_FEWEST}")
        if not 0.0 <= self.smoothing < 1.0:
            raise SettingError(f"smoothing={self.smoothing} is a share, from 0 to below 1")
        if not self.stop > 1.0:
            raise SettingError(f"stop={self.stop} must be above 1")
        span = float(self.steps - 1)
        self._rate = Rate((Piece("exponential", self.low, self.high, span, span),))
        self._mean = 0.0
        self._first = self._best = math.nan

    @property
    def over(self) -> bool:
        """Whether there is nothing left to try."""
        return self.diverged or len(self.losses) >= self.steps

    def next_rate(self) -> float:
        """The rate of the step to come."""
        return self._rate(len(self.losses))

    def note(self, loss: float) -> bool:
        """The loss of the step just made with `next_rate()`, measured before its update; True once it is over."""
        self.rates.append(self.next_rate())
        self.losses.append(loss)
        if not math.isfinite(loss):
            self.diverged = True
            return True
        self._mean = self.smoothing * self._mean + (1.0 - self.smoothing) * loss
        smoothed = self._mean / (1.0 - self.smoothing ** len(self.losses))
        if len(self.losses) == 1:
            self._first = self._best = smoothed
        self._best = min(self._best, smoothed)
        room = (self.stop - 1.0) * max(abs(self._best), self._first - self._best)
        self.diverged = smoothed - self._best > room
        return self.over

    def result(self, **words: Any) -> RangeTest:
        """What was found."""
        return judge_range(self.rates, self.losses, smoothing=self.smoothing, diverged=self.diverged, **words)


@dataclass(frozen=True)
class RangeTest:
    """What a range test found.

    Attributes:
        rates, losses: those tried. smoothed: running mean of the losses, its bias towards 0 corrected.
        verdict: "found", "flat" (no rate lowered the loss by more than its noise), "diverged" (it rose from the first
            rates on) or "short" (too few steps to tell).
        steepest: the rate at which the smoothed loss falls fastest; None unless found.
        valley: the rate in the middle of the longest fall, from where a twentieth of it is done: a careful choice; None
            unless found.
        diverged: the rate at which the loss had exploded; None if it never did.
        words: what was seen, in a sentence.
    """

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    smoothed: tuple[float, ...]
    verdict: str
    steepest: float | None
    valley: float | None
    diverged: float | None
    words: str

    @property
    def suggestion(self) -> float | None:
        """The rate to begin with: `valley`."""
        return self.valley

    def as_dict(self) -> dict[str, Any]:
        """All of it as JSON values; losses that are not finite are None."""
        return {
            "verdict": self.verdict,
            "words": self.words,
            "steepest": self.steepest,
            "valley": self.valley,
            "diverged": self.diverged,
            "rates": list(self.rates),
            "losses": [_finite(loss) for loss in self.losses],
            "smoothed": [_finite(loss) for loss in self.smoothed],
        }

    def _parts(self) -> tuple[list[Curve], list[Mark]]:
        shown = [s for s in self.smoothed if math.isfinite(s)] or [0.0]
        # what exploded would flatten all the rest
        low, first = min(shown), max(shown[:_FEWEST])
        top = first + max(first - low, 0.1 * abs(first)) if self.diverged is not None else max(shown)
        smoothed = tuple(min(s, top) for s in self.smoothed)
        raw = tuple(loss if loss <= top else math.nan for loss in self.losses)
        curves = [Curve("smoothed", self.rates, smoothed), Curve("loss", self.rates, raw)]
        found = [("steepest", self.steepest), ("valley", self.valley)]
        return curves, [Mark(name, x) for name, x in found if x is not None]

    def plot(self, *, width: int = 72, height: int = 14) -> str:
        """The smoothed loss over the rate (logarithmic) as characters, suggestions marked."""
        curves, marks = self._parts()
        return draw_text(curves[:1], marks=marks, width=width, height=height, log_x=True)

    def svg(self) -> str:
        """Both curves as one SVG picture."""
        curves, marks = self._parts()
        return draw_svg(curves, marks=marks, x_label="learning rate", height=320, log_x=True)

    def html(self, title: str = "learning rate range test") -> str:
        """A page with the picture, which needs no other file."""
        return draw_page(title, [self.svg()], [self.words])

    def __str__(self) -> str:
        return f"{self.plot()}\n{self.words}"


def judge_range(
    rates: list[float],
    losses: list[float],
    *,
    smoothing: float = 0.9,
    diverged: bool = False,
    ended: str = "",
) -> RangeTest:
    """Smooth the losses of a range test and say which rates they speak for.

    Args:
        rates, losses: of each step, the loss taken before its update.
        diverged: the last loss had exploded.
        ended: why it ended early, for the words.
    """
    smoothed = _smooth(losses, smoothing)
    unfit = bool(losses) and not math.isfinite(losses[0])
    last = rates[-1] if diverged and rates else None

    def result(
        verdict: str, words: str, steepest: float | None = None, valley: float | None = None
    ) -> RangeTest:
        words = f"{words}; {ended}" if ended else words
        return RangeTest(tuple(rates), tuple(losses), tuple(smoothed), verdict, steepest, valley, last, words)

    finite = [s for s in smoothed if math.isfinite(s)]
    if len(finite) < _FEWEST:
        if unfit:
            return result(
                "diverged",
                f"the first loss, before any update, is {losses[0]}: no rate can mend that, and there is no suggestion",
            )
        if diverged:
            return result(
                "diverged",
                f"the loss exploded within {len(losses)} steps, at a rate of {rates[-1]:.2g}: no suggestion; begin "
                f"with a lower rate, such as {rates[0] / 1000:.0e}",
            )
        return result("short", f"{len(losses)} steps are too few to tell: no suggestion")
    # the first values rest on a loss or two; the level before anything happened is that of the first few together
    head = max(_FEWEST // 2, len(finite) // 8)
    level = sum(losses[:head]) / head
    bottom = min(range(head, len(finite)), key=finite.__getitem__)
    fall = level - finite[bottom]
    single = _noise(losses[: bottom + 1])
    mean = single * math.sqrt((1.0 - smoothing) / (1.0 + smoothing))
    # three standard deviations of the difference; and the lowest of many is low by chance
    if fall <= max(3.0 * math.hypot(single / math.sqrt(head), mean) + 1.5 * mean, 2e-3 * abs(level)):
        if diverged and bottom <= max(2 * head, len(finite) // 4):
            return result(
                "diverged",
                f"the loss rose from the first rates on, and had exploded at {rates[-1]:.2g}: no suggestion; begin "
                f"with a lower rate, such as {rates[0] / 1000:.0e}",
            )
        return result(
            "flat",
            f"no rate from {rates[0]:.2g} to {rates[-1]:.2g} lowered the loss by more than its noise: no suggestion",
        )
    xs = [math.log(rate) for rate in rates]
    slopes = {
        i: (finite[i + 1] - finite[i - 1]) / (xs[i + 1] - xs[i - 1])
        for i in range(min(head, bottom - 1), bottom)
        if i > 0 and i + 1 < len(finite)
    }
    steepest = rates[min(slopes, key=slopes.__getitem__)]
    first, end = _longest_fall(finite[: bottom + 1])
    # rates too low to do anything fall by a little as well, however many of them were tried
    slight = finite[first] - _SLIGHT * (finite[first] - finite[end])
    first = max(i for i in range(first, end + 1) if finite[i] >= slight)
    valley = rates[(first + end) // 2]
    words = f"the loss falls fastest at {steepest:.2g} (steepest); a careful choice is {valley:.2g} (valley)"
    return result("found", words, steepest, valley)


def _smooth(losses: list[float], smoothing: float) -> list[float]:
    mean, found = 0.0, []
    for number, loss in enumerate(losses, 1):
        mean = smoothing * mean + (1.0 - smoothing) * loss
        found.append(mean / (1.0 - smoothing**number))
    return found


def _noise(losses: list[float]) -> float:
    """Standard deviation of a single loss by noise alone, from the steps between neighbours.

    Medians: what the rate does to the loss, a fall or a rise over many steps, does not count as noise.
    """
    steps = sorted(abs(b - a) for a, b in pairwise(losses) if math.isfinite(b - a))
    if not steps:
        return 0.0
    middle: float = steps[len(steps) // 2]
    # the median of |N(0, 2 s^2)| is 0.954 s; a running mean of independent values keeps (1 - b) / (1 + b) of s^2
    return middle / 0.954


def _longest_fall(values: list[float]) -> tuple[int, int]:
    """First and last index of the longest subsequence that falls strictly, in n^2 steps."""
    longest, before = [1] * len(values), [-1] * len(values)
    for i in range(1, len(values)):
        for j in range(i):
            if values[j] > values[i] and longest[j] + 1 > longest[i]:
                longest[i], before[i] = longest[j] + 1, j
    end = max(range(len(values)), key=longest.__getitem__)
    first = end
    while before[first] >= 0:
        first = before[first]
    return first, end


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
