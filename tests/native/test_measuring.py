"""Latency tools and the estimate: they run, their figures hang together. No test asserts a time."""

from __future__ import annotations

import importlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from hotloop import native
from hotloop.cli import main
from hotloop.native.bench import bench
from hotloop.native.estimate import estimate_graph
from hotloop.native.page import format_result
from hotloop.native.peers import PEERS
from hotloop.native.timing import Core
from hotloop.native.work import Work, count_work, predict_floor

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
    beside = ["--against", program, "--peers", "eager,ort"]
    assert main(["native", "bench", library, "--quick", *beside, "--json", files[0], "--plot", files[1]]) == 0
    page = capsys.readouterr().out
    for text in ("quietest block", "cold caches", "asleep", "from L1", "by latency", "eager"):
        assert text in page
    figures = json.loads(Path(files[0]).read_text())
    for row in figures["rows"]:
        assert 0 < row["p50"] <= row["p99"] <= row["p999"] <= row["highest"]
    assert sum(figures["histogram"][1]) == figures["rows"][0]["calls"]
    # what the layers have, of one call
    assert figures["floors"][0]["work"]["multiply_adds"] == 8 * 24 + 24 * 2
    assert figures["floors"][0]["work"]["weight_bytes"] == 4 * (8 * 24 + 24 * 2)
    # of each peer a row or a line that says why there is none
    told = figures["comparison"]
    assert [row["what"] for row in told["rows"]][:2] == ["hotloop", "eager"]
    assert {row["what"] for row in told["rows"]} | set(told["failed"]) == {"hotloop", "eager", "ONNX Runtime"}
    assert told["relative_error"] < 1e-5
    picture = ElementTree.parse(files[1]).getroot()
    named = [text.text for text in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert {"warm", "cold caches", "hotloop, from Python", "eager, from Python"} <= set(named)
    bars = [r for r in picture.iter("{http://www.w3.org/2000/svg}rect") if r.get("fill") == "#36c"]
    assert len(bars) == sum(count > 0 for count in figures["histogram"][1])


def test_a_peer_that_fails_is_a_line_and_other_weights_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> NoReturn:
        raise RuntimeError("\nno such operator\nand forty more lines")

    monkeypatch.setitem(PEERS, "ort", ("ONNX Runtime", refuse))  # type: ignore[arg-type]
    monkeypatch.setitem(PEERS, "openvino", ("OpenVINO", lambda *_: importlib.import_module("absent_runtime")))  # type: ignore[arg-type]
    (tmp_path / "a_network.py").write_text(
        "from torch import nn\ndef make():\n    return nn.Sequential(nn.Flatten(), nn.Linear(6, 2))\nnumber = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    model = nn.Sequential(nn.Flatten(), nn.Linear(6, 2))
    native.build(model, torch.randn(1, 2, 3), out=tmp_path / "m.so", quiet=True)
    command = ["native", "bench", "m.so", "--quick", "--peers", "eager,ort,openvino", "--against"]
    assert main([*command, "a_network:make"]) == 0
    page = capsys.readouterr().out
    assert "ONNX Runtime        not measured: RuntimeError: no such operator\n" in page
    assert "OpenVINO            not measured: not installed" in page
    assert "not the one that the library was built from" in page
    for name, says in (
        ("a_network:number", "is a int"),
        ("a_network:absent", "absent"),
        ("absent_module:x", "absent"),
    ):
        assert main([*command, name]) == 2
        assert says in capsys.readouterr().err
    with pytest.raises(native.InputError, match="no peer 'tvm'"):
        bench(tmp_path / "m.so", quick=True, against=model, peers=["tvm"])
    with pytest.raises(native.InputError, match=r"does not take inputs of shapes \(1, 2, 3\)"):
        bench(tmp_path / "m.so", quick=True, against=nn.Linear(7, 1), peers=["eager"])


# torch.export's, of its own bookkeeping
@pytest.mark.filterwarnings("ignore:The tensor attributes:UserWarning")
def test_an_exported_recurrent_model_is_built_verified_and_compared(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.LSTM(3, 8, batch_first=True), nn.Linear(8, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.rnn(x)[0][:, -1])

    torch.export.save(torch.export.export(Model().eval(), (torch.randn(1, 5, 3),)), tmp_path / "m.pt2")
    program = torch.export.load(tmp_path / "m.pt2")
    compiled = native.build(program, (), streaming=True, out=tmp_path / "m.so", quiet=True)
    assert native.verify(compiled, program).failed == []
    result = bench(tmp_path / "m.so", quick=True, against=program, peers=["eager"])
    assert result.comparison is not None
    assert result.comparison.relative_error is not None
    assert result.comparison.relative_error < 1e-5
    assert "whole window of 5" in format_result(result)
    commit, prep = (floor.work.multiply_adds for floor in result.floors)
    assert (commit, prep) == (4 * 8 * 3 + 8, 4 * 8 * 8)


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


def test_a_loop_s_work_counts_at_every_step_and_int8_is_four_times_as_fast() -> None:
    from hotloop.native.build import generate
    from hotloop.native.capture import capture_model

    model = nn.GRU(3, 8, batch_first=True)
    graph, _ = generate(capture_model(model, (torch.randn(1, 5, 3),)), "gru")
    found = count_work(graph.nodes)
    assert found.multiply_adds == 5 * 3 * 8 * (3 + 8)
    core = Core(4e9, 2e9, 1e9, 1e9, 1000, 2000)
    floor = predict_floor("call", asdict(Work(100, 400, 600)), 1500, core)
    assert floor.arithmetic_ns == pytest.approx(100 + 400 / 4)
    assert (floor.l1_ns, floor.l2_ns, floor.l3_ns) == (
        pytest.approx(150),
        pytest.approx(300),
        pytest.approx(600),
    )
    assert (floor.level, floor.ns) == ("L2", pytest.approx(300))
    assert predict_floor("call", asdict(Work(1000, 0, 600)), 1500, core).ns == pytest.approx(1000)


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
