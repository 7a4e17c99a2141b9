"""What has no C form of its own is taken apart; results are PyTorch's (every build checks itself against float64)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hotloop import native

torch.set_num_threads(1)


class Cells(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.cell = kind(5, 8)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(x.shape[0], 8)
        memory = torch.zeros(x.shape[0], 8)
        for t in range(x.shape[1]):
            if isinstance(self.cell, nn.LSTMCell):
                state, memory = self.cell(x[:, t], (state, memory))
            else:
                state = self.cell(x[:, t], state)
        return state


class Function(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *x: Tensor) -> Tensor:
        return self.function(*x)


class Gate(nn.Module):
    """Squeeze and excitation: one number for each channel multiplies the picture."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.gate = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        weight = torch.sigmoid(self.gate(F.adaptive_avg_pool2d(x, 1).flatten(1)))
        return x * weight[:, :, None, None]


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "GRUCell": (lambda: Cells(nn.GRUCell), (2, 4, 5)),
    "LSTMCell": (lambda: Cells(nn.LSTMCell), (1, 4, 5)),
    "RNNCell": (lambda: Cells(nn.RNNCell), (1, 4, 5)),
    "logsumexp": (lambda: Function(lambda x: torch.logsumexp(x, 1)), (3, 7)),
    "transposed conv1d": (lambda: nn.ConvTranspose1d(4, 6, 4, stride=2, padding=1), (1, 4, 9)),
    "transposed conv, holes": (
        lambda: nn.ConvTranspose1d(4, 6, 3, stride=3, padding=2, output_padding=1, dilation=2, groups=2),
        (2, 4, 5),
    ),
    "transposed conv2d": (lambda: nn.ConvTranspose2d(3, 4, 3, stride=2, output_padding=1), (1, 3, 4, 5)),
    "gate over a picture": (Gate, (1, 3, 6, 6)),
}


@pytest.mark.parametrize("name", MODELS)
def test_taken_apart(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model = make().eval()
    x = torch.randn(shape)
    compiled = native.build(model, x, out=tmp_path / "taken.so", quiet=True)
    with torch.no_grad():
        wanted = (
            model.double()(x.double()).numpy() if name[1:4] not in ("RUC", "STM", "NNC") else model(x).numpy()
        )
    np.testing.assert_allclose(np.asarray(compiled(x.numpy())), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("dim", "keep"), [(1, False), (0, True), (-1, True)])
def test_where_the_largest_is(dim: int, keep: bool, tmp_path: Path) -> None:
    x = torch.randn(4, 9)
    for function in (torch.argmax, torch.argmin):
        model = Function(lambda x, f=function: f(x, dim, keepdim=keep) * 1.0)
        compiled = native.build(model, x, out=tmp_path / f"{function.__name__}{dim}.so", quiet=True)
        assert np.array_equal(np.asarray(compiled(x.numpy())), function(x, dim, keepdim=keep).numpy())


def test_bags_of_one_length(tmp_path: Path) -> None:
    bag = nn.EmbeddingBag(20, 4, mode="mean")
    rows = torch.randint(0, 20, (2, 3))
    compiled = native.build(bag, rows, out=tmp_path / "bag.so", quiet=True)
    np.testing.assert_allclose(np.asarray(compiled(rows.numpy())), bag(rows).detach().numpy(), rtol=1e-6)


def test_what_cannot_be_taken_apart_is_named(tmp_path: Path) -> None:
    model = Function(lambda x: torch.topk(x, 3).values)
    with pytest.raises(native.UnsupportedOpError, match="topk"):
        native.build(model, torch.randn(1, 9), out=tmp_path / "top.so", quiet=True)
