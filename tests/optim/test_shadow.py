"""A schedule run ahead: torch's own values, while the user's scheduler and optimizer stay where they are."""

import copy

import pytest
import torch
from torch.optim import lr_scheduler

from hotloop.optim import ShadowSchedule, is_metric_driven, one_cycle


def make(**options):
    p, q = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    return torch.optim.SGD([{"params": [p]}, {"params": [q], "lr": 0.5}], lr=0.1, momentum=0.9, **options)


SCHEDULERS = [
    lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=8),
    lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 3), lr_scheduler.StepLR(o, 2, 0.5)], [3]
    ),
    lambda o: lr_scheduler.LambdaLR(o, lambda k: 1 / (k + 1)),
]


@pytest.mark.parametrize("build", SCHEDULERS)
@pytest.mark.parametrize("begun", [0, 3])
def test_rows_are_what_torch_will_give(build, begun):
    optimizer = make()
    scheduler = build(optimizer)
    for _ in range(begun):
        optimizer.step()
        scheduler.step()
    before = copy.deepcopy((scheduler.state_dict(), optimizer.state_dict()["param_groups"]))
    shadow = ShadowSchedule(scheduler)
    shadow.run_to(5)
    assert (scheduler.state_dict(), optimizer.state_dict()["param_groups"]) == before
    for row in range(5):
        assert shadow.rows[row] == [float(group["lr"]) for group in optimizer.param_groups]
        for group, others in zip(optimizer.param_groups, shadow.others(row), strict=True):
            assert others["momentum"] == group["momentum"]
        optimizer.step()
        scheduler.step()


def test_past_its_end_it_keeps_the_last_value():
    optimizer = make()
    shadow = ShadowSchedule(lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=4))
    shadow.run_to(9)
    assert len(shadow.rows) == 9
    assert shadow.rows[4:] == [shadow.rows[-1]] * 5
    assert shadow.cycles_others


def test_a_rate_that_is_a_tensor_is_left_alone():
    p = torch.nn.Parameter(torch.ones(1))
    rate = torch.tensor(0.1)
    optimizer = torch.optim.SGD([p], lr=rate)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    shadow = ShadowSchedule(scheduler)
    shadow.run_to(3)
    assert [row[0] for row in shadow.rows] == pytest.approx([0.1, 0.05, 0.025])
    assert optimizer.param_groups[0]["lr"].item() == pytest.approx(0.1)
    assert not shadow.cycles_others


def test_only_plateaus_wait_for_a_metric():
    optimizer = make()
    assert is_metric_driven(lr_scheduler.ReduceLROnPlateau(optimizer))
    assert not is_metric_driven(lr_scheduler.StepLR(optimizer, 1))


@pytest.mark.parametrize("ours", [True, False])
def test_a_part_that_begins_late_says_what_it_will_move(ours):
    """A table has its columns before the rows are known in which they change."""
    optimizer = make()

    def cycle(optimizer):
        if ours:
            return one_cycle(0.5, 10).scheduler(optimizer)
        return lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=11)

    parts = [lr_scheduler.ConstantLR(optimizer, 1.0, 1), cycle(optimizer)]
    shadow = ShadowSchedule(lr_scheduler.SequentialLR(optimizer, parts, [5000]))
    shadow.run_to(20)
    assert shadow.moving == {"momentum"}
    shadow.run_to(5006)
    momenta = {shadow.others(row)[0]["momentum"] for row in range(5000, 5006)}
    assert len(momenta) > 2
