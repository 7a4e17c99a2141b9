"""fp8 on the card that has it: products, layers, training and captured steps against float64 and the twin."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hotloop
from hotloop.errors import PrecisionError
from hotloop.precision import Precision, agreement
from hotloop.precision.float8 import Float8Numbers, multiply, quantise

pytestmark = pytest.mark.gpu

if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("needs fp8 units", allow_module_level=True)

E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2


def error(found: torch.Tensor, right: torch.Tensor) -> float:
    """Relative to the whole, in float64."""
    return ((found.double() - right.double()).norm() / right.double().norm()).item()


@pytest.mark.parametrize("left", [E4, E5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_units_and_the_twin_agree(left: torch.dtype, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(256, 512, device="cuda"), torch.randn(128, 512, device="cuda")
    a8, fa = quantise(a, left)
    b8, fb = quantise(b, E4)
    exact = (a8.double() @ b8.double().t()) * fa.double() * fb.double()
    found = multiply(a8, b8.t(), fa, fb, dtype)
    twin = multiply(a8, b8.t(), fa, fb, dtype, emulated=True)
    # sums are kept in float32 (the units: a little less), bf16 rounds to 8 bits
    bound = 3e-3 if dtype == torch.bfloat16 else 1e-3
    assert error(found, exact) < bound
    assert error(twin, exact) < bound


@pytest.mark.parametrize("way", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_layer_against_float64(way: str, compiled: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 20, 512, device="cuda", requires_grad=True)
    linear = nn.Linear(512, 256, device="cuda")
    numbers = Float8Numbers(rowwise=way == "rowwise")
    function = torch.compile(numbers.linear) if compiled else numbers.linear
    with torch.autocast("cuda", torch.bfloat16):
        y = function(x, linear.weight, linear.bias)
    assert y.dtype == torch.bfloat16
    grad = torch.randn_like(y)
    y.backward(grad)
    wide = [t.detach().double().requires_grad_() for t in (x, linear.weight, linear.bias)]
    F.linear(*wide).backward(grad.double())
    assert error(y, F.linear(*wide)) < 0.05
    for mine, right in zip((x, linear.weight, linear.bias), wide, strict=True):
        assert mine.grad is not None
        assert right.grad is not None
        # e4m3 rounds to 4 bits, e5m2 to 3: 2.7 % and 5.4 % at most per number, less in a sum
        assert error(mine.grad, right.grad) < 0.08


def train(precision: str | Precision, mode: str, steps: int = 12, **arguments: object) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 64), nn.Linear(64, 16)
    )
    loop = hotloop.Loop(precision, record=False, capture=mode, seed=0, **arguments)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = loop.prepare(model, optimizer)

    @loop.capture
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        loop.backward(loss)
        loop.update(optimizer, max_norm=1.0)
        return loss

    generator = torch.Generator("cuda").manual_seed(1)
    losses = []
    for _ in range(steps):
        x = torch.randn(96, 64, device="cuda", generator=generator)
        losses.append(step(x, x[:, :16].argmax(1)))
    assert step.reason is None or mode == "off"
    loop.end_training()
    return torch.stack(losses).tolist()


FP8 = Precision("fp8", layers="all")


def test_a_captured_step_in_fp8_is_the_eager_one() -> None:
    assert train(FP8, "graph") == train(FP8, "off")


def test_fp8_learns_as_bf16_does() -> None:
    mine, right = train(FP8, "full", 60), train("bf16", "graph", 60)
    assert mine[-1] < 0.6 * mine[0]
    assert abs(sum(mine[-10:]) - sum(right[-10:])) / 10 < 0.1


@pytest.mark.parametrize("precision", ["bf16-true", Precision("fp8", layers="all", weights="bf16")])
def test_a_captured_step_with_16_bit_weights_is_the_eager_one(precision: str | Precision) -> None:
    mine = train(precision, "graph")
    assert mine == train(precision, "off")
    right = train("bf16" if precision == "bf16-true" else FP8, "off")
    # clipping multiplies gradients of 16 bits: one more rounding
    assert max(abs(a - b) for a, b in zip(mine, right, strict=True)) < 0.02


def test_gradients_of_16_bit_weights_are_summed_in_fp32() -> None:
    if not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("this torch ties gradients to their parameter's dtype")
    losses = []
    for precision in ("bf16-true", "bf16"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 16))
        loop = hotloop.Loop(precision, record=False, accumulation=4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = loop.prepare(model, optimizer)
        generator = torch.Generator("cuda").manual_seed(1)
        rows = []
        for _ in range(16):
            x = torch.randn(32, 64, device="cuda", generator=generator)
            with loop.accumulate():
                loss = F.cross_entropy(model(x), x[:, :16].argmax(1))
                loop.backward(loss)
                loop.update(optimizer, max_norm=1.0)
            rows.append(loss.detach())
        loop.end_training()
        losses.append(torch.stack(rows))
    assert torch.equal(*losses)


def test_errors_of_fp8_are_shown_module_by_module() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).cuda()
    random = torch.cuda.get_rng_state()
    table = agreement(model, torch.randn(48, 64), FP8, reference="float64")
    twin = agreement(model, torch.randn(48, 64), Precision("fp8", layers="all", emulated=True))
    assert 0.01 < table.rows[0].worst < 0.2
    assert table.rows[0].worst == pytest.approx(twin.rows[0].worst, rel=0.5)
    assert torch.equal(random, torch.cuda.get_rng_state())


def test_formats_of_other_cards_are_refused() -> None:
    if torch.cuda.get_device_capability() >= (10, 0):
        pytest.skip("this card has them")
    with pytest.raises(PrecisionError, match="Blackwell"):
        hotloop.Loop("nvfp4", record=False)


def test_auto_is_bf16_here() -> None:
    loop = hotloop.Loop("auto", record=False)
    assert loop.precision.name == "bf16"
    assert "precision auto is bf16" in loop.explain()
    loop.end_training()
