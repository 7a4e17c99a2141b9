"""What is read of optimizers and layers."""

from __future__ import annotations

import torch
from torch import nn

from hotloop.tune.constants import read_layers, read_optimizers


def test_every_group_is_read_and_how_a_step_is_computed_is_not() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    groups = [
        {"params": first.parameters(), "weight_decay": 0.1},
        {"params": second.parameters(), "lr": torch.tensor(0.5)},
    ]
    found = read_optimizers(
        [torch.optim.AdamW(groups, lr=0.1, betas=(0.8, 0.9), weight_decay=0.0, fused=True)]
    )
    assert found["weight_decay"] == 0.1
    assert found["weight_decay of group 2"] == 0.0
    assert found["lr of group 2"] == 0.5
    assert (found["betas[0]"], found["betas[1]"]) == (0.8, 0.9)
    assert not any(name.startswith(("fused", "foreach", "params")) for name in found)
    other = read_optimizers([torch.optim.SGD(first.parameters(), lr=1.0)] * 2)
    assert other["momentum of optimizer 2"] == 0.0


def test_layers_are_read_by_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.25), nn.BatchNorm1d(2, eps=1e-4))
    assert read_layers([model]) == {"p of 1": 0.25, "eps of 2": 1e-4, "momentum of 2": 0.1}
