"""The table of errors: right values, worst first, and a model that is left as it was."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hotloop
from hotloop.errors import PrecisionError, SettingError
from hotloop.precision import Precision, agreement, formats


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(inplace=True), nn.Dropout(0.5)
        )
        self.head = nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


@pytest.fixture
def model() -> Net:
    torch.manual_seed(0)
    return Net()


def test_errors_of_one_layer_are_those_of_its_arithmetic() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(64, 32)
    x, target = torch.randn(16, 64), torch.randn(16, 32)
    found = agreement(linear, (x, target), "bf16", loss=lambda m, b: F.mse_loss(m(b[0]), b[1]))
    (row,) = found.rows
    right = linear(x)
    rounded = F.linear(x.bfloat16(), linear.weight.bfloat16(), linear.bias.bfloat16())
    assert row.output == pytest.approx(((rounded.float() - right).norm() / right.norm()).item(), rel=1e-4)
    # by hand: gradients of the mean square, with everything that enters a product rounded
    gradient = 2 * (rounded.float() - target) / target.numel()
    weights = gradient.bfloat16().t() @ x.bfloat16()
    exact_gradient = 2 * (right - target) / target.numel()
    exact = torch.cat([(exact_gradient.t() @ x).flatten(), exact_gradient.sum(0)])
    mine = torch.cat([weights.float().flatten(), gradient.bfloat16().sum(0).float()])
    assert row.weight_gradient == pytest.approx(((mine - exact).norm() / exact.norm()).item(), rel=0.2)
    assert (row.name, row.kind) == ("", "Linear")
    assert found.reference_loss == pytest.approx(F.mse_loss(right, target).item())
    assert found.loss == pytest.approx(F.mse_loss(rounded.float(), target).item(), rel=1e-5)


def test_rows_are_sorted_and_precisions_rank(model: Net) -> None:
    x = torch.randn(32, 16)
    tables = {
        name: agreement(model, x, precision)
        for name, precision in (
            ("fp32", "fp32"),
            ("bf16", "bf16"),
            ("bf16-true", "bf16-true"),
            ("fp8", Precision("fp8", layers="all", emulated=True)),
        )
    }
    worst = {name: table.rows[0].worst for name, table in tables.items()}
    assert worst["fp32"] == 0.0
    assert 1e-4 < worst["bf16"] < 0.03
    assert worst["bf16"] < worst["fp8"] < 0.3
    for table in tables.values():
        errors = [row.worst for row in table.rows]
        assert errors == sorted(errors, reverse=True)
    names = {row.name for row in tables["bf16"].rows}
    assert names == {"", "body", "body.0", "body.1", "body.2", "body.3", "head"}
    text = str(tables["bf16"])
    assert text.startswith("bf16 against fp32: loss ")
    assert "(the model)" in text
    plain = json.loads(json.dumps(tables["fp8"].to_dict()))
    assert plain["rows"][0]["kind"] == tables["fp8"].rows[0].kind


def test_float64_shows_what_fp32_rounds(model: Net) -> None:
    found = agreement(model, torch.randn(32, 16), "fp32", reference="float64")
    assert 0 < found.rows[0].worst < 1e-5


@pytest.mark.parametrize("prepared", [False, True])
def test_the_model_is_left_as_it_was(model: Net, prepared: bool) -> None:
    if prepared:
        loop = hotloop.Loop("bf16", device="cpu", record=False)
        loop.prepare(model)
    calls = []
    model.head.register_forward_hook(lambda *_: calls.append(1))
    model.head.weight.grad = torch.ones_like(model.head.weight)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    hooks = [(len(m._forward_hooks), len(m._backward_hooks)) for m in model.modules()]
    random, kind, matmul = torch.get_rng_state(), type(model), torch.get_float32_matmul_precision()
    agreement(model, torch.randn(32, 16, generator=torch.Generator().manual_seed(0)), "bf16-true")
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert hooks == [(len(m._forward_hooks), len(m._backward_hooks)) for m in model.modules()]
    assert torch.equal(torch.get_rng_state(), random)
    assert (type(model), torch.get_float32_matmul_precision()) == (kind, matmul)
    assert model.training
    assert model.body[3].training
    assert model.head.weight.grad.eq(1).all()
    assert model.body[0].weight.grad is None


def test_batches_of_every_form() -> None:
    class Keyed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.lin(x)
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    found = agreement(Keyed(), {"x": torch.randn(3, 4), "labels": torch.tensor([0, 1, 2])})
    assert {row.name for row in found.rows} == {"", "lin"}
    assert agreement(nn.Linear(4, 4), [torch.randn(3, 4), torch.tensor([0])]).rows
    with pytest.raises(PrecisionError, match="loss="):
        agreement(nn.Identity(), torch.tensor([1, 2]))
    with pytest.raises(SettingError, match="fp32, float64"):
        agreement(nn.Linear(4, 4), torch.randn(3, 4), reference="fp16")
    with pytest.raises(PrecisionError, match="emulated=True"):
        agreement(nn.Linear(4, 4), torch.randn(3, 4), "fp8")


def test_what_cannot_be_compared_is_said() -> None:
    class Fickle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lin(self.lin(x)) if torch.is_autocast_enabled("cpu") else self.lin(x)

    with pytest.raises(PrecisionError, match="'lin' was not called alike"):
        agreement(Fickle(), torch.randn(3, 4))
    held = nn.Linear(4, 4)
    held.cache = held.weight * 2
    with pytest.raises(PrecisionError, match="cannot be copied"):
        agreement(held, torch.randn(3, 4))


def test_tables_are_kept_in_the_record_and_shown(
    model: Net, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from hotloop.cli import main

    loop = hotloop.Loop("bf16", device="cpu", record=tmp_path / "run")
    loop.prepare(model)
    x = torch.randn(8, 16)
    tables = [agreement(model, x, loop=loop), agreement(model, x, "bf16-true", loop=loop)]
    assert [table.precision.split()[0] for table in tables] == ["bf16", "bf16-true"]
    assert tables[0] == agreement(model, x, "bf16")
    with torch.no_grad():
        model.head.weight[0, 0] = torch.nan
    tables.append(agreement(model, x, reference="float64", loop=loop))
    loop.end_training()
    kept = json.loads((tmp_path / "run" / "run.json").read_text())["agreement"]
    assert kept[:2] == [table.to_dict() for table in tables[:2]]
    assert kept[2]["rows"][0]["output"] == "NaN"
    assert main(["runs", "show", str(tmp_path / "run")]) == 0
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("agreement")]
    text = [line.removeprefix("agreement").strip() for line in shown]
    assert text == [line.strip() for table in tables for line in str(table).splitlines()]


def test_a_loop_without_a_record_gives_its_precision(model: Net) -> None:
    loop = hotloop.Loop("bf16-true", device="cpu", record=False)
    assert agreement(model, torch.randn(4, 16), loop=loop).precision.startswith("bf16-true ")


def test_numbers_that_are_not_finite_come_first() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.no_grad():
        model[1].weight[0, 0] = torch.nan
    found = agreement(model, torch.randn(3, 4))
    assert found.rows[0].worst == float("inf")
    assert "nan" in str(found)


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e3])
def test_fp16_is_looked_at_with_its_loss_scaled_as_in_a_loop(
    monkeypatch: pytest.MonkeyPatch, size: float
) -> None:
    """Gradients that fp16 cannot hold unscaled keep its eleven bits; those that overflow scaled are scaled less."""
    monkeypatch.setattr(formats, "supported_precisions", lambda device: {"fp32": "", "fp16": "for this test"})
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    table = agreement(
        model, torch.randn(64, 16), "fp16", loss=lambda m, b: m(b).square().mean() * size, reference="float64"
    )
    assert table.precision == "fp16"
    for row in table.rows:
        errors = [e for e in (row.output, row.output_gradient, row.weight_gradient) if e is not None]
        assert 2.0**-14 < max(errors) < 2.0**-8
        assert table.loss == pytest.approx(table.reference_loss, rel=1e-3)


def test_an_output_that_fp16_cannot_hold_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "supported_precisions", lambda device: {"fp32": "", "fp16": "for this test"})
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    nn.init.constant_(model[0].weight, 1e5)
    table = agreement(model, torch.ones(2, 4), "fp16")
    assert table.rows[0].worst == math.inf
