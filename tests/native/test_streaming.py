"""State machines: the same as the window after as many events, and as the sliding window where history is finite."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hotloop import native

torch.set_num_threads(1)


class Dilated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv1d(8, 8, 3, dilation=d) for d in (1, 2, 4))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        for layer in self.layers:
            x = torch.relu(layer(F.pad(x, (2 * layer.dilation[0], 0)))) + x
        return self.head(x[:, :, -1])


class Attending(nn.Module):
    def __init__(self, masked: bool) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 3)
        self.masked = masked

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.masked).transpose(1, 2).reshape(b, t, d)
        return self.out(x + y)[:, -1]


class Mixed(nn.Module):
    """Differences, moving average, a positional table, mean over the window: partly incremental, partly not."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.lin = nn.Conv1d(4, 6, 3), nn.Linear(6, 2)
        self.place = nn.Parameter(torch.randn(11, 6))

    def forward(self, x: Tensor) -> Tensor:
        change = x[:, 1:] - x[:, :-1]
        smooth = F.avg_pool1d(change.transpose(1, 2), 3, 1)
        z = self.conv(smooth).transpose(1, 2)
        return self.lin((z + self.place).mean(1)) + self.lin(z[:, -2])


class GatedMemory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.out = nn.GRU(4, 10, 2, batch_first=True), nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.gru(x)[0]) + x


CASES = {
    "convolutions": (Dilated, 8, 20, True),
    "causal attention": (lambda: Attending(True), 16, 12, True),
    "window attention": (lambda: Attending(False), 16, 12, True),
    "mixed": (Mixed, 4, 16, True),
    "gru, all outputs": (GatedMemory, 4, 7, False),
}


@pytest.mark.parametrize("name", CASES)
def test_the_last_event_gives_what_the_window_gives(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make, features, window, slides = CASES[name]
    model = make().eval()
    machine = native.build(
        model, torch.randn(1, window, features), streaming=True, out=tmp_path / "machine.so", quiet=True
    )
    assert machine.facts["report"]["worst_relative_error"] <= 1e-5
    if not slides:
        return
    # far beyond the window, rings have gone round several times
    series = torch.randn(1, 4 * window + 3, features)
    for t in range(series.shape[1]):
        if t % 3:
            machine.prep()
        y = machine(series[:, t])
    with torch.no_grad():
        wanted = model.double()(series[:, -window:].double()).numpy()
    np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-5)


def test_work_is_split_before_the_event(tmp_path: Path) -> None:
    torch.manual_seed(0)
    native.build(Dilated(), torch.randn(1, 20, 8), streaming=True, out=tmp_path / "machine.so", quiet=True)
    text = (tmp_path / "machine.c").read_text()
    prep = text[text.index("static inline void prepare") : text.index("void machine_prep")]
    commit = text[text.index("void machine_run(") : text.index("void machine_call")]
    assert prep.count("/* Taps: conv1d") == 3
    assert commit.count("/* Taps: conv1d") == 3
    assert "in0" not in prep


def test_only_the_cone_of_the_last_output_is_computed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    for length in (20, 200):
        native.build(
            Dilated(), torch.randn(1, length, 8), out=tmp_path / f"cone{length}.so", quiet=True, check=False
        )
    sizes = [
        native.load(tmp_path / f"cone{length}.so").facts["description"]["arena_bytes"] for length in (20, 200)
    ]
    # 15 positions reach the last output, however long the window is
    assert sizes[1] <= sizes[0] + 1024


def test_a_window_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(native.StreamingError, match="no input 'z'"):
        native.build(GatedMemory(), torch.randn(1, 5, 4), streaming={"z": 1}, out=tmp_path / "m.so")
    with pytest.raises(native.StreamingError, match="no dimension 7"):
        native.build(GatedMemory(), torch.randn(1, 5, 4), streaming={"x": 7}, out=tmp_path / "m.so")


def test_a_mean_over_the_window_does_not_feed_older_positions(tmp_path: Path) -> None:
    """What is made from the whole window was another one at older positions, so it goes into no ring and no state."""

    class Relative(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.GRU(3, 5, batch_first=True), nn.Linear(5, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.maximum(x, x.mean(1, keepdim=True))
            return self.head(self.rnn(x)[0][:, -1]) + torch.softmax(x, 1)[:, -1:, 0]

    torch.manual_seed(0)
    machine = native.build(
        Relative(), torch.randn(1, 9, 3), streaming=True, out=tmp_path / "relative.so", quiet=True
    )
    assert machine.facts["report"]["worst_relative_error"] <= 1e-5


def test_of_a_joint_projection_only_what_is_used_is_computed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    native.build(Attending(True), torch.randn(1, 12, 16), out=tmp_path / "joint.so", quiet=True)
    text = (tmp_path / "joint.c").read_text()
    # the last query alone; keys and values of all positions
    assert text.count("/* Taps: linear in qkv") >= 2
