"""Compiled forwards on the CPU: the same losses, and the module is the user's again between the calls."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hotloop

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def test_compiled_forwards_train_as_eager_ones():
    from torch._dynamo.utils import counters

    losses = {}
    counters.clear()
    for mode in ("off", "compile"):
        torch.manual_seed(0)
        loop = hotloop.Loop(record=False, device="cpu")
        model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer = loop.prepare(model, optimizer)

        @loop.capture(mode=mode)
        def step(x, y, loop=loop, model=model, optimizer=optimizer):
            loss = F.mse_loss(model(x), y)
            loop.backward(loss)
            loop.update(optimizer, max_norm=1.0)
            return loss

        generator = torch.Generator().manual_seed(1)
        rows = []
        for _ in range(12):
            x = torch.randn(16, 8, generator=generator)
            rows.append(step(x, x[:, :1]).item())
        losses[mode] = rows
        assert model._compiled_call_impl is None
    # nn.Sequential is torch's own code, in which torch.compile does not begin by itself
    assert counters["stats"]["unique_graphs"] >= 1
    assert losses["compile"] == pytest.approx(losses["off"], rel=1e-5)
