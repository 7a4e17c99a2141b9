"""Every operation with a C form against PyTorch in float64, many to a library."""

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


class Several(nn.Module):
    """Several functions of one input, as several outputs."""

    def __init__(self, functions: list[Callable[[Tensor], Tensor]]) -> None:
        super().__init__()
        self.functions = functions

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(function(x) for function in self.functions)


def agree(
    functions: list[Callable[[Tensor], Tensor]],
    x: Tensor,
    folder: Path,
    *,
    bound: float = 2e-6,
    target: str = "native",
) -> None:
    model = Several(functions)
    compiled = native.build(model, x, out=folder / "ops.so", check=False, quiet=True, target=target)
    outputs = compiled(x.numpy())
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    wanted = model(x.double() if x.is_floating_point() else x)
    for index, (y, reference) in enumerate(zip(outputs, wanted, strict=True)):
        reference = reference.double().numpy()
        assert y.shape == reference.shape, f"function {index}"
        scale = np.maximum(np.abs(reference), 1e-3 * np.abs(reference).max(initial=1e-30))
        error = np.abs(y - reference) / scale
        assert error.max(initial=0.0) <= bound, f"function {index}: {error.max():.2e}"


SMOOTH: list[Callable[[Tensor], Tensor]] = [
    torch.exp,
    torch.expm1,
    torch.tanh,
    torch.sigmoid,
    F.silu,
    F.gelu,
    lambda x: F.gelu(x, approximate="tanh"),
    F.softplus,
    F.elu,
    F.selu,
    F.mish,
    torch.erf,
    F.logsigmoid,
    torch.sin,
    torch.cos,
]
POSITIVE: list[Callable[[Tensor], Tensor]] = [
    torch.log,
    torch.log1p,
    torch.sqrt,
    torch.rsqrt,
    torch.reciprocal,
    lambda x: x**1.7,
    lambda x: x**3,
    lambda x: x**-0.5,
    lambda x: torch.pow(x, x * 0.3),
    lambda x: (x - 1.5) ** 4,
]
PIECEWISE: list[Callable[[Tensor], Tensor]] = [
    F.relu,
    F.leaky_relu,
    F.relu6,
    F.hardtanh,
    F.hardswish,
    F.hardsigmoid,
    torch.abs,
    torch.sign,
    torch.floor,
    torch.ceil,
    torch.round,
    torch.trunc,
    lambda x: torch.clamp(x, -0.3, 0.7),
    lambda x: torch.where(x > 0.1, x, -x * 2),
    lambda x: x.masked_fill(x < 0, 5.0),
    lambda x: torch.remainder(x, 0.4),
]
BINARY: list[Callable[[Tensor], Tensor]] = [
    lambda x: x + x[:1],
    lambda x: 2 - x * 3,
    lambda x: x / (x.abs() + 1),
    lambda x: torch.maximum(x, x.flip(1)),
    lambda x: torch.minimum(x, torch.tensor(0.2)),
    lambda x: torch.add(x, x[:, :1], alpha=3),
    lambda x: ((x > 0) & (x < 1)).float(),
    lambda x: ((x > 0) | ~(x < 1)).float(),
    lambda x: torch.addcmul(x, x, x[:, 1:2], value=0.5),
    lambda x: torch.lerp(x, x.flip(0), 0.3),
    lambda x: (x == x.flip(0)).float() + (x != 0).float(),
    lambda x: F.glu(torch.cat([x, x.flip(1)], 1), dim=1),
    lambda x: torch.div(x, 0.3, rounding_mode="floor"),
]


@pytest.mark.parametrize(
    ("functions", "shift", "scale", "bound"),
    [
        (SMOOTH, 0.0, 3.0, 3e-6),
        (POSITIVE, 2.0, 0.3, 3e-6),
        (PIECEWISE, 0.0, 1.0, 4e-6),
        (BINARY, 0.0, 1.0, 2e-6),
    ],
    ids=["smooth", "positive", "piecewise", "binary"],
)
def test_elementwise(
    functions: list[Callable[[Tensor], Tensor]], shift: float, scale: float, bound: float, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    agree(functions, torch.randn(5, 37) * scale + shift, tmp_path, bound=bound)


@pytest.mark.parametrize("target", ["avx2", "generic"])
def test_other_targets_compute_the_same(target: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    weight = torch.randn(40, 21) * 0.2
    functions = [torch.exp, torch.tanh, torch.sigmoid, F.gelu, torch.round, torch.floor, torch.trunc]
    functions += [lambda x: F.linear(x, weight.to(x.dtype)), lambda x: F.softmax(x, -1)]
    agree(functions, torch.randn(4, 21), tmp_path, bound=5e-5, target=target)


def test_layout(tmp_path: Path) -> None:
    torch.manual_seed(0)
    agree(
        [
            lambda x: x.permute(2, 0, 1),
            lambda x: x.transpose(0, 2).reshape(-1, 6) + 1,
            lambda x: x[:, 1:3, ::2],
            lambda x: x.flip(1).contiguous(),
            lambda x: torch.cat([x, x * 2, x[:, :1]], 1),
            lambda x: torch.stack([x, -x], 2),
            lambda x: x.repeat(2, 1, 3),
            lambda x: x[:, None].expand(3, 5, 4, 10) * 2,
            lambda x: F.pad(x, (2, 1, 0, 3), value=1.5),
            lambda x: F.pad(x, (3, 2), mode="reflect"),
            lambda x: F.pad(x, (3, 2), mode="replicate"),
            lambda x: x.roll(2, 1),
            lambda x: x.unfold(2, 4, 2).sum(-1),
            lambda x: sum(x.chunk(2, 2), start=torch.zeros(())),
            lambda x: torch.cat(x.unbind(1), -1),
            lambda x: x[:, [3, 0, 0, 2]],
        ],
        torch.randn(3, 4, 10),
        tmp_path,
    )


def test_reductions(tmp_path: Path) -> None:
    torch.manual_seed(0)
    agree(
        [
            lambda x: x.mean(1),
            lambda x: x.sum((0, 2), keepdim=True),
            lambda x: x.amax(-1),
            lambda x: x.amin(1),
            lambda x: x.max(2).values,
            lambda x: x.var(1),
            lambda x: x.std(-1, unbiased=False),
            lambda x: x.norm(dim=1),
            lambda x: x.cumsum(1),
            lambda x: F.avg_pool1d(x, 3, 2),
            lambda x: F.max_pool1d(x, 3, 1, 1),
            lambda x: F.adaptive_avg_pool1d(x, 4),
            lambda x: F.avg_pool2d(x, 2),
            lambda x: F.max_pool2d(x, (2, 3), 1),
            lambda x: F.avg_pool1d(x, 3, 1, 1),
        ],
        torch.randn(2, 6, 19) + 2,
        tmp_path,
        bound=5e-6,
    )


def test_contractions(tmp_path: Path) -> None:
    torch.manual_seed(0)
    w = torch.randn(18, 33) * 0.2
    c1, c2, c3 = torch.randn(24, 6, 3) * 0.3, torch.randn(12, 2, 3) * 0.3, torch.randn(6, 1, 5)
    k2 = torch.randn(8, 1, 3, 2) * 0.3

    def to(x: Tensor, y: Tensor) -> Tensor:
        return y.to(x.dtype)

    agree(
        [
            lambda x: F.linear(x, to(x, w.T[:, :18])),
            lambda x: x @ to(x, w),
            lambda x: to(x, w.T) @ x.transpose(1, 2),
            lambda x: x @ x.transpose(1, 2),
            lambda x: torch.einsum("bcl,lk->bkc", x, to(x, w)),
            lambda x: torch.einsum("bcl,bdl->bcd", x, x * 2),
            lambda x: torch.bmm(x, x.transpose(1, 2)),
            lambda x: torch.addmm(to(x, w[0]), x[0], to(x, w)),
            lambda x: F.conv1d(x, to(x, c1), padding=2, dilation=2),
            lambda x: F.conv1d(x, to(x, c1), stride=3),
            lambda x: F.conv1d(x, to(x, c2), groups=3, padding=1),
            lambda x: F.conv1d(x, to(x, c3), groups=6, padding="same"),
            lambda x: F.conv2d(x[:, None], to(x, k2), padding=(1, 0), stride=(2, 1)),
            lambda x: x[0] @ x[1, 0],
        ],
        torch.randn(2, 6, 18),
        tmp_path,
        bound=5e-5,
    )


def test_norms_and_softmax(tmp_path: Path) -> None:
    torch.manual_seed(0)
    weight, bias = torch.rand(24) + 0.5, torch.randn(24)
    running = torch.rand(6) + 0.5

    agree(
        [
            lambda x: F.layer_norm(x, (24,), weight.to(x.dtype), bias.to(x.dtype)),
            lambda x: F.layer_norm(x, (6, 24)),
            lambda x: F.rms_norm(x, (24,), weight.to(x.dtype), 1e-6),
            lambda x: F.group_norm(x, 3, running.to(x.dtype), running.to(x.dtype)),
            lambda x: F.instance_norm(x),
            lambda x: F.batch_norm(x, running.to(x.dtype), running.to(x.dtype)),
            lambda x: F.softmax(x, -1),
            lambda x: F.softmax(x, 1),
            lambda x: F.log_softmax(x, -1),
            lambda x: F.scaled_dot_product_attention(x, x.flip(1), x),
            lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
            lambda x: F.prelu(x, running.to(x.dtype)),
        ],
        torch.randn(2, 6, 24) * 2,
        tmp_path,
        bound=1e-4,
    )


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [
                nn.LSTM(7, 9, 2, batch_first=True),
                nn.LSTM(7, 17, bidirectional=True, batch_first=True),
                nn.GRU(7, 20, 2, batch_first=True, bias=False),
                nn.GRU(7, 5, bidirectional=True, batch_first=True),
                nn.RNN(7, 6, nonlinearity="relu", batch_first=True),
                nn.LSTM(7, 12, proj_size=4, batch_first=True),
            ]
        )

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        found = []
        for layer in self.layers:
            out, state = layer(x)
            found += [out, state[0] if isinstance(state, tuple) else state]
        found.append(self.layers[4](x, h)[0])
        return tuple(found)


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("batch", [1, 3])
def test_recurrent_layers(batch: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    compiled = native.build(
        Recurrent(), (torch.randn(batch, 6, 7), torch.randn(1, batch, 6)), out=tmp_path / "rnn.so", quiet=True
    )
    assert compiled.facts["report"]["worst_relative_error"] <= 1e-5


class Symbols(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.register_buffer("rows", torch.randn(4, 3))

    def forward(self, index: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.table(index) * x, self.rows[index % 4], self.rows.index_select(0, index[0])


def test_tables(tmp_path: Path) -> None:
    torch.manual_seed(0)
    index = torch.tensor([[0, 3, 2], [9, 10, 1]])
    model, x = Symbols(), torch.randn(2, 3, 6)
    compiled = native.build(model, (index, x), out=tmp_path / "tables.so", check=False, quiet=True)
    for y, wanted in zip(compiled(index, x), model(index, x), strict=True):
        np.testing.assert_allclose(y, wanted.detach().numpy(), rtol=1e-6)


def test_an_index_outside_its_table_is_clamped(tmp_path: Path) -> None:
    model = nn.Embedding(5, 4)
    compiled = native.build(model, torch.tensor([1, 2]), out=tmp_path / "e.so", quiet=True)
    rows = model.weight.detach().numpy()
    np.testing.assert_array_equal(compiled(np.array([-7, 99])), rows[[0, 4]])


def test_not_a_number_passes_through(tmp_path: Path) -> None:
    x = torch.randn(1, 20)
    x[0, 3] = float("nan")
    model = Several([F.relu, torch.exp, torch.tanh, torch.sigmoid, F.gelu, F.silu, torch.sqrt, torch.abs, F.softplus,
                     lambda v: torch.clamp(v, -1, 1), torch.sign, torch.log, lambda v: v.amax(1), F.relu6])  # fmt: skip
    compiled = native.build(model, torch.randn(1, 20), out=tmp_path / "n.so", check=False, quiet=True)
    for index, y in enumerate(compiled(x)):
        assert np.isnan(y.reshape(-1)[3 if y.size > 1 else 0]), index


def test_the_list_of_operations_is_public() -> None:
    assert {"linear", "conv1d", "lstm.input", "softmax.int", "embedding"} <= set(native.list_operations())
