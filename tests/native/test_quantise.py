"""int8: close to fp32, its loss reported by layer on held-out data, refused beyond the bound."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from hotloop import native
from hotloop.native.compiler import find_target
from hotloop.native.emit.quantised import quantise_weight

torch.set_num_threads(1)
pytestmark = pytest.mark.skipif(not find_target().vnni, reason="this processor has no AVX-512 VNNI")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(6, 32, 3, padding=1)
        self.lstm = nn.LSTM(32, 24, batch_first=True)
        self.head = nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.conv(x.transpose(1, 2))).transpose(1, 2)
        return self.head(self.lstm(y)[0][:, -1])


def loader() -> DataLoader[tuple[Tensor, ...]]:
    torch.manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(48, 12, 6), torch.zeros(48)), batch_size=16)


@pytest.mark.parametrize("streaming", [None, True])
def test_int8_is_close_and_tells_what_each_layer_loses(streaming: bool | None, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net().eval()
    compiled = native.build(
        model, torch.randn(1, 12, 6), precision="int8", calibration=loader(), streaming=streaming,
        out=tmp_path / "q.so", quiet=True,
    )  # fmt: skip
    report = compiled.facts["report"]
    layers = dict(report["layers"])
    assert 1e-4 < report["worst_relative_error"] < 0.05
    assert len(report["layers"]) >= 4
    assert any(name.startswith("conv:") for name in layers)
    assert all(0 < error < 0.05 for error in layers.values())
    x = torch.randn(1, 12, 6)
    if streaming:
        for t in range(12):
            y = compiled(x[:, t])
    else:
        y = compiled(x)
    wanted = model(x).detach().numpy()
    assert np.linalg.norm(y - wanted) / np.linalg.norm(wanted) < 0.05


def test_a_loss_beyond_the_bound_is_refused_unless_forced(tmp_path: Path) -> None:
    torch.manual_seed(0)
    options = {"precision": "int8", "calibration": list(loader()), "bound": 1e-5, "quiet": True}
    with pytest.raises(native.PrecisionLossError, match=r"worst layers: .*set force=True"):
        native.build(Net(), torch.randn(1, 12, 6), out=tmp_path / "q.so", **options)
    compiled = native.build(Net(), torch.randn(1, 12, 6), out=tmp_path / "q.so", force=True, **options)
    assert compiled.facts["report"]["worst_relative_error"] > 1e-5


def test_calibration_must_fit(tmp_path: Path) -> None:
    x = torch.randn(1, 12, 6)
    with pytest.raises(native.BuildError, match="holds 2 inputs"):
        native.build(Net(), x, precision="int8", calibration=[x, x], out=tmp_path / "q.so")
    with pytest.raises(native.BuildError, match="the example"):
        native.build(Net(), x, precision="int8", calibration=[torch.randn(8, 12, 5)], out=tmp_path / "q.so")
    with pytest.raises(native.BuildError, match="needs AVX-512 VNNI"):
        native.build(Net(), x, precision="int8", calibration=loader(), out=tmp_path / "q.so", target="avx2")


def test_not_a_number_passes_through_int8(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))
    data = torch.randn(32, 32)
    compiled = native.build(
        model, data[:1], precision="int8", calibration=[data], out=tmp_path / "q.so", quiet=True
    )
    data[0, 3] = float("nan")
    assert np.isnan(compiled(data[:1])).all()


def test_weights_are_rounded_by_output() -> None:
    weight = np.random.default_rng(0).standard_normal((2, 5, 3)).astype(np.float32) * [1.0, 100.0, 0.0]
    whole, step = quantise_weight(weight.astype(np.float32))
    assert np.abs(whole).max(axis=(0, 1)).tolist() == [127, 127, 0]
    assert (np.abs(whole * step - weight) <= step / 2 + 1e-6).all()


def test_a_trained_classifier_decides_the_same_in_int8(tmp_path: Path) -> None:
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(digits.target)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(8):
        for rows in torch.randperm(1400, generator=torch.Generator().manual_seed(epoch)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    model.eval()
    compiled = native.build(
        model, x[:1], precision="int8", calibration=[(image[None],) for image in x[:256]],
        out=tmp_path / "digits.so", quiet=True,
    )  # fmt: skip
    test = x[1400:]
    fp32 = model(test).argmax(1)
    int8 = torch.tensor([int(np.argmax(compiled(image[None].numpy()))) for image in test])
    assert (fp32 == y[1400:]).float().mean() > 0.9
    # of 397 images that neither training nor calibration saw, at most four may be judged otherwise
    assert int((fp32 != int8).sum()) <= 4
