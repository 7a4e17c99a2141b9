from __future__ import annotations

import numpy as np

from hotloop.doctor.trace.intervals import Spans


def brute(start: np.ndarray, end: np.ndarray, size: int) -> np.ndarray:
    covered = np.zeros(size, dtype=bool)
    for a, b in zip(start, end, strict=True):
        covered[a:b] = True
    return covered


def test_against_counting_every_moment() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        start = rng.integers(0, 90, size=rng.integers(0, 12))
        end = start + rng.integers(0, 15, size=len(start))
        covered = brute(start, end, 120)
        spans = Spans(start, end)
        assert spans.total == covered.sum()
        a = rng.integers(0, 110, size=20)
        b = rng.integers(0, 110, size=20)
        expected = [covered[x:y].sum() if y > x else 0 for x, y in zip(a, b, strict=True)]
        np.testing.assert_allclose(spans.within(a, b), expected)
        assert spans.clipped(20, 70).total == covered[20:70].sum()
        assert spans.gaps(20, 70).total == 50 - covered[20:70].sum()
        other = rng.integers(0, 90, size=5)
        both = covered | brute(other, other + 7, 120)
        assert spans.joined(Spans(other, other + 7)).total == both.sum()


def test_the_empty_set() -> None:
    assert Spans().total == 0
    assert Spans().gaps(0, 5).total == 5
    assert Spans().within([0.0], [9.0]).tolist() == [0.0]
