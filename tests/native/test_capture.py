"""Capturing: export first, a recording where that fails, clear words where neither helps."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hotloop import native
from hotloop.native.capture import capture_model
from hotloop.native.normalise import normalise

torch.set_num_threads(1)


class Branching(nn.Module):
    """Branches on a parameter's value, which export cannot do (as bilinear normalisation layers do)."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.tensor([0.3]))
        self.conv = nn.Conv1d(4, 6, 3)
        self.lstm = nn.LSTM(6, 8, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate[0] < 0:
            self.gate = nn.Parameter(torch.tensor([0.01]))
        y = torch.tanh(self.conv(x)).transpose(1, 2) * self.gate
        y = self.norm(self.lstm(y)[0]).mean(1)
        return torch.softmax(self.head(y), -1)


def test_what_export_refuses_is_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    compiled = native.build(Branching(), torch.randn(1, 4, 9), out=tmp_path / "branching.so")
    assert compiled.facts["description"]["captured_by"] == "recorder"
    assert compiled.facts["report"]["worst_relative_error"] <= 1e-5
    said = capsys.readouterr()
    assert "recorded from one run, because torch.export failed" in said.out
    assert not said.err


def test_an_exported_program_is_taken_as_it_is(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 5), nn.Tanh()).eval(), torch.randn(2, 6)
    program = torch.export.export(model, (x,))
    compiled = native.build(program, (), out=tmp_path / "program.so", quiet=True)
    np.testing.assert_allclose(compiled(x), model(x).detach().numpy(), rtol=1e-5)


def test_composite_operations_stay_whole() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(3, 4, 2, batch_first=True)
            self.norm = nn.LayerNorm(4)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.gelu(self.norm(self.lstm(x)[0]))

    calls = normalise(capture_model(Model(), (torch.randn(1, 50, 3),))).calls
    assert [call.op for call in calls] == ["lstm.input", "layer_norm", "gelu"]
    assert calls[1].origin.module == "norm"
    assert Path(__file__).name in calls[1].origin.line


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.rfft(self.inner(x)).real


def test_an_unsupported_operation_is_named_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(native.UnsupportedOpError, match="no C form for fft_rfft") as caught:
        native.build(Odd(), torch.randn(1, 8), out=tmp_path / "odd.so")
    assert Path(__file__).name in str(caught.value)
    assert "torch.fft.rfft(self.inner(x)).real" in str(caught.value)


def test_the_nearest_supported_form_is_named(tmp_path: Path) -> None:
    class Nearly(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.logcumsumexp(x, 1)

    with pytest.raises(native.UnsupportedOpError, match=r"Nearest supported: cumsum"):
        native.build(Nearly(), torch.randn(1, 3), out=tmp_path / "nearly.so")


def test_what_a_module_computed_for_itself_is_copied(tmp_path: Path) -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(nn.utils.weight_norm(nn.Conv1d(2, 3, 2)), nn.ReLU())
    x = torch.randn(1, 2, 6)
    model(x)  # the old weight norm keeps a weight with a history, which deepcopy refuses
    compiled = native.build(model, x, out=tmp_path / "normed.so", quiet=True)
    np.testing.assert_allclose(compiled(x), model(x).detach().numpy(), rtol=1e-5, atol=1e-6)


def test_what_is_no_model_with_values_is_named(tmp_path: Path) -> None:
    x, out = torch.randn(1, 4), tmp_path / "none.so"
    for model, word in (
        (nn.Linear(4, 3, device="meta"), "'weight' is on the meta device"),
        (nn.LazyLinear(3), "'weight' has no shape yet"),
        (torch.nn.functional.relu, "is a function; give an nn.Module"),
    ):
        with warnings.catch_warnings(), pytest.raises(native.BuildError, match=word):
            warnings.simplefilter("ignore")
            native.build(model, x, out=out, quiet=True)  # type: ignore[arg-type]


def test_nested_outputs_are_given_flat_and_what_is_no_tensor_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Nested(nn.Module):
        def forward(self, x: Tensor) -> object:
            return {"total": x.sum(), "rest": (x * 2, None)}, "text"

    x = torch.randn(2, 3)
    total, double = native.build(Nested(), x, out=tmp_path / "nested.so")(x)
    assert total.shape == ()
    assert total == pytest.approx(x.sum().item(), rel=1e-5, abs=1e-6)
    assert np.array_equal(double, (x * 2).numpy())
    assert "'text'" in capsys.readouterr().out


def test_random_models_are_refused(tmp_path: Path) -> None:
    class Always(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.nn.functional.dropout(x, 0.5, training=True)

    with pytest.raises(native.UnsupportedOpError, match="random"):
        native.build(Always(), torch.randn(1, 4), out=tmp_path / "random.so")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"out": "model.dll"}, "must end in .so"),
        ({"precision": "fp8"}, "there are: fp32, int8"),
        ({"target": "sse"}, "there are: native, avx512vnni"),
        ({"precision": "int8"}, "needs calibration="),
    ],
)
def test_wrong_options_are_errors(options: dict[str, str], says: str, tmp_path: Path) -> None:
    options = {"out": str(tmp_path / "m.so")} | options
    with pytest.raises(native.BuildError, match=says):
        native.build(nn.Linear(3, 3), torch.randn(1, 3), **options)  # type: ignore[arg-type]


def test_half_precision_examples_are_refused(tmp_path: Path) -> None:
    with pytest.raises(native.BuildError, match="give float32"):
        native.build(nn.Linear(3, 3), torch.randn(1, 3).half(), out=tmp_path / "m.so")


def test_a_library_that_disagrees_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hotloop.native.emit import contraction

    def forget_bias(writer: object, node: object) -> None:
        node.bias = None  # type: ignore[attr-defined]
        real(writer, node)  # type: ignore[arg-type]

    real = contraction.emit_taps
    monkeypatch.setattr("hotloop.native.emit.source.emit_taps", forget_bias)
    with pytest.raises(native.VerificationError, match="disagrees with float64 PyTorch: given inputs"):
        native.build(nn.Linear(8, 8), torch.randn(1, 8), out=tmp_path / "wrong.so")
