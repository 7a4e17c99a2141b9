from __future__ import annotations

import io

import pytest
import torch

from hotloop import doctor


def test_a_block_is_recorded_and_told() -> None:
    torch.set_num_threads(1)
    model = torch.nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(4, 8)).square().mean().backward()
        optimizer.step()

    step()
    page = io.StringIO()
    with doctor.window(stacks=False, file=page) as window:
        for _ in range(6):
            step()
    assert window.trace is not None
    assert window.trace.timeline.steps >= 2
    assert window.trace.findings() == []
    assert "No device took part" in page.getvalue()
    # the hook is gone with the block
    step()


def test_an_error_inside_comes_out_as_it_is() -> None:
    page = io.StringIO()
    with pytest.raises(KeyError, match="mine"), doctor.window(stacks=False, file=page):
        raise KeyError("mine")
    assert page.getvalue() == ""
