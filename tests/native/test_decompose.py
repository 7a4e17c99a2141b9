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
    "sum of all": (lambda: Function(torch.sum), (3, 7)),
    "no rows": (lambda: Function(lambda x: torch.cat([x[:0] * 2, x])), (3, 7)),
    "whole numbers": (lambda: Function(lambda x: (x * 10).long().float() + x.bool()), (3, 7)),
    "circular padding": (lambda: Function(lambda x: F.pad(x, (2, 1), mode="circular")), (1, 2, 7)),
    "einsum of three": (lambda: Function(lambda x: torch.einsum("ij,kj,lj->ikl", x, x, x)), (3, 4)),
    "einsum, dots": (lambda: Function(lambda x: torch.einsum("...ij,...kj->...ik", x, x)), (2, 3, 4)),
    "einsum, diagonal": (lambda: Function(lambda x: torch.einsum("ii->i", x)), (4, 4)),
    "einsum, one alone": (lambda: Function(lambda x: torch.einsum("ij,kl->il", x, x)), (3, 3)),
    "largest and where": (lambda: Function(lambda x: x.max(1).values + x.max(1).indices), (3, 9)),
    "topk": (lambda: Function(lambda x: x.topk(4, 1).values * (x.topk(4, 1).indices + 1)), (3, 9)),
    "smallest": (lambda: Function(lambda x: x.topk(2, 0, largest=False)[0]), (5, 3)),
    "sort": (lambda: Function(lambda x: x.sort(1, descending=True)[0]), (2, 3, 5)),
    "quantile": (lambda: Function(lambda x: torch.quantile(x, 0.3, 1)), (3, 9)),
    "median": (lambda: Function(lambda x: x.median(1)[0] + x.median()), (3, 8)),
    "kth": (lambda: Function(lambda x: x.kthvalue(3, 1)[0]), (3, 8)),
    "running extremes": (lambda: Function(lambda x: x.cummax(1)[0] + x.cummin(1)[1]), (3, 8)),
    "by computed index": (lambda: Function(lambda x: x[torch.arange(3), x[..., 0].argmax(1)]), (3, 5, 2)),
    "along dimension 1": (lambda: Function(lambda x: x[:, x.argmax(1)]), (4, 5)),
    "apart": (lambda: Function(lambda x: x[:, [0, 1, 1], :, [2, 0, 3]]), (2, 3, 2, 4)),
    "gather": (lambda: Function(lambda x: x.gather(1, x.argsort(1)[:, :2])), (3, 6)),
    "take along": (lambda: Function(lambda x: torch.take_along_dim(x, x.argmax(1, keepdim=True), 1)), (3, 6)),
    "scatter": (
        lambda: Function(lambda x: torch.zeros_like(x).scatter(1, x.argsort(1)[:, :3], x[:, :3] + 1.0)),
        (3, 6),
    ),
    "scatter add": (
        lambda: Function(lambda x: x.scatter_add(1, (x > 0).long(), x * 2)),
        (3, 6),
    ),
    "mean and variance": (
        lambda: Function(lambda x: sum(torch.var_mean(x, 1)) + torch.std_mean(x, 1)[0]),
        (3, 6),
    ),
    "norms": (lambda: Function(lambda x: x.norm(1, 1) + x.norm(float("inf"), 1) + x.norm(3, 1)), (3, 6)),
    "distances": (lambda: Function(lambda x: torch.cdist(x, x + 1)), (4, 3)),
    "diagonals": (lambda: Function(lambda x: x.diagonal(1) + x.diagonal(-1)), (5, 5)),
    "pictures": (
        lambda: Function(lambda x: F.interpolate(F.adaptive_max_pool2d(x, 3), size=5, mode="bilinear")),
        (1, 2, 7, 6),
    ),
    "angles": (lambda: Function(lambda x: x.atan() + torch.atan2(x, x.flip(1)) + torch.tan(x / 4)), (3, 7)),
    "arcs": (lambda: Function(lambda x: torch.asin(x.sin() * 0.9) + torch.acos(x.cos() * 0.9)), (3, 7)),
    "hyperbolic": (
        lambda: Function(
            lambda x: x.sinh() + x.cosh() + x.asinh() + (x.abs() + 2).acosh() + (x.sin() / 2).atanh()
        ),
        (3, 7),
    ),
    "powers": (
        lambda: Function(lambda x: 2.0**x + 0.7**x + x.exp2() + x.abs().log2() + x.abs().log10()),
        (3, 7),
    ),
    "remainders": (
        lambda: Function(lambda x: torch.fmod(x, 0.3) + x.round(decimals=1) + x.prod(1, True)),
        (3, 7),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_taken_apart(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model = make().eval()
    x = torch.randn(shape)
    compiled = native.build(model, x, out=tmp_path / "taken.so", quiet=True)
    with torch.no_grad():
        # `Cells` makes its first state in float32
        wanted = (model(x) if isinstance(model, Cells) else model.double()(x.double())).numpy()
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
    wanted = bag(rows).detach().numpy()
    np.testing.assert_allclose(np.asarray(compiled(rows.numpy())), wanted, rtol=1e-6, atol=1e-6)


def test_what_cannot_be_taken_apart_is_named(tmp_path: Path) -> None:
    with pytest.raises(native.UnsupportedOpError, match="linalg_inv"):
        native.build(Function(torch.linalg.inv), torch.randn(4, 4), out=tmp_path / "inverse.so", quiet=True)
    model = Function(lambda x: torch.topk(x, 3).values)
    with pytest.raises(native.UnsupportedOpError, match=r"topk .*test_decompose.*compares all pairs"):
        native.build(model, torch.randn(8, 2000), out=tmp_path / "top.so", quiet=True)
