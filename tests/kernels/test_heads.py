"""Heads split, normed and rotated: against the formula in float64, forwards and back."""

import math

import pytest
import torch
import torch.nn.functional as F

from hotloop.errors import KernelError
from hotloop.kernels import rotary_tables, split_heads, split_heads_eager


def draw(shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def by_hand(qkv, heads, norm, eps=1e-6):
    """Element by element, with complex numbers for the rotation."""
    B, T, width = qkv.shape
    D = width // (3 * heads)
    parts = qkv.double().view(B, T, 3, heads, D)
    out = []
    for role in range(3):
        x = parts[:, :, role]
        if role < 2:
            if norm:
                x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
            z = torch.complex(x[..., : D // 2], x[..., D // 2 :])
            rate = torch.tensor([10000.0 ** (-i / (D // 2)) for i in range(D // 2)], dtype=torch.float64)
            angle = torch.arange(T, dtype=torch.float64)[:, None] * rate
            z = z * torch.polar(torch.ones_like(angle), angle)[:, None]
            x = torch.cat((z.real, z.imag), -1)
        out.append(x.transpose(1, 2))
    return out


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-6), (torch.float32, 1e-5), (torch.bfloat16, 1e-2)]
)
@pytest.mark.parametrize("function", [split_heads, split_heads_eager])
def test_it_is_the_formula(function, dtype, bound, norm):
    B, T, heads, D = 2, 9, 3, 10
    qkv = draw((B, T, 3 * heads * D), dtype)
    cos, sin = rotary_tables(12, D)
    found = function(qkv, cos, sin, heads, norm=norm)
    slopes = [draw((B, heads, T, D), dtype, seed).detach() for seed in (1, 2, 3)]
    (gradient,) = torch.autograd.grad(found, qkv, slopes)
    exact = qkv.detach().double().requires_grad_()
    wanted = by_hand(exact, heads, norm)
    (right,) = torch.autograd.grad(wanted, exact, [s.double() for s in slopes])
    for a, b in (*zip(found, wanted, strict=True), (gradient, right)):
        assert a.shape == b.shape
        assert a.dtype == dtype
        assert (a.double() - b).norm() <= bound * b.norm()


def test_attention_sees_distances_only():
    T, heads, D = 16, 2, 8
    token = draw((1, 1, 3 * heads * D), torch.float64).detach()
    cos, sin = rotary_tables(T, D)
    q, k, _ = split_heads(token.expand(1, T, -1), cos, sin, heads)
    scores = q @ k.mT
    for shift in range(T):
        diagonal = scores.diagonal(-shift, -2, -1)
        assert torch.allclose(diagonal, diagonal[..., :1].expand_as(diagonal), atol=1e-5)
    # turning does not change lengths: normed heads have sqrt(D)
    assert torch.allclose(q.norm(dim=-1), torch.full((), math.sqrt(D), dtype=torch.float64), atol=1e-4)


def test_it_goes_with_attention_and_compiles_as_an_operator():
    B, T, heads, D = 2, 5, 2, 4
    cos, sin = rotary_tables(T, D)
    qkv = draw((B, T, 3 * heads * D), torch.float32)
    F.scaled_dot_product_attention(*split_heads(qkv, cos, sin, heads), is_causal=True).sum().backward()
    assert qkv.grad is not None
    torch.library.opcheck(
        torch.ops.hotloop.split_heads.default, (qkv, cos, sin, heads, True, 1e-6),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "heads", "times"), [((2, 5, 24), 3, 5), ((2, 5), 1, 5), ((2, 5, 24), 2, 4), ((2, 5, 48), 2, 5)]
)
def test_mistakes_are_told(shape, heads, times):
    cos, sin = rotary_tables(times, 4)
    with pytest.raises(KernelError, match="split_heads"):
        split_heads(torch.zeros(shape), cos, sin, heads)
