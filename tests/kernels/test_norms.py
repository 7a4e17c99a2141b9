"""The norm and the clipping factor against torch's own, in float64."""

import math

import pytest
import torch

from hotloop.kernels import Tables, clip_norm, clip_norm_eager, scale_all
from hotloop.kernels.tables import is_dense


def tensors(dtype=torch.float32, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    sizes = [(3,), (65, 17), (4096,), (9001,), (1,)]
    return [(scale * torch.randn(s, generator=generator)).to(dtype) for s in sizes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_norm_and_factor_are_torchs(dtype, scale):
    given = tensors(dtype, scale)
    exact = torch.nn.utils.get_total_norm([t.double() for t in given])
    norm, factor = clip_norm(given, 1.0, tables=Tables())
    assert norm.dtype == factor.dtype == torch.float32
    assert norm.item() == pytest.approx(exact.item(), rel=1e-6)
    assert factor.item() == pytest.approx(min(1.0, 1.0 / (exact.item() + 1e-6)), rel=1e-6)


def test_inverse_is_in_the_norm_and_in_the_factor():
    given = tensors()
    plain, _ = clip_norm(given, math.inf)
    norm, factor = clip_norm(given, 1.0, inverse=torch.tensor(0.125))
    assert norm.item() == pytest.approx(plain.item() / 8, rel=1e-6)
    assert factor.item() == pytest.approx(0.125 / norm.item(), rel=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_shows_in_the_norm(bad):
    given = tensors()
    given[2][7] = bad
    norm, _ = clip_norm(given, 1.0)
    assert not math.isfinite(norm.item())
    assert not math.isfinite(clip_norm_eager(given, 1.0)[0].item())


def test_types_may_be_mixed():
    given = [*tensors(torch.float32), *tensors(torch.bfloat16), *tensors(torch.float16)]
    exact = torch.nn.utils.get_total_norm([t.double() for t in given])
    assert clip_norm(given, 1.0, tables=Tables())[0].item() == pytest.approx(exact.item(), rel=1e-6)
    expected = [(t.float() * 0.3).to(t.dtype) for t in given]
    scale_all(given, torch.tensor(0.3))
    for a, b in zip(given, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2**-7 if a.dtype != torch.float32 else 0, atol=0)


def test_memory_with_gaps_and_other_orders_counts_what_is_in_it():
    whole = torch.randn(8, 6, 5)
    given = [
        whole[:, ::2],
        whole.permute(2, 0, 1),
        torch.ones(1).expand(7),
        whole.to(memory_format=torch.contiguous_format),
    ]
    exact = torch.nn.utils.get_total_norm([t.double() for t in given])
    assert clip_norm(given, 1.0)[0].item() == pytest.approx(exact.item(), rel=1e-6)
    assert [is_dense(t) for t in given] == [False, True, False, True]


def test_infinite_bound_only_measures():
    assert clip_norm(tensors(), math.inf)[1].item() == 1.0


def test_scale_all_is_a_product():
    given = tensors()
    expected = [t * 0.3 for t in given]
    scale_all(given, torch.tensor(0.3))
    assert all(torch.equal(a, b) for a, b in zip(given, expected, strict=True))
