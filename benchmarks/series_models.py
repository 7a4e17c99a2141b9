"""Models over windows of a time series that benchmarks train: an LSTM and a stack of dilated causal convolutions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class SeriesLSTM(nn.Module):
    """Two layers of LSTM over [batch, time, features], the last step's state to one number."""

    def __init__(self, features: int = 32, width: int = 128, layers: int = 2) -> None:
        super().__init__()
        self.lstm = nn.LSTM(features, width, layers, batch_first=True)
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class CausalBlock(nn.Module):
    """Two causal convolutions of one dilation with a residual around them (Bai et al. 2018, "TCN")."""

    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.left = 2 * dilation
        self.first = nn.Conv1d(width, width, 3, dilation=dilation)
        self.second = nn.Conv1d(width, width, 3, dilation=dilation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.first(F.pad(x, (self.left, 0))))
        return F.relu(x + self.second(F.pad(h, (self.left, 0))))


class CausalConv(nn.Module):
    """Five causal blocks of dilations 1 to 16 over [batch, time, features], the last step to one number."""

    def __init__(self, features: int = 32, width: int = 64) -> None:
        super().__init__()
        self.inward = nn.Conv1d(features, width, 1)
        self.blocks = nn.Sequential(*[CausalBlock(width, 2**i) for i in range(5)])
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.inward(x.transpose(1, 2)))[:, :, -1])
