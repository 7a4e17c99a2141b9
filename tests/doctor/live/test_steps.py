from __future__ import annotations

import torch

from hotloop.doctor.live.steps import StepMarks
from hotloop.stalls import LISTENERS, mark_step


def make() -> torch.optim.Optimizer:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    return torch.optim.SGD([weight], lr=0.1)


def test_the_first_optimizer_counts() -> None:
    seen: list[int] = []
    first, second = make(), make()
    with StepMarks(lambda: seen.append(1)):
        for _ in range(3):
            first.step()
            second.step()
    first.step()
    assert len(seen) == 3
    assert LISTENERS == []


def test_a_loops_marks_take_over_and_no_step_counts_twice() -> None:
    seen: list[int] = []
    optimizer, other = make(), make()
    with StepMarks(lambda: seen.append(1)):
        optimizer.step()  # by Python, then marked
        mark_step(optimizer)
        optimizer.step()
        mark_step(optimizer)
        mark_step(optimizer)  # replayed
        mark_step(other)
        mark_step(optimizer)
    assert len(seen) == 4


def test_a_watch_that_comes_when_steps_are_replayed_already() -> None:
    seen: list[int] = []
    optimizer = make()
    with StepMarks(lambda: seen.append(1)):
        mark_step(optimizer)
        mark_step(optimizer)
    assert len(seen) == 2
