"""Pooling, batch norm and SiLU: the twin against torch's modules, the programs against the twin."""

import os

import pytest
import torch
from torch import nn

from hotloop.errors import KernelError
from hotloop.kernels.language import runs_on, triton
from hotloop.kernels.pooled_norm import global_max, pooled_norm_silu

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
programs = pytest.mark.skipif(not runs_on(DEVICE), reason="Triton runs no programs here")


def run(pool, shape, dtype, eager, training=True, **more):
    g = torch.Generator().manual_seed(0)
    C = shape[1]
    x = (
        (torch.randn(shape, generator=g) * 2 + 1.5)
        .to(DEVICE, dtype)
        .contiguous(memory_format=torch.channels_last)
    )
    bias = torch.randn(C, generator=g).to(DEVICE).requires_grad_(training)
    mean, var = torch.randn(C, generator=g).to(DEVICE), torch.rand(C, generator=g).to(DEVICE) + 0.5
    x.requires_grad_(training)
    out = pooled_norm_silu(
        x, bias, mean, var, pool=pool, training=training, momentum=0.4, eager=eager, **more
    )
    if training:
        out.backward(torch.randn(out.shape, generator=g).to(DEVICE, dtype))
    return {"out": out.detach(), "x": x.grad, "bias": bias.grad, "mean": mean, "var": var}


@pytest.mark.parametrize("pool", [True, False])
def test_the_twin_is_torchs_modules(pool):
    found = run(pool, (3, 64, 7, 5), torch.float32, True)
    g = torch.Generator().manual_seed(0)
    x = (torch.randn(3, 64, 7, 5, generator=g) * 2 + 1.5).requires_grad_()
    norm = nn.BatchNorm2d(64, momentum=0.4)
    norm.bias.data = torch.randn(64, generator=g)
    norm.running_mean, norm.running_var = torch.randn(64, generator=g), torch.rand(64, generator=g) + 0.5
    out = nn.SiLU()(norm(nn.MaxPool2d(2)(x) if pool else x))
    out.backward(torch.randn(out.shape, generator=g))
    for name, wanted in (
        ("out", out),
        ("x", x.grad),
        ("bias", norm.bias.grad),
        ("mean", norm.running_mean),
        ("var", norm.running_var),
    ):
        assert torch.allclose(found[name].cpu(), wanted, rtol=1e-4, atol=2e-5), name


@programs
@pytest.mark.parametrize("pool", [True, False])
@pytest.mark.parametrize("shape", [(3, 64, 7, 7), (2, 64, 6, 5), (2, 192, 4, 4), (300, 64, 3, 3)])
def test_the_programs_are_the_twin_within_rounding(shape, pool):
    for dtype, bound in ((torch.float32, 2e-5), (torch.float16, 2e-3)):
        ours, twin = run(pool, shape, dtype, False), run(pool, shape, dtype, True)
        for name, value in ours.items():
            error = (value.double() - twin[name].double()).norm() / twin[name].double().norm()
            assert error < bound, (name, dtype, error)
        assert torch.equal(run(pool, shape, dtype, False)["x"], ours["x"])
        a, b = (run(pool, shape, dtype, eager, training=False)["out"].double() for eager in (False, True))
        assert (a - b).norm() / b.norm() < bound


@programs
@pytest.mark.parametrize("shape", [(5, 10, 3, 3), (33, 64, 2, 2), (17, 70, 1, 1), (3, 8, 4, 2)])
def test_the_largest_value_and_its_gradient_are_torchs(shape):
    """Of equal values, which halves make frequent, the first has the gradient."""
    g = torch.Generator().manual_seed(0)
    x = (torch.randn(shape, generator=g).round() / 2).to(DEVICE).contiguous(memory_format=torch.channels_last)
    slope = torch.randn(shape[:2], generator=g).to(DEVICE)
    results = []
    for eager in (False, True):
        own = x.clone().requires_grad_()
        out = global_max(own, eager=eager)
        out.backward(slope)
        results.append((out.detach(), own.grad))
    flat = x.flatten(2)
    assert torch.equal(results[0][0], flat.amax(2))
    first = (flat == flat.amax(2, keepdim=True)).int().argmax(2, keepdim=True)
    assert torch.equal(results[0][1].flatten(2), torch.zeros_like(flat).scatter(2, first, slope[..., None]))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("eager", [True, pytest.param(False, marks=programs)])
@pytest.mark.parametrize("training", [True, False])
def test_an_edge_is_what_a_padding_would_add(eager, training):
    """Then a convolution and a pooling of odd images: without padding, the same values and gradients as with it."""
    g = torch.Generator().manual_seed(0)
    start, filters = torch.randn(3, 64, 5, 5, generator=g).to(DEVICE), torch.randn(8, 64, 3, 3, generator=g)
    filters, slope = filters.to(DEVICE), torch.randn(3, 8, 2, 2, generator=g).to(DEVICE)
    found = []
    for edge in (True, False):
        x = start.clone(memory_format=torch.channels_last).requires_grad_(training)
        bias = torch.full((64,), 0.3, device=DEVICE, requires_grad=training)
        statistics = torch.zeros(64, device=DEVICE), torch.ones(64, device=DEVICE)
        y = pooled_norm_silu(x, bias, *statistics, pool=False, training=training, edge=edge, eager=eager)
        z = nn.functional.max_pool2d(nn.functional.conv2d(y, filters, padding=0 if edge else 1), 2)
        assert y.shape[2:] == ((6, 6) if edge else (5, 5))
        if training:
            z.backward(slope)
        found.append([z.detach(), *statistics, *((x.grad, bias.grad) if training else ())])
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-4)
    with pytest.raises(KernelError, match="edge=True is not for pool=True"):
        pooled_norm_silu(start, bias, *statistics, pool=True, training=training, edge=True)


@pytest.mark.parametrize("shape", [(1, 64, 1, 1), (1, 64, 2, 2)])
def test_one_value_of_a_channel_has_no_deviation(shape):
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        run(shape[-1] == 2, shape, torch.float32, False)


def test_no_images_give_none():
    found = run(True, (0, 64, 4, 4), torch.float32, False)
    assert found["out"].shape == (0, 64, 2, 2)
    assert found["bias"].tolist() == [0.0] * 64


@programs
@pytest.mark.parametrize("pool", [True, False])
@pytest.mark.parametrize("place", [0, 1, 4, 5])
def test_what_is_no_number_is_not_pooled_away(pool, place):
    x = torch.randn(2, 64, 4, 4, generator=torch.Generator().manual_seed(0))
    x[1, 7].view(-1)[place] = float("nan")
    x = x.to(DEVICE).contiguous(memory_format=torch.channels_last)
    found, wanted = (
        pooled_norm_silu(
            x, *(torch.zeros(64, device=DEVICE) for _ in range(2)), var, pool=pool, training=True, eager=eager
        )
        for eager, var in ((False, torch.ones(64, device=DEVICE)), (True, torch.ones(64, device=DEVICE)))
    )
    assert torch.equal(found.isnan(), wanted.isnan())
    assert found.isnan().any()
    assert torch.equal(global_max(x).isnan(), global_max(x, eager=True).isnan())


@pytest.mark.skipif(triton is None or "TRITON_INTERPRET" in os.environ, reason="Triton compiles nothing here")
@pytest.mark.parametrize("pool", [True, False])
@pytest.mark.parametrize("kind", ["fp16", "bf16", "fp32"])
def test_sums_fit_the_shared_memory_of_gpus_that_have_least(kind, pool):
    """99 KiB for a program of capability 8.6, 8.9 and 12.0; compiled for the first, whatever runs here."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from hotloop.kernels.programs.pooled_norm import pool_and_sum, slope_and_sum

    size = {"POOL": pool, "EDGE": not pool, "FAST": kind != "fp32", "BP": 64, "BC": 64}
    for program in (pool_and_sum, slope_and_sum):
        names = program.arg_names
        constants = {(i,): size[name] for i, name in enumerate(names) if name in size}
        types = dict.fromkeys(("x", "pooled", "gradient"), f"*{kind}") | {
            "which": "*i8" if pool else f"*{kind}"
        }
        types |= dict.fromkeys(("partial", "mean_guess", "statistics", "bias"), "*fp32")
        signature = {n: "constexpr" if n in size else types.get(n, "i32") for n in names}
        # as launched: allocations begin at multiples of 16 bytes, and channels come in multiples of 64
        aligned = [i for i, n in enumerate(names) if signature[n].startswith("*") or n == "C"]
        attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
        source = ASTSource(program, signature, constants, attributes)
        found = triton.compile(source, target=GPUTarget("cuda", 86, 32), options={"num_warps": 8})
        assert found.metadata.shared <= 99 << 10
