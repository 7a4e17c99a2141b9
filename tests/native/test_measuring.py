"""Latency tools and the estimate: they run, their figures hang together. No test asserts a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from hotloop import native
from hotloop.cli import main
from hotloop.native.bench import bench, format_result
from hotloop.native.estimate import estimate_graph
from hotloop.native.timing import Core

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("native")
    model = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 2)).eval()
    torch.export.save(torch.export.export(model, (torch.randn(1, 8),)), folder / "model.pt2")
    return folder


def test_the_command_builds_verifies_and_measures(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    library, program = str(folder / "model.so"), str(folder / "model.pt2")
    assert main(["native", "build", program, "--out", library]) == 0
    assert "relative error" in capsys.readouterr().out
    assert {"model.so", "model.c", "model.h"} <= {file.name for file in folder.iterdir()}
    assert main(["native", "verify", library, program, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["failed"] == []
    assert told["worst_relative_error"] < 1e-5
    assert main(["native", "verify", library]) == 0
    assert "agrees with float64 PyTorch" in capsys.readouterr().out
    files = [str(folder / name) for name in ("bench.json", "bench.svg")]
    assert main(["native", "bench", library, "--quick", "--json", files[0], "--plot", files[1]]) == 0
    page = capsys.readouterr().out
    assert "quietest block" in page
    assert "cold caches" in page
    assert Path(files[1]).read_text().startswith("<svg")
    figures = json.loads(Path(files[0]).read_text())
    row = figures["rows"][0]
    assert 0 < row["p50"] <= row["p99"] <= row["p999"] <= row["highest"]
    assert sum(figures["histogram"][1]) == row["calls"]


def test_verify_finds_another_model(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 2)).eval()
    x = torch.randn(1, 8)
    native.build(other, x, out=tmp_path / "other.so", quiet=True)
    assert main(["native", "verify", str(tmp_path / "other.so"), str(folder / "model.pt2")]) == 1
    assert "disagrees" in capsys.readouterr().out
    assert main(["native", "build", str(tmp_path / "absent.pt2")]) == 2
    assert "torch.export.save" in capsys.readouterr().err


def test_a_state_machine_is_measured_with_and_without_prep(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.GRU(3, 8, batch_first=True), nn.Linear(8, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.rnn(x)[0][:, -1])

    native.build(Model(), torch.randn(1, 5, 3), streaming=True, out=tmp_path / "gru.so", quiet=True)
    result = bench(tmp_path / "gru.so", quick=True)
    assert [row.what for row in result.rows][:2] == ["commit, after prep", "prep and commit"]
    assert "commit, after prep" in format_result(result)
    predicted = native.estimate(Model(), torch.randn(1, 5, 3), streaming=True)
    assert predicted.prep_ns > 0
    # input and hidden weights of three gates, and the head
    assert predicted.multiply_adds == 3 * 8 * (3 + 8) + 8


def test_the_floor_is_arithmetic_or_bytes_whichever_is_longer() -> None:
    from hotloop.native.build import generate
    from hotloop.native.capture import capture_model

    layer = nn.Linear(256, 512)
    graph, _ = generate(capture_model(layer, (torch.randn(1, 256),)), "layer")
    fast = Core(1e12, 1e12, 1e12, 1e9, 1 << 30, 1 << 30)
    assert estimate_graph(graph, fast).floor_ns == pytest.approx(256 * 512)
    slow = Core(1e9, 1e9, 1e9, 1e15, 1 << 30, 1 << 30)
    found = estimate_graph(graph, slow)
    assert found.floor_ns == pytest.approx(4 * 256 * 512)
    assert found.p50_ns > found.floor_ns
    assert found.cache_level == "L1"
    assert estimate_graph(graph, Core(1e9, 1e9, 1e9, 1e15, 1 << 10, 1 << 20)).cache_level == "L2"
