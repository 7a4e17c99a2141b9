"""Layer norm and GELU against torch's own, in float64 and in training types, forwards and back."""

import pytest
import torch

from hotloop.errors import KernelError
from hotloop.kernels import bias_gelu, bias_gelu_eager, column_sums, layer_norm, layer_norm_eager


def norm_inputs(dtype, *, branch_dtype=None, branch=True, bias=True, shift=True, shape=(3, 5, 40)):
    generator = torch.Generator().manual_seed(0)

    def draw(*size, kind=dtype):
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(kind).requires_grad_()

    width = shape[-1]
    return {
        "x": draw(*shape),
        "weight": draw(width),
        "shift": draw(width) if shift else None,
        "branch": draw(*shape, kind=branch_dtype or dtype) if branch else None,
        "branch_bias": draw(width) if bias and branch else None,
    }


def results(function, given, used=(1.0, 2.0)):
    added, out = function(**given)
    generator = torch.Generator().manual_seed(1)
    loss = sum(
        (k * t.double() * torch.randn(t.shape, generator=generator, dtype=torch.float64)).sum()
        for k, t in zip(used, (added, out), strict=True)
        if k
    )
    wanted = {name: v for name, v in given.items() if v is not None}
    grads = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    return {"added": added.detach(), "out": out.detach(), **dict(zip(wanted, grads, strict=True))}


@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize(("branch", "bias"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("used", [(1.0, 2.0), (0, 1.0), (1.0, 0)])
def test_norm_is_torchs_in_float64(branch, bias, shift, used):
    given = norm_inputs(torch.float64, branch=branch, bias=bias, shift=shift)
    ours, exact = results(layer_norm, given, used), results(layer_norm_eager, given, used)
    for name, value in exact.items():
        if value is not None and ours[name] is not None:
            torch.testing.assert_close(ours[name], value, rtol=1e-9, atol=1e-10)
        else:
            # unused by torch; a sum over nothing here
            assert ours[name] is None or not ours[name].any()


@pytest.mark.parametrize(
    ("dtype", "branch_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("shape", [(3, 5, 40), (7, 384), (2, 1, 1000)])
def test_norm_in_training_types_is_near_float64(dtype, branch_dtype, shape):
    given = norm_inputs(dtype, branch_dtype=branch_dtype, shape=shape)
    ours = results(layer_norm, given)
    exact = results(layer_norm_eager, {k: v.detach().double().requires_grad_() for k, v in given.items()})
    for name, value in exact.items():
        bound = 1e-2 if torch.bfloat16 in (dtype, ours[name].dtype) else 2e-6
        assert (ours[name].double() - value).norm() <= bound * value.norm(), name
        if name in given:
            assert ours[name].dtype == given[name].dtype


def test_each_gradient_has_its_own_type():
    given = norm_inputs(torch.bfloat16)
    given["weight"], given["shift"] = (
        given[n].detach().float().requires_grad_() for n in ("weight", "shift")
    )
    _, out = layer_norm(**given)
    kinds = [g.dtype for g in torch.autograd.grad(out.float().sum(), list(given.values()))]
    assert kinds == [v.dtype for v in given.values()]


def test_norm_may_leave_in_another_type():
    given = norm_inputs(torch.float32)
    added, out = layer_norm(**given, dtype=torch.bfloat16)
    assert (added.dtype, out.dtype) == (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 5, 40), (130, 600)])
def test_gelu_is_near_float64(dtype, bias, shape):
    generator = torch.Generator().manual_seed(0)
    z = (3 * torch.randn(shape, generator=generator)).to(dtype).requires_grad_()
    b = torch.randn(shape[-1], generator=generator).to(dtype).requires_grad_() if bias else None
    slope = torch.randn(shape, generator=generator).to(dtype)
    inputs = [z, b] if bias else [z]
    out = bias_gelu(z, b)
    grads = torch.autograd.grad(out, inputs, slope)
    wide = [v.detach().double().requires_grad_() for v in inputs]
    exact = bias_gelu_eager(*wide)
    exact_grads = torch.autograd.grad(exact, wide, slope.double())
    bound = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 6e-3}[dtype]
    for a, e in zip((out, *grads), (exact, *exact_grads), strict=True):
        assert a.dtype == dtype
        assert (a.double() - e).norm() <= bound * e.norm()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1000, 40), (3, 1152), (1, 1)])
def test_column_sums_are_near_float64(dtype, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    sums, exact = column_sums(x), x.double().sum(0)
    assert sums.dtype == dtype
    bound = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 4e-3}[dtype]
    assert (sums.double() - exact).norm() <= bound * exact.norm()


def test_misfits_are_named():
    x = torch.zeros(4, 8)
    with pytest.raises(KernelError, match=r"weight \(7,\)"):
        layer_norm(x, torch.ones(7))
    with pytest.raises(KernelError, match="without a branch"):
        layer_norm(x, torch.ones(8), branch_bias=torch.ones(8))
    with pytest.raises(KernelError, match=r"bias \(7,\)"):
        bias_gelu(x, torch.ones(7))
