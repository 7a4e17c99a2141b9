"""Rates: what a learning rate (momentum, weight decay) is at every point of a run, as plain frozen functions.

A `Rate` is a row of pieces, each with a shape, a start, an end and a length, in steps, epochs, samples or tokens. It is
called as a function, composed with `then` and `scaled`, plotted, compared, pickled; `scheduler` makes the torch
scheduler of it. After its last piece a rate keeps its last value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from hotloop.errors import SettingError

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from hotloop.optim.rate_scheduler import RateScheduler

__all__ = [
    "ROUNDING",
    "SHAPES",
    "UNITS",
    "Piece",
    "Rate",
    "constant",
    "cosine",
    "exponential",
    "inverse_sqrt",
    "linear",
    "piecewise",
]

UNITS = ("steps", "epochs", "samples", "tokens")

# What a time that is a product or a sum of many may be short of a border that it is to have reached, of itself.
ROUNDING = 1e-12

# Value at u = (time in the piece) / span, between a at u = 0 and b at u = 1.
SHAPES: dict[str, Callable[[float, float, float], float]] = {
    "constant": lambda a, b, u: a,
    "linear": lambda a, b, u: a + (b - a) * u,
    "cosine": lambda a, b, u: b + (a - b) * (1.0 + math.cos(math.pi * u)) / 2.0,
    # Hägele et al. 2024: cools down better than a line after a constant stretch
    "1-sqrt": lambda a, b, u: b + (a - b) * (1.0 - math.sqrt(u)),
    "exponential": lambda a, b, u: a * (b / a) ** u,
    # Vaswani et al. 2017; b is not used, at u = 1 it is a / sqrt(2)
    "inverse-sqrt": lambda a, b, u: a / math.sqrt(1.0 + u),
}


@dataclass(frozen=True)
class Piece:
    """One stretch of a rate.

    Attributes:
        shape: one of `SHAPES`.
        start, end: the values at time 0 and at time `span` of the piece.
        span: the time over which the shape goes from start to end.
        length: how long the piece lasts; `math.inf` for ever, less than `span` if it is cut short.
    """

    shape: str
    start: float
    end: float
    span: float
    length: float

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise SettingError(f"shape={self.shape!r} is not known; valid values are: {', '.join(SHAPES)}")
        if not (math.isfinite(self.start) and math.isfinite(self.end)):
            raise SettingError(f"a rate from {self.start} to {self.end} is not finite")
        if not (0.0 < self.span < math.inf) or not self.length >= 0.0:
            raise SettingError(f"a piece of length {self.length} (span {self.span}) must last longer than 0")
        if self.shape == "exponential" and not self.start * self.end > 0.0:
            raise SettingError(
                f"an exponential from {self.start} to {self.end} passes no value between: both must be above 0"
            )

    def __call__(self, t: float) -> float:
        """The value at time `t` of the piece, 0 <= t <= length."""
        return SHAPES[self.shape](self.start, self.end, t / self.span)

    @property
    def last(self) -> float:
        """The value that the piece ends with; for one without an end, the value that it tends to."""
        if math.isinf(self.length):
            if self.shape == "exponential":
                return 0.0 if self.end < self.start else self.end
            return 0.0 if self.shape == "inverse-sqrt" else self.start
        # exactly the end where it is reached: cos(pi) and powers are only nearly so
        if self.length == self.span and self.shape not in ("inverse-sqrt", "constant"):
            return self.end
        return self(self.length)


@dataclass(frozen=True)
class Rate:
    """A value for every time of a run; call it with the time.

    Attributes:
        pieces: what it is made of, in order; a time at which two meet belongs to the later one.
        unit: what time is counted in: "steps" (updates), "epochs", "samples" or "tokens".
        momentum: the rate of the momentum (the first beta of Adam) beside this one, or None to leave it alone.
        weight_decay: the rate of the weight decay, or None.

    >>> rate = linear(0.0, 0.1, 100).then(cosine(0.1, 0.0, 900))
    >>> rate(0), rate(50), rate(100), rate(1000)
    (0.0, 0.05, 0.1, 0.0)
    >>> rate.scaled(2.0)(100)
    0.2
    """

    pieces: tuple[Piece, ...]
    unit: str = "steps"
    momentum: Rate | None = None
    weight_decay: Rate | None = None

    def __post_init__(self) -> None:
        if not self.pieces:
            raise SettingError("a rate needs at least one piece")
        if self.unit not in UNITS:
            raise SettingError(f"unit={self.unit!r} is not known; valid values are: {', '.join(UNITS)}")
        for name in ("momentum", "weight_decay"):
            other = getattr(self, name)
            if other is not None and other.unit != self.unit:
                raise SettingError(f"a rate in {self.unit} cannot have a {name} in {other.unit}")

    @property
    def length(self) -> float:
        """How long it lasts before it keeps its last value; `math.inf` if it never ends."""
        return math.fsum(piece.length for piece in self.pieces)

    def __call__(self, t: float) -> float:
        """The value at time `t` (in `unit`, from 0)."""
        t = max(t, 0.0)
        # 49 steps of 1 / 49 of an epoch are an epoch, though their product is a rounding error less
        slack = ROUNDING * t
        for piece in self.pieces:
            if t < piece.length - slack:
                return piece(t)
            t = max(t - piece.length, 0.0)
        return self.pieces[-1].last

    def values(self, n: int, *, every: float = 1.0) -> list[float]:
        """The values at 0, `every`, 2 `every`, …: `n` of them."""
        return [self(k * every) for k in range(n)]

    # ---------------------------------------------------------------------------------------------- composing

    def then(self, other: Rate, *, after: float | None = None) -> Rate:
        """This rate, and from its end (or from time `after`) on `other`, whose time then starts at 0.

        Momentum and weight decay follow; where only one of the two rates has them, the value at the seam is kept.

        Raises:
            SettingError: this rate never ends and no `after` is given, or the units differ.
        """
        if other.unit != self.unit:
            raise SettingError(
                f"a rate in {self.unit} cannot go on in {other.unit}: convert one with `counted_in`"
            )
        seam = self.length if after is None else after
        if math.isinf(seam):
            raise SettingError("this rate never ends: say when the next one begins with then(…, after=…)")
        return Rate(
            (*self.until(seam).pieces, *other.pieces),
            self.unit,
            _follow(self.momentum, other.momentum, seam),
            _follow(self.weight_decay, other.weight_decay, seam),
        )

    def until(self, end: float) -> Rate:
        """This rate cut off, or held, to last exactly until `end`."""
        pieces: list[Piece] = []
        left = end
        for piece in self.pieces:
            if left <= 0.0:
                break
            pieces.append(piece if piece.length <= left else replace(piece, length=left))
            left -= pieces[-1].length
        if left > 0.0:
            pieces.append(_hold(self.pieces[-1].last, left))
        if not pieces:
            raise SettingError(f"until({end}): a rate must last longer than 0")
        return replace(self, pieces=tuple(pieces))

    def scaled(self, factor: float) -> Rate:
        """This rate times `factor`; momentum and weight decay stay."""
        return replace(
            self,
            pieces=tuple(replace(p, start=p.start * factor, end=p.end * factor) for p in self.pieces),
        )

    def with_momentum(self, momentum: Rate | float | None) -> Rate:
        """This rate with another momentum beside it."""
        return replace(self, momentum=_as_rate(momentum, self.unit))

    def with_weight_decay(self, weight_decay: Rate | float | None) -> Rate:
        """This rate with another weight decay beside it."""
        return replace(self, weight_decay=_as_rate(weight_decay, self.unit))

    def counted_in(self, unit: str, per: float) -> Rate:
        """The same rate with time in another unit, `per` of which make one of this one's.

        >>> linear(0.1, 0.0, 30, unit="epochs").counted_in("steps", per=98).length
        2940.0
        """
        if not per > 0.0:
            raise SettingError(f"per={per} must be above 0: how many {unit} make one of {self.unit}")
        return Rate(
            tuple(replace(p, span=p.span * per, length=p.length * per) for p in self.pieces),
            unit,
            None if self.momentum is None else self.momentum.counted_in(unit, per),
            None if self.weight_decay is None else self.weight_decay.counted_in(unit, per),
        )

    # ---------------------------------------------------------------------------------------------- using

    def scheduler(
        self,
        optimizer: Optimizer,
        *,
        per_step: float | Callable[[int], float] | None = None,
        factor: Callable[[int], float] | None = None,
        relative: bool = False,
    ) -> RateScheduler:
        """The torch scheduler that gives all groups of `optimizer` this rate; see `RateScheduler`."""
        from hotloop.optim.rate_scheduler import RateScheduler

        return RateScheduler(optimizer, self, per_step=per_step, factor=factor, relative=relative)

    def plot(self, *, width: int = 72, height: int = 12) -> str:
        """The rate as a picture of characters, for a terminal."""
        from hotloop.optim.curves import draw_text

        return draw_text([self._curve(2 * width)], width=width, height=height)

    def svg(self, *, title: str = "", width: int = 640, height: int = 240) -> str:
        """The rate, and its momentum beside it, as an SVG picture; put it into a page or a file."""
        from hotloop.optim.curves import draw_svg

        parts = [self._curve(121)]
        if self.momentum is not None:
            parts.append(self.momentum._curve(121, "momentum", self._shown()))
        return draw_svg(parts, title=title, x_label=self.unit, width=width, height=height)

    def html(self, title: str = "rate") -> str:
        """A page with the picture, which needs no other file."""
        from hotloop.optim.curves import draw_page

        return draw_page(title, [self.svg(height=320)])

    def _shown(self) -> float:
        """How far a plot goes: past the end of what ends, some way into what does not."""
        ends = math.fsum(p.length for p in self.pieces if not math.isinf(p.length))
        if math.isinf(self.length):
            return ends + 10.0 * max(self.pieces[-1].span, ends / 4.0)
        return ends

    def _curve(self, points: int, name: str = "rate", until: float | None = None) -> Any:
        from hotloop.optim.curves import Curve

        end = self._shown() if until is None else until
        xs = [end * i / (points - 1) for i in range(points)]
        # the last point lies on the end itself, where the next piece or the held value would begin
        return Curve(name, tuple(xs), tuple(self(x) for x in xs))


def _hold(value: float, length: float) -> Piece:
    return Piece("constant", value, value, 1.0 if math.isinf(length) else length, length)


def _as_rate(value: Rate | float | None, unit: str) -> Rate | None:
    return value if value is None or isinstance(value, Rate) else Rate((_hold(float(value), math.inf),), unit)


def _follow(first: Rate | None, second: Rate | None, seam: float) -> Rate | None:
    if first is None and second is None:
        return None
    if first is None:
        assert second is not None
        return Rate((_hold(second(0.0), seam), *second.pieces), second.unit)
    cut = first.until(seam)
    return cut if second is None else cut.then(second)


def constant(value: float, length: float = math.inf, *, unit: str = "steps") -> Rate:
    """`value`, for ever or for `length`."""
    return Rate((_hold(value, length),), unit)


def linear(start: float, end: float, length: float, *, unit: str = "steps") -> Rate:
    """A line; from 0 up it is a warm-up (Goyal et al. 2017). torch's LinearLR has the same values."""
    return Rate((Piece("linear", start, end, length, length),), unit)


def cosine(start: float, end: float, length: float, *, unit: str = "steps") -> Rate:
    """Half a cosine wave (Loshchilov and Hutter 2017), as torch's CosineAnnealingLR up to its T_max."""
    return Rate((Piece("cosine", start, end, length, length),), unit)


def exponential(start: float, factor: float, length: float = math.inf, *, unit: str = "steps") -> Rate:
    """`start` times `factor` to the power of the time: torch's ExponentialLR. `factor` may be above 1 if it ends."""
    if factor > 1.0 and math.isinf(length):
        raise SettingError(f"an exponential that grows by {factor} needs a length")
    return Rate((Piece("exponential", start, start * factor, 1.0, length),), unit)


def inverse_sqrt(start: float, scale: float, length: float = math.inf, *, unit: str = "steps") -> Rate:
    """`start` / sqrt(1 + t / `scale`), as after the warm-up of Vaswani et al. (2017), `scale` being its length."""
    return Rate((Piece("inverse-sqrt", start, start, scale, length),), unit)


def piecewise(points: Sequence[tuple[float, float]], *, shape: str = "linear", unit: str = "steps") -> Rate:
    """Through the points (time, value) in the given shape; the first time is 0, the last value is kept.

    With shape="constant" it holds each value until the next time: a step schedule, torch's MultiStepLR.

    >>> piecewise([(0, 0.0), (5, 0.4), (24, 0.0)])(2.5)
    0.2
    >>> piecewise([(0, 0.1), (30, 0.01)], shape="constant").values(3, every=15)
    [0.1, 0.1, 0.01]

    Raises:
        SettingError: fewer than two points, a first time other than 0, or times that do not grow.
    """
    times = [float(t) for t, _ in points]
    if len(points) < 2 or times[0] != 0.0 or any(b <= a for a, b in pairwise(times)):
        raise SettingError(f"piecewise{points}: give two or more points with times that grow from 0")
    pieces = [
        Piece(shape, a, a if shape == "constant" else b, t1 - t0, t1 - t0)
        for (t0, a), (t1, b) in pairwise(points)
    ]
    if shape == "constant":
        pieces.append(_hold(points[-1][1], math.inf))
    return Rate(tuple(pieces), unit)
