"""The band that seeds alone give, and the test of whether a run stays in it.

A run is cut into blocks of steps, and each block's mean of a logged value is compared with that of the reference run
of the same seed. What two seeds differ by is the unit: sqrt(2) times the standard deviation over the reference seeds,
pooled over neighbouring blocks, widened as Student's t asks for so few runs, and never less than what the number format
rounds. A block whose difference is z units adds log cosh(3 z) - 9/2 to a sum that never falls below 0 (the CUSUM of
Page, 1954, "Continuous inspection schemes", for a shift of 3 units to either side). The run has left the band where
the sum reaches log(J / 0.01), J the number of blocks: by Ville's inequality a run that differs from the reference as
another seed does is rejected with a probability of at most 1 %. An honest change differs by less, having the same seed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hotloop.tune.student import t_quantile

__all__ = ["ERROR", "SHIFT", "Band", "Cusum", "block_means", "make_band"]

SHIFT = 3.0
ERROR = 0.01
_NEIGHBOURS = 2

Floats = npt.NDArray[np.float64]


def block_means(series: Mapping[int, float], blocks: Sequence[tuple[int, int]]) -> Floats:
    """[blocks] means of the values whose step lies in each (first, last) block; NaN where there are none."""
    steps = np.array(sorted(series), dtype=np.int64)
    values = np.array([series[int(s)] for s in steps], dtype=np.float64)
    means = np.full(len(blocks), np.nan)
    for i, (first, last) in enumerate(blocks):
        inside = values[(steps >= first) & (steps <= last)]
        if len(inside):
            means[i] = inside.mean()
    return means


@dataclass
class Band:
    """What reference runs give for one logged value.

    Attributes:
        blocks: (first, last) steps. same: [blocks] the reference run with the seed that is compared with.
        seeds: [runs, blocks] all of them. unit: [blocks] what two seeds differ by.
    """

    blocks: list[tuple[int, int]]
    same: Floats
    seeds: Floats
    unit: Floats

    @property
    def limit(self) -> float:
        """Where the sum means that the band was left."""
        return math.log(max(int(np.isfinite(self.same).sum()), 1) / ERROR)


def make_band(
    runs: Sequence[Mapping[int, float]], blocks: Sequence[tuple[int, int]], rounding: float
) -> Band:
    """The band of one value.

    Args:
        runs: step -> value, for each reference seed; the first is the one that is compared with.
        rounding: relative difference that the number format alone may make.
    """
    seeds = np.stack([block_means(run, blocks) for run in runs])
    count = len(runs)
    with np.errstate(invalid="ignore"):
        variance = seeds.var(axis=0, ddof=1) if count > 1 else np.zeros(len(blocks))
    pooled = variance.copy()
    freedom = np.full(len(blocks), float(max(count - 1, 1)))
    for i in range(len(blocks)):
        near = variance[max(i - _NEIGHBOURS, 0) : i + _NEIGHBOURS + 1]
        near = near[np.isfinite(near)]
        if len(near):
            pooled[i] = near.mean()
            # neighbouring blocks of one run are alike: half of them count as further evidence
            freedom[i] = max(count - 1, 1) * (1 + (len(near) - 1) / 2)
    wide = {f: t_quantile(0.975, f) / t_quantile(0.975, 1e6) for f in set(freedom.tolist())}
    widen = np.array([wide[f] for f in freedom.tolist()])
    # a metric that counts, such as an accuracy, moves in grains: two of them are no difference
    grains = np.diff(np.unique(seeds[np.isfinite(seeds)]))
    grain = 2 * float(grains.min()) if len(grains) else 0.0
    floor = np.maximum(rounding * np.abs(seeds[0]), max(grain, 1e-12))
    unit = np.maximum(np.sqrt(2 * np.nan_to_num(pooled)) * widen, floor)
    return Band(list(blocks), seeds[0], seeds, unit)


class Cusum:
    """The sequential test of one run against a band.

    Args:
        rounding: relative difference that the run's number format may make.

    Attributes:
        unit: [blocks] as the band's, or wider by the format. total: the sum so far. seen: blocks judged.
        left_at: the first step of the stretch in which it left the band; None while inside.
    """

    def __init__(self, band: Band, rounding: float = 0.0) -> None:
        self.band = band
        self.unit = np.maximum(band.unit, rounding * np.abs(band.same))
        self.total = 0.0
        self.left_at: int | None = None
        self.seen = 0
        self._since = 0

    def add(self, block: int, mean: float) -> bool:
        """Judge a block's mean; True once the band was left."""
        if not math.isfinite(self.band.same[block]):
            return self.left_at is not None
        self.seen += 1
        if self.total == 0.0:
            self._since = self.band.blocks[block][0]
        if math.isfinite(mean):
            z = SHIFT * abs(mean - self.band.same[block]) / self.unit[block]
            # log cosh z, without overflow
            self.total = max(0.0, self.total + z + math.log1p(math.exp(-2 * z)) - math.log(2) - SHIFT**2 / 2)
        else:
            self.total = math.inf
            self._since = self.band.blocks[block][0]
        if self.left_at is None and self.total >= self.band.limit:
            self.left_at = self._since
        return self.left_at is not None
