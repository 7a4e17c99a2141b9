from __future__ import annotations

import math
from typing import Any

import pytest

pytestmark = pytest.mark.multi


def read_over_ranks(rank: int, world: int) -> dict[str, Any]:
    import torch

    from hotloop.hardware.processes import find_processes
    from hotloop.metrics import Means

    processes = find_processes("cpu")
    means = Means(torch.device("cpu"), processes)
    answer: dict[str, Any] = {}
    # ranks have different numbers of samples
    values = torch.arange(10.0)[rank::world] if rank else torch.arange(100.0)
    means.add("all", values)
    answer["all"] = means.read("all")
    # sums whose float64 value depends on the order of the ranks
    means.add("exact", (1e16, 1.0, -1e16)[rank])
    answer["exact"] = means.read("exact")
    if rank == 1:
        means.add("lonely", 4.0, 3)
    answer["names"] = means.names()
    answer["lonely"] = means.read("lonely")
    answer["unknown"] = means.read("unknown")
    means.add("dry", torch.tensor(float("nan")) if rank == 2 else torch.tensor(2.0), 0 if rank == 2 else 1)
    answer["dry"] = means.read("dry")
    try:
        means.read("this" if rank else "that")
    except Exception as error:
        answer["error"] = f"{type(error).__name__}: {error}"
    return answer


def test_means_are_the_same_and_exact_on_every_rank(run_ranks: Any) -> None:
    answers = run_ranks(3, read_over_ranks)
    samples = [float(i) for i in range(100)] + [1.0, 4.0, 7.0] + [2.0, 5.0, 8.0]
    for rank, answer in enumerate(answers):
        assert answer["all"] == math.fsum(samples) / len(samples)
        assert answer["exact"] == 1 / 3
        assert answer["lonely"] == 4.0
        assert answer["names"] == (["lonely"] if rank == 1 else [])
        assert math.isnan(answer["unknown"])
        assert answer["dry"] == 2.0
        assert answer["error"].startswith("ProcessError: rank")
