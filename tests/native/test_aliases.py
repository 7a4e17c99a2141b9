"""Writes in place, in every shape that models write them, and state that a module keeps for itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hotloop import native
from hotloop.native.capture import Captured
from hotloop.native.record import record_model

torch.set_num_threads(1)


class Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def _through_a_view(x: Tensor) -> Tensor:
    y = x * 1.0
    y.view(2, 12).mul_(2)
    return y


def _seen_by_a_view(x: Tensor) -> Tensor:
    y = x.clone()
    z = y.view(-1)
    y.add_(1)
    return z


def _columns(x: Tensor) -> Tensor:
    y = torch.zeros(3, 8, dtype=x.dtype)
    y[:, 1:] = x[:, :-1]
    y[:, ::3] += 2
    y[:, 0] = 7
    y[x > 1] = 0
    return y + x


def _recurrence(x: Tensor) -> Tensor:
    out = torch.zeros(3, 8, dtype=x.dtype)
    for t in range(8):
        out[:, t] = x[:, t] + (0.5 * out[:, t - 1] if t else 0)
    return out


def _the_input(x: Tensor) -> Tensor:
    x += 1
    x.t().mul_(3)
    return x * 2


@pytest.mark.parametrize("function", [_through_a_view, _seen_by_a_view, _columns, _recurrence, _the_input])
def test_writes_are_seen_by_whoever_looks(function: Callable[[Tensor], Tensor], tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 8)
    compiled = native.build(Function(function), x, out=tmp_path / "written.so", quiet=True)
    wanted = function(x.double()).numpy()
    np.testing.assert_allclose(np.asarray(compiled(x.numpy())), wanted, rtol=1e-6, atol=1e-6)


def test_a_recorded_write_that_another_shows_is_refused() -> None:
    from hotloop.native.normalise import normalise

    captured: Captured = record_model(
        Function(_seen_by_a_view), [torch.randn(3, 8)], because=RuntimeError("a test")
    )
    with pytest.raises(native.UnsupportedOpError, match="writes into a tensor that another one looks at"):
        normalise(captured)


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(1, 4))
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.state.copy_(torch.tanh(self.linear(x) + self.state))
        return self.state * 2


def test_state_in_a_buffer_is_named(tmp_path: Path) -> None:
    with pytest.raises(native.StatefulError, match="'state'"):
        native.build(Stateful(), torch.randn(1, 4), out=tmp_path / "stateful.so", quiet=True)
