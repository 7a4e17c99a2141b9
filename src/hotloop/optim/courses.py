"""Rates of whole runs, from published recipes: one-cycle, and a warm-up with what follows it."""

from __future__ import annotations

from hotloop.errors import SettingError
from hotloop.optim.rates import Piece, Rate, cosine, inverse_sqrt, linear

__all__ = ["one_cycle", "warmup_cosine", "warmup_inverse_sqrt", "warmup_linear", "warmup_stable_decay"]


def one_cycle(
    peak: float,
    length: float,
    *,
    warm: float = 0.3,
    start: float = 1 / 25,
    final: float = 1 / 25e4,
    shape: str = "cosine",
    momentum: tuple[float, float] | None = (0.95, 0.85),
    unit: str = "steps",
) -> Rate:
    """One rise to `peak` and one fall to almost nothing, momentum going the other way (Smith and Topin 2018).

    Args:
        peak: highest value.
        length: of the whole run, in `unit`.
        warm: share of it in which the rate rises.
        start, final: first and last value, as shares of `peak`.
        shape: of both parts: "cosine" or "linear".
        momentum: at the ends and at the peak; None leaves the momentum alone.

    torch's OneCycleLR(total_steps=N, pct_start=p) reaches its end with step N - 1, so its values are those of
    `one_cycle(peak, N - 1, warm=(p * N - 1) / (N - 1))`.
    """
    _check_share("warm", warm)
    up, down = length * warm, length - length * warm

    def through(a: float, b: float, c: float) -> tuple[Piece, ...]:
        return (Piece(shape, a, b, up, up), Piece(shape, b, c, down, down))

    cycle = None if momentum is None else Rate(through(momentum[0], momentum[1], momentum[0]), unit)
    return Rate(through(peak * start, peak, peak * final), unit, cycle)


def warmup_cosine(
    peak: float, length: float, *, warm: float, final: float = 0.0, unit: str = "steps"
) -> Rate:
    """A line from 0 to `peak` over `warm` (in `unit`), then half a cosine down to `final` at `length`."""
    _check_warm(warm, length)
    return linear(0.0, peak, warm, unit=unit).then(cosine(peak, final, length - warm, unit=unit))


def warmup_linear(
    peak: float, length: float, *, warm: float, final: float = 0.0, unit: str = "steps"
) -> Rate:
    """A line from 0 to `peak` over `warm` (in `unit`), then a line down to `final` at `length`."""
    _check_warm(warm, length)
    return linear(0.0, peak, warm, unit=unit).then(linear(peak, final, length - warm, unit=unit))


def warmup_inverse_sqrt(peak: float, *, warm: float, unit: str = "steps") -> Rate:
    """A line from 0 to `peak` over `warm`, then `peak` * sqrt(warm / t) for ever (Vaswani et al. 2017)."""
    return linear(0.0, peak, warm, unit=unit).then(inverse_sqrt(peak, warm, unit=unit))


def warmup_stable_decay(
    peak: float,
    length: float,
    *,
    warm: float = 0.0,
    decay: float,
    final: float = 0.0,
    shape: str = "linear",
    unit: str = "steps",
) -> Rate:
    """A line up over `warm`, `peak` held, and at the end a fall to `final` over `decay`, all in `unit`.

    A run can be made longer without starting anew: only the fall depends on where it ends (Zhai et al. 2022, Hu et
    al. 2024). `shape`: "linear", "cosine" or "1-sqrt" (Hägele et al. 2024).
    """
    hold = length - warm - decay
    if abs(hold) < 1e-9 * length:
        # 0.2 * 3 and 0.8 * 3 are a rounding error more than 3
        hold = 0.0
    if warm < 0.0 or decay <= 0.0 or hold < 0.0:
        raise SettingError(f"warm={warm} and decay={decay} must fit into length={length}, decay above 0")
    pieces: list[Piece] = []
    if warm > 0.0:
        pieces.append(Piece("linear", 0.0, peak, warm, warm))
    if hold > 0.0:
        pieces.append(Piece("constant", peak, peak, hold, hold))
    pieces.append(Piece(shape, peak, final, decay, decay))
    return Rate(tuple(pieces), unit)


def _check_share(name: str, value: float) -> None:
    if not 0.0 < value < 1.0:
        raise SettingError(f"{name}={value} is a share of the run, between 0 and 1")


def _check_warm(warm: float, length: float) -> None:
    if not 0.0 < warm < length:
        raise SettingError(f"warm={warm} must lie between 0 and length={length}")
