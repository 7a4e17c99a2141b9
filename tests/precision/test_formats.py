"""Precisions: what a device can do, and what the refusal of the rest says."""

import pytest
import torch

import hotloop
from hotloop.errors import PrecisionError
from hotloop.hardware import precisions
from hotloop.precision import autocast_context, find_precision, outputs_to_float32

CPU = torch.device("cpu")


@pytest.fixture
def flags(monkeypatch):
    def choose(*names):
        monkeypatch.setattr(precisions, "_cpu_flags", lambda: frozenset(names))
        precisions._cpu_precisions.cache_clear()

    yield choose
    precisions._cpu_precisions.cache_clear()


def test_a_plain_cpu_has_no_fp16_and_says_what_it_has(flags):
    flags("avx2")
    with pytest.raises(PrecisionError) as caught:
        hotloop.Loop("fp16", device="cpu", record=False)
    assert "fp16" in str(caught.value)
    assert "bf16, fp32" in str(caught.value)
    with pytest.raises(PrecisionError, match="tf32"):
        find_precision("tf32", CPU)
    assert precisions.supported_precisions(CPU)["bf16"] == "emulated, slow"


def test_a_cpu_with_fp16_in_silicon_trains_in_it(flags):
    flags("avx512_fp16", "avx512_bf16")
    assert find_precision("fp16", CPU).scaled
    assert precisions.supported_precisions(CPU)["bf16"] == "in silicon"
    loop = hotloop.Loop("fp16", device="cpu", record=False)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = loop.prepare(model, optimizer)
    before = model.weight.detach().clone()
    x = torch.ones(2, 4)
    out = model(x)
    sign = out[0, 0].sign()
    loss = out.square().mean()
    loop.backward(loss)
    optimizer.step()
    loop.end_training()
    assert torch.isfinite(model.weight).all()
    assert not torch.equal(model.weight, before)
    # the gradient of mean(out^2) for rows of ones is 2 out; the scale of 65536 has gone from it again
    torch.testing.assert_close(model.weight, before - 0.1 * 2.0 * loss.sqrt() * sign, rtol=1e-2, atol=1e-3)


def test_autocast_changes_the_dtype_and_nothing_else():
    linear = torch.nn.Linear(4, 2)
    with autocast_context(CPU, torch.bfloat16):
        assert linear(torch.ones(1, 4)).dtype == torch.bfloat16
    with autocast_context(CPU, None):
        assert linear(torch.ones(1, 4)).dtype == torch.float32


def test_outputs_come_back_in_float32_whatever_holds_them():
    half = torch.ones(2, dtype=torch.bfloat16)
    ids = torch.ones(2, dtype=torch.int64)
    out = outputs_to_float32({"a": [half, ids], "b": (half, "text", None)})
    assert out["a"][0].dtype == out["b"][0].dtype == torch.float32
    assert out["a"][1] is ids
    assert out["b"][1:] == ("text", None)
    same = {"x": torch.ones(1)}
    assert outputs_to_float32(same) is same


def test_tf32_is_a_switch_of_torch(monkeypatch):
    monkeypatch.setattr(precisions, "_cpu_precisions", lambda: (("fp32", ""), ("tf32", "")))
    before = torch.get_float32_matmul_precision()
    try:
        hotloop.Loop("tf32", device="cpu", record=False).end_training()
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
        torch.backends.cudnn.allow_tf32 = True
