"""Architectures people publish, written from their papers' definitions; each is built and agrees with float64."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hotloop import native
from hotloop.native import compiler

torch.set_num_threads(1)


class DeepLOB(nn.Module):
    """Zhang, Zohren, Roberts 2019: convolutions over 100 book states of 40, inception, LSTM 64, 3 classes."""

    def __init__(self) -> None:
        super().__init__()

        def block(inputs: int, outputs: int, kernel: int, stride: int, act: nn.Module) -> nn.Sequential:
            layers: list[nn.Module] = [
                nn.Conv2d(inputs, outputs, (1, kernel), (1, stride)),
                act,
                nn.BatchNorm2d(outputs),
            ]
            for _ in range(2):
                layers += [nn.Conv2d(outputs, outputs, (4, 1)), act, nn.BatchNorm2d(outputs)]
            return nn.Sequential(*layers)

        self.conv1 = block(1, 32, 2, 2, nn.LeakyReLU(0.01))
        self.conv2 = block(32, 32, 2, 2, nn.Tanh())
        self.conv3 = block(32, 32, 10, 1, nn.LeakyReLU(0.01))

        def branch(kernel: int) -> nn.Sequential:
            return nn.Sequential(
                nn.Conv2d(32, 64, 1),
                nn.LeakyReLU(0.01),
                nn.BatchNorm2d(64),
                nn.Conv2d(64, 64, (kernel, 1), padding="same"),
                nn.LeakyReLU(0.01),
                nn.BatchNorm2d(64),
            )

        self.inception1, self.inception2 = branch(3), branch(5)
        self.inception3 = nn.Sequential(
            nn.MaxPool2d((3, 1), 1, (1, 0)), nn.Conv2d(32, 64, 1), nn.LeakyReLU(0.01), nn.BatchNorm2d(64)
        )
        self.lstm = nn.LSTM(192, 64, batch_first=True)
        self.head = nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv3(self.conv2(self.conv1(x)))
        x = torch.cat([self.inception1(x), self.inception2(x), self.inception3(x)], dim=1)
        x = x.permute(0, 2, 1, 3).reshape(-1, x.shape[2], 192)
        out, _ = self.lstm(x)
        return torch.softmax(self.head(out[:, -1]), dim=1)


class ALSTM(nn.Module):
    """Qin et al. 2017 as in Qlib: projection, GRU or LSTM, temporal attention, last state beside it."""

    def __init__(self, kind: str = "GRU", features: int = 20, hidden: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.project = nn.Sequential(nn.Linear(features, hidden), nn.Tanh())
        self.rnn = getattr(nn, kind)(hidden, hidden, layers, batch_first=True)
        self.attend = nn.Sequential(
            nn.Linear(hidden, hidden // 2),
            nn.Dropout(0.1),
            nn.Tanh(),
            nn.Linear(hidden // 2, 1, bias=False),
            nn.Softmax(1),
        )
        self.head = nn.Linear(hidden * 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.rnn(self.project(x))
        pooled = (out * self.attend(out)).sum(1)
        return self.head(torch.cat([out[:, -1], pooled], dim=1))[..., 0]


class TCN(nn.Module):
    """Bai, Kolter, Koltun 2018: weight-normed causal convolutions with chomp, residual blocks, dilations 1, 2, 4."""

    def __init__(self, inputs: int = 12, width: int = 25) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        blocks = []
        for level in range(3):
            d, first = 2**level, inputs if level == 0 else width
            blocks.append(
                nn.ModuleDict(
                    {
                        "a": norm(nn.Conv1d(first, width, 3, padding=2 * d, dilation=d)),
                        "b": norm(nn.Conv1d(width, width, 3, padding=2 * d, dilation=d)),
                        "down": nn.Conv1d(first, width, 1) if first != width else nn.Identity(),
                    }
                )
            )
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            y = x
            for name in ("a", "b"):
                conv = block[name]
                y = torch.relu(conv(y)[:, :, : -conv.padding[0]].contiguous())
            x = torch.relu(y + block["down"](x))
        return self.head(x[:, :, -1])


class NBeats(nn.Module):
    """Oreshkin et al. 2020, generic: doubly residual blocks of four layers, backcast and forecast."""

    def __init__(self, window: int = 30, horizon: int = 6, width: int = 48, blocks: int = 3) -> None:
        super().__init__()
        self.window = window
        self.blocks = nn.ModuleList()
        for _ in range(blocks):
            layers: list[nn.Module] = []
            for k in range(4):
                layers += [nn.Linear(window if k == 0 else width, width), nn.ReLU()]
            self.blocks.append(nn.Sequential(*layers, nn.Linear(width, window + horizon)))

    def forward(self, x: Tensor) -> Tensor:
        forecast = torch.zeros_like(x[:, :1])
        for block in self.blocks:
            theta = block(x)
            x = x - theta[:, : self.window]
            forecast = forecast + theta[:, self.window :]
        return forecast


class DLinear(nn.Module):
    """Zeng et al. 2023: moving average as trend, the rest as season, one linear map each."""

    def __init__(self, window: int = 48, horizon: int = 12, kernel: int = 25) -> None:
        super().__init__()
        self.kernel = kernel
        self.average = nn.AvgPool1d(kernel, stride=1)
        self.season, self.trend = nn.Linear(window, horizon), nn.Linear(window, horizon)

    def forward(self, x: Tensor) -> Tensor:
        side = (self.kernel - 1) // 2
        padded = torch.cat([x[:, :1].repeat(1, side, 1), x, x[:, -1:].repeat(1, side, 1)], dim=1)
        trend = self.average(padded.permute(0, 2, 1)).permute(0, 2, 1)
        season = (x - trend).permute(0, 2, 1)
        return (self.season(season) + self.trend(trend.permute(0, 2, 1))).permute(0, 2, 1)


class PatchTST(nn.Module):
    """Nie et al. 2023: instance normalisation, patches, channel-independent Transformer encoder, flat head."""

    def __init__(
        self, window: int = 64, horizon: int = 8, patch: int = 16, stride: int = 8, width: int = 32
    ) -> None:
        super().__init__()
        self.patch, self.stride = patch, stride
        count = (window - patch) // stride + 2
        self.pad = nn.ReplicationPad1d((0, stride))
        self.embed = nn.Linear(patch, width)
        self.position = nn.Parameter(torch.randn(count, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 4, 64, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(count * width, horizon)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(1, keepdim=True)
        x = x - mean
        scale = torch.sqrt(torch.var(x, dim=1, keepdim=True, unbiased=False) + 1e-5)
        x = self.pad((x / scale).permute(0, 2, 1)).unfold(-1, self.patch, self.stride)
        batch, channels, count, _ = x.shape
        z = (self.embed(x) + self.position).reshape(batch * channels, count, -1)
        z = self.encoder(z).reshape(batch, channels, -1)
        return self.head(z).permute(0, 2, 1) * scale + mean


class WaveNet(nn.Module):
    """van den Oord et al. 2016, as used for guitar amplifiers: gated dilated convolutions, skip connections."""

    def __init__(self, channels: int = 16, layers: int = 6) -> None:
        super().__init__()
        self.entry = nn.Conv1d(1, channels, 1)
        self.dilated = nn.ModuleList(
            nn.Conv1d(channels, 2 * channels, 3, dilation=2**k) for k in range(layers)
        )
        self.mix = nn.ModuleList(nn.Conv1d(channels, channels, 1) for _ in range(layers))
        self.skip = nn.ModuleList(nn.Conv1d(channels, 8, 1) for _ in range(layers))
        self.head = nn.Conv1d(8, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        total: Tensor | None = None
        length = x.shape[-1] - 2 * (2 ** len(self.dilated) - 1)
        for dilated, mix, skip in zip(self.dilated, self.mix, self.skip, strict=True):
            a, b = dilated(x).chunk(2, dim=1)
            z = torch.tanh(a) * torch.sigmoid(b)
            s = skip(z)[:, :, -length:]
            total = s if total is None else total + s
            x = x[:, :, -z.shape[-1] :] + mix(z)
        assert total is not None
        return self.head(torch.relu(total))


class Causal(nn.Module):
    """A language-model block stack (Vaswani et al. 2017, pre-norm) over embedded symbols."""

    def __init__(self, symbols: int = 50, width: int = 32, window: int = 24) -> None:
        super().__init__()
        self.table, self.place = nn.Embedding(symbols, width), nn.Embedding(window, width)
        layer = nn.TransformerEncoderLayer(width, 2, 48, batch_first=True, norm_first=True, activation=F.silu)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, symbols)
        self.window = window

    def forward(self, index: Tensor) -> Tensor:
        x = self.table(index) * math.sqrt(32) + self.place(torch.arange(self.window))
        mask = nn.Transformer.generate_square_subsequent_mask(self.window)
        return torch.log_softmax(self.head(self.encoder(x, mask=mask, is_causal=True)[:, -1]), dim=-1)


MODELS = {
    "deeplob": (DeepLOB, (1, 1, 100, 40)),
    "alstm-gru": (ALSTM, (1, 20, 20)),
    "alstm-lstm": (lambda: ALSTM("LSTM"), (2, 20, 20)),
    "tcn": (TCN, (1, 12, 40)),
    "nbeats": (NBeats, (1, 30)),
    "dlinear": (DLinear, (1, 48, 7)),
    "patchtst": (PatchTST, (1, 64, 3)),
    "wavenet": (WaveNet, (1, 1, 160)),
}


LONG_TO_COMPILE = {"deeplob", "wavenet", "patchtst", "alstm-lstm"}


def settle_norms(model: nn.Module, shape: tuple[int, ...]) -> None:
    """Give batch norms statistics that are not their initial 0 and 1."""
    model.train()
    for _ in range(2):
        model(torch.randn(max(shape[0], 4), *shape[1:]))
    model.eval()


@pytest.mark.parametrize("name", MODELS)
def test_published_architectures_agree_with_float64(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in LONG_TO_COMPILE:
        # the source is what is checked here; that the compiler optimises it as it should, the others check
        flags = tuple("-O1" if flag == "-O3" else flag for flag in compiler.FLAGS)
        monkeypatch.setattr(compiler, "FLAGS", flags)
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model = make()
    if any(isinstance(m, nn.BatchNorm2d) for m in model.modules()):
        settle_norms(model, shape)
    compiled = native.build(model, torch.randn(shape), out=tmp_path / "m.so", quiet=True)
    assert compiled.facts["description"]["captured_by"] == "export"
    report = compiled.facts["report"]
    assert report["worst_relative_error"] <= 1e-5
    assert {"given", "random 0", "denormal", "extreme 1e4", "not a number"} <= set(report["errors"])


def test_a_language_model_over_symbols(tmp_path: Path) -> None:
    torch.manual_seed(0)
    compiled = native.build(Causal(), torch.randint(0, 50, (1, 24)), out=tmp_path / "m.so", quiet=True)
    assert compiled.facts["report"]["worst_relative_error"] <= 1e-5


@pytest.mark.parametrize(
    ("name", "dim"), [("tcn", 2), ("wavenet", 2), ("nbeats", 1), ("dlinear", 1), ("alstm-gru", 1)]
)
def test_published_architectures_as_state_machines(name: str, dim: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make, shape = MODELS[name]
    compiled = native.build(make(), torch.randn(shape), out=tmp_path / "m.so", streaming=dim, quiet=True)
    assert compiled.facts["report"]["worst_relative_error"] <= 1e-5
    assert compiled.facts["description"]["streaming"]
