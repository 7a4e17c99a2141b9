"""A resident loader on real processes: one order shared, positions kept when their number changes."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.multi


def read(rank: int, world: int) -> dict[str, Any]:
    import torch

    import hotloop
    from hotloop.data import ResidentLoader

    loop = hotloop.Loop(record=False)
    x = torch.arange(19.0)
    loader = loop.prepare(ResidentLoader((x, x.long()), 4, seed=3))
    running = iter(loader)
    first = next(running)[1].tolist()
    state = loader.state_dict()
    steps = []
    for _, y in running:
        steps.append(
            (y.tolist(), loader.batch_samples, loader.global_samples, loader.is_replay, loader.at_last)
        )
    model, optimizer = loop.prepare(
        model := torch.nn.Linear(1, 1), torch.optim.SGD(model.parameters(), lr=0.1)
    )
    for x, y in loader:
        loop.backward(torch.nn.functional.mse_loss(model(x[:, None]) / 20, y[:, None].float() / 20))
        optimizer.step()
        optimizer.zero_grad()
    return {"first": first, "state": state, "steps": steps, "weight": model.weight.item()}


def test_two_processes_share_one_order(run_ranks: Any) -> None:
    import torch

    from hotloop.data import ResidentLoader
    from hotloop.data.resident import permutation

    found = run_ranks(2, read)
    order = permutation(19, 3, 0, torch.device("cpu")).tolist()
    assert [r["first"] for r in found] == [order[:4], order[4:8]]
    (a, b) = (r["steps"] for r in found)
    assert [s[0] for s in a] == [order[8:12], order[16:19]]
    assert b[0][0] == order[12:16]
    assert a[1][1:] == (3, 3, False, True)
    assert b[1][1:] == (0, 3, True, True)
    assert a[0][4] is b[0][4] is False
    assert found[0]["weight"] == found[1]["weight"]
    alone = ResidentLoader((torch.arange(19.0), torch.arange(19)), 4, seed=3)
    alone.load_state_dict({"version": 1, "epoch": 0, "samples": found[0]["state"]["samples"], "seed": 3})
    assert torch.cat([y for _, y in alone]).tolist() == order[8:]
