"""A range test with several processes: all see the same curve, end together, and go on as if it had not been."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.multi


def find_and_train(rank: int) -> dict[str, Any]:
    import torch
    import torch.nn.functional as F
    from torch.utils.data import DataLoader, TensorDataset

    import hotloop
    from hotloop import optim

    answer: dict[str, Any] = {}
    for tested in (False, True):
        loop = hotloop.Loop(device="cpu", record=False, seed=0)
        torch.manual_seed(0)
        x = torch.randn(64, 4)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True)
        model, optimizer, loader = loop.prepare(model, optimizer, loader)
        if tested:
            found = optim.find_rate(
                loop, model, optimizer, loader, F.mse_loss, low=1e-4, high=100.0, steps=40
            )
            answer["found"] = found.as_dict()
        for _ in range(2):
            for a, b in loader:
                loss = F.mse_loss(model(a), b)
                loop.backward(loss)
                loop.update(optimizer)
        answer[tested] = [p.detach().clone() for p in model.parameters()]
        loop.end_training()
    return answer


def test_ranks_end_together_and_nothing_is_left(run_ranks: Any) -> None:
    import torch

    first, second = run_ranks(2, find_and_train, env={"HOTLOOP_PROGRESS": "0"})
    assert first["found"] == second["found"]
    assert first["found"]["diverged"] is not None
    assert len(first["found"]["losses"]) < 40
    for answer in (first, second):
        assert all(map(torch.equal, answer[True], answer[False]))
        assert all(map(torch.equal, answer[True], first[True]))
