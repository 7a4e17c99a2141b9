"""Random small architectures, eager against compiled. A few always; NATIVE_FUZZ=2000 builds that many (an hour).

`st.randoms()` gives a generator whose draws hypothesis sees: a failing architecture comes back shrunk.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hotloop import native

torch.set_num_threads(1)

Layer = tuple[nn.Module, Callable[[nn.Module, Tensor], Tensor]]


class Drawn(nn.Module):
    """A chain of layers on [batch, time, features] with now and then a residual, then a head."""

    def __init__(self, rng: random.Random, features: int, time: int) -> None:
        super().__init__()
        self.rng = rng
        self.parts = nn.ModuleList()
        self.steps: list[Callable[[nn.Module, Tensor], Tensor]] = []
        self.names: list[str] = []
        for _ in range(self.rng.randint(1, 5)):
            name = self.rng.choice(list(LAYERS))
            part, step, features = LAYERS[name](self.rng, features, time)
            self.parts.append(part)
            self.steps.append(step)
            self.names.append(name)
        self.tail = self.rng.choice(["last", "mean", "max", "flat", "all", "second"])
        self.names.append(self.tail)
        width = features * time if self.tail == "flat" else features
        self.head = nn.Linear(width, self.rng.choice([1, 3, 17]))

    def forward(self, x: Tensor) -> Tensor:
        for part, step in zip(self.parts, self.steps, strict=True):
            x = step(part, x)
        if self.tail == "last":
            x = x[:, -1]
        elif self.tail == "mean":
            x = x.mean(1)
        elif self.tail == "max":
            x = x.amax(1)
        elif self.tail == "flat":
            x = x.flatten(1)
        elif self.tail == "second":
            x = x[:, -2]
        return self.head(x)


def _linear(rng: random.Random, features: int, _time: int) -> tuple[nn.Module, Callable[..., Tensor], int]:
    out = rng.choice([1, 4, 16, 33])
    act = rng.choice([torch.relu, torch.tanh, F.gelu, F.silu, torch.sigmoid, F.elu, F.softplus, F.leaky_relu])
    return nn.Linear(features, out, bias=rng.random() < 0.8), lambda m, x: act(m(x)), out


def _residual(rng: random.Random, features: int, _time: int) -> tuple[nn.Module, Callable[..., Tensor], int]:
    return nn.Linear(features, features), lambda m, x: x + 0.5 * torch.relu(m(x)), features


def _conv(rng: random.Random, features: int, _time: int) -> tuple[nn.Module, Callable[..., Tensor], int]:
    out, kernel, dilation = rng.choice([3, 8, 20]), rng.choice([1, 2, 3]), rng.choice([1, 2])
    groups = features if rng.random() < 0.2 else 1
    out = features if groups > 1 else out
    layer = nn.Conv1d(features, out, kernel, dilation=dilation, groups=groups)
    left = (kernel - 1) * dilation
    return layer, lambda m, x: torch.relu(m(F.pad(x.transpose(1, 2), (left, 0)))).transpose(1, 2), out


def _rnn(rng: random.Random, features: int, _time: int) -> tuple[nn.Module, Callable[..., Tensor], int]:
    kind, out, both = rng.choice([nn.LSTM, nn.GRU, nn.RNN]), rng.choice([3, 16, 18]), rng.random() < 0.3
    layer = kind(features, out, rng.choice([1, 2]), batch_first=True, bidirectional=both)
    return layer, lambda m, x: m(x)[0], out * (2 if both else 1)


def _norm(rng: random.Random, features: int, _time: int) -> tuple[nn.Module, Callable[..., Tensor], int]:
    layer = rng.choice([nn.LayerNorm, nn.RMSNorm])(features)
    # a single feature is its own mean: its norm is 0 / 0
    return layer, lambda m, x: m(x) if features > 2 else x * 0.5, features


def _batch_norm(
    rng: random.Random, features: int, _time: int
) -> tuple[nn.Module, Callable[..., Tensor], int]:
    layer = nn.BatchNorm1d(features)
    layer.running_mean.uniform_(-1, 1)
    layer.running_var.uniform_(0.5, 2)
    return layer, lambda m, x: m(x.transpose(1, 2)).transpose(1, 2), features


def _attention(rng: random.Random, features: int, _time: int) -> tuple[nn.Module, Callable[..., Tensor], int]:
    causal, heads = rng.random() < 0.5, rng.choice([1, 2, 4])

    def step(m: nn.Module, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = m(x).view(b, t, 3, heads, -1).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).reshape(b, t, -1)

    return nn.Linear(features, 3 * 8), step, 8


def _mix(rng: random.Random, features: int, _time: int) -> tuple[nn.Module, Callable[..., Tensor], int]:
    kind = rng.choice(["split", "soft", "pool", "shift", "max"])

    def step(_m: nn.Module, x: Tensor) -> Tensor:
        if kind == "split":
            return torch.cat([x, torch.sigmoid(x.flip(-1))], -1)
        if kind == "soft":
            return torch.softmax(x, 1) * x
        if kind == "pool":
            return F.avg_pool1d(F.pad(x.transpose(1, 2), (2, 0)), 3, 1).transpose(1, 2)
        if kind == "shift":
            return x - F.pad(x[:, :-1], (0, 0, 1, 0))
        return torch.maximum(x, x.mean(1, keepdim=True))

    return nn.Identity(), step, features * (2 if kind == "split" else 1)


LAYERS: dict[str, Callable[[random.Random, int, int], tuple[nn.Module, Callable[..., Tensor], int]]] = {
    "linear": _linear,
    "residual": _residual,
    "conv": _conv,
    "rnn": _rnn,
    "norm": _norm,
    "batch norm": _batch_norm,
    "attention": _attention,
    "mix": _mix,
}


def build_one(rng: random.Random, seed: int, folder: Path) -> None:
    torch.manual_seed(seed)
    batch, time, features = rng.choice([1, 1, 2, 3]), rng.choice([3, 8, 21]), rng.choice([1, 5, 16, 31])
    model = Drawn(rng, features, time).eval()
    streaming = rng.random() < 0.5
    what = f"weights of seed {seed}: {model.names} on {(batch, time, features)}, streaming={streaming}"
    try:
        native.build(
            model,
            torch.randn(batch, time, features),
            out=folder / f"fuzz{seed}.so",
            streaming=streaming or None,
            quiet=True,
        )
    except native.NativeError as error:
        pytest.fail(f"{what}\n{error}")
    finally:
        for file in folder.iterdir():
            file.unlink()


# each build checks itself against float64 PyTorch on given, random, extreme, denormal and NaN inputs
@pytest.mark.timeout(0)
def test_random_architectures(tmp_path: Path) -> None:
    wanted = int(os.environ.get("NATIVE_FUZZ", 12))
    built = 0

    @settings(
        max_examples=wanted,
        deadline=None,
        database=None,
        derandomize=wanted == 12,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(rng=st.randoms(use_true_random=False), seed=st.integers(0, 2**31))
    def build_any(rng: random.Random, seed: int) -> None:
        nonlocal built
        build_one(rng, seed, tmp_path)
        built += 1

    build_any()
    assert built >= wanted
    assert not list(tmp_path.iterdir())
