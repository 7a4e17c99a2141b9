"""The seven models of the latency benchmark: small, as decision paths have them, batch 1, fixed seed."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Example = tuple[Tensor, ...]


def make_mlp(*sizes: int) -> nn.Sequential:
    """Linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class LSTMStep(nn.Module):
    """One step of an LSTM 32 -> 2 x 64 with its state as inputs and outputs, and Linear(64, 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(32, 64, 2, batch_first=True)
        self.head = nn.Linear(64, 1)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, (h, c) = self.lstm(x, (h, c))
        return self.head(y[:, -1]), h, c


class LSTMWindow(nn.Module):
    """A window through an LSTM from zero state, and a linear head on its last output."""

    def __init__(self, features: int, units: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(features, units, 2, batch_first=True)
        self.head = nn.Linear(units, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class TCN(nn.Module):
    """Four causal convolutions of 32 channels, kernel 3, dilations 1, 2, 4, 8, residual; the last step counts."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv1d(32, 32, 3, dilation=d) for d in (1, 2, 4, 8))
        self.head = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        for conv in self.convs:
            x = torch.relu(conv(F.pad(x, (2 * conv.dilation[0], 0)))) + x
        return self.head(x[:, :, -1])


class Attention(nn.Module):
    """A pre-norm causal attention block: 32 wide, 4 heads, feed-forward 64 with GELU; the last step counts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.up, self.down, self.head = nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + self.out(y)
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return self.head(x[:, -1])


def make_models() -> dict[str, tuple[nn.Module, Example]]:
    """Name to (model in evaluation mode, example inputs)."""
    torch.manual_seed(0)
    found: dict[str, tuple[nn.Module, Example]] = {
        "a MLP 32-64-64-1": (make_mlp(32, 64, 64, 1), (torch.randn(1, 32),)),
        "b MLP 256-512-512-8": (make_mlp(256, 512, 512, 8), (torch.randn(1, 256),)),
        "c LSTM step 32-2x64": (
            LSTMStep(),
            (torch.randn(1, 1, 32), torch.randn(2, 1, 64), torch.randn(2, 1, 64)),
        ),
        "d LSTM 64x(32-2x64)": (LSTMWindow(32, 64), (torch.randn(1, 64, 32),)),
        "dA LSTM 50x(100-2x100)": (LSTMWindow(100, 100), (torch.randn(1, 50, 100),)),
        "e TCN 64x32": (TCN(), (torch.randn(1, 64, 32),)),
        "f attention 32x32": (Attention(), (torch.randn(1, 32, 32),)),
    }
    return {name: (model.eval(), example) for name, (model, example) in found.items()}
