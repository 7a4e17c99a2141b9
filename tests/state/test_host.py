"""The step's state on the host: finite or not, in one pass that also multiplies."""

import pytest
import torch

from hotloop.state import HostState


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_losses(value):
    state = HostState("stop")
    state.note_loss(torch.tensor(1.0))
    assert state.losses_finite()
    state.note_loss(torch.tensor([[value]]))
    assert not state.losses_finite()
    state.close_losses()
    assert state.losses_finite()


def test_a_loss_of_several_elements():
    state = HostState("stop")
    state.note_loss(torch.tensor([1.0, float("nan")]))
    assert not state.losses_finite()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_gradients_are_multiplied_and_judged(dtype, factor):
    state = HostState("skip")
    gradients = [torch.full((n,), 2.0, dtype=dtype) for n in (1, 40)]
    assert state.judge(gradients, factor)
    assert all((g == 2.0 * factor).all() for g in gradients)
    gradients[1][7] = float("inf")
    assert not state.judge(gradients, factor)
    gradients[1][7] = 1.0
    assert state.judge(gradients, factor)
    assert state.judge([], factor)


@pytest.mark.parametrize(("nonfinite", "watching"), [("stop", True), ("skip", True), ("ignore", False)])
def test_what_watches(nonfinite, watching):
    assert HostState(nonfinite).watching is watching
