"""16-bit weights over several processes: masters that begin and stay alike, and a run that learns as fp32 does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.multi
RunRanks = Callable[..., list[Any]]


def _train(rank: int) -> Any:
    import torch

    import hotloop
    from hotloop.optim import masters_of

    found = []
    for precision in ("bf16-true", "bf16"):
        torch.manual_seed(rank)  # ranks differ: the model of rank 0 has to reach the others
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loop = hotloop.Loop(precision, device="cpu", record=False)
        x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
        loader = torch.utils.data.DataLoader(x, batch_size=8)
        model, optimizer, loader = loop.prepare(model, optimizer, loader)
        pairs = masters_of(optimizer)
        begun = [] if pairs is None else [m.clone() for m in pairs.tensors()]
        losses = []
        for _ in loop.epochs(2):
            for batch in loader:
                loss = (model(batch) - batch[:, :4]).square().mean()
                loop.backward(loss)
                loop.update(optimizer, max_norm=1.0)
                losses.append(loss.item())
        loop.end_training()
        masters = [] if pairs is None else [m.clone() for m in pairs.tensors()]
        found.append((losses, begun, masters, [p.detach() for p in model.parameters()]))
    return found


def test_masters_are_alike_on_all_ranks(run_ranks: RunRanks) -> None:
    first, second = run_ranks(2, _train)
    (losses, begun, masters, weights), (right, _, _, full) = first
    assert len(masters) == 4
    for mine, others in ((begun, second[0][1]), (masters, second[0][2]), (weights, second[0][3])):
        assert all(torch.equal(a, b) for a, b in zip(mine, others, strict=True))
    # begun at rank 0's numbers before they were rounded
    torch.manual_seed(0)
    assert torch.equal(begun[0], torch.nn.Linear(8, 16).weight.detach())
    assert losses[-1] < losses[0]
    # gradients are summed in bf16: one more rounding than autocast's
    assert max(abs(a - b) for a, b in zip(losses, right, strict=True)) < 0.02
    for mine, other in zip(weights, full, strict=True):
        assert (mine.float() - other).norm() / other.norm() < 0.02
