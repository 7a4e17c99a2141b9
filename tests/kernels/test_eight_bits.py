"""Casts both ways: fp8 numbers to the bit, their transposes, sums against float64."""

import math

import pytest
import torch

from hotloop.kernels import cast_both_ways, cast_both_ways_eager
from hotloop.kernels.language import runs_on

E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2
# Triton's interpreter loses the carry of numbers that round up to a power of two, and knows no NaN of e4m3
INTERPRETED = runs_on(torch.device("cpu"))


@pytest.mark.parametrize("dtype", [E4, E5])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(48, 32), (130, 144), (1, 16)])
def test_it_is_torchs_rounding_both_ways(dtype, given, shape):
    torch.manual_seed(0)
    x = (torch.randn(shape) * 3).to(given)
    most = torch.finfo(dtype).max
    inverse = most / x.abs().amax().float()
    if INTERPRETED:
        # numbers that need no rounding
        x, inverse = x.to(dtype).to(given), torch.full((), 2.0)
    straight, turned, sums = cast_both_ways(x, inverse, dtype, sums=True)
    right = (x.float() * inverse).clamp(-most, most).to(dtype)
    assert torch.equal(straight.view(torch.uint8), right.view(torch.uint8))
    assert torch.equal(turned.view(torch.uint8), right.t().contiguous().view(torch.uint8))
    assert turned.is_contiguous()
    torch.testing.assert_close(sums.double(), x.double().sum(0), rtol=1e-5, atol=1e-4)
    assert cast_both_ways(x, inverse, dtype)[2].numel() == 0


def test_numbers_beyond_the_format_are_cut_and_nan_stays():
    x = torch.tensor([[1e30, -1e30], [math.nan, 1.0]])
    for function in (cast_both_ways_eager,) if INTERPRETED else (cast_both_ways, cast_both_ways_eager):
        straight, turned, _ = function(x, torch.ones(()), E4)
        assert straight.float()[0].tolist() == [448.0, -448.0]
        assert math.isnan(straight.float()[1, 0].item())
        assert math.isnan(turned.float()[0, 1].item())


def test_the_operator_can_be_compiled():
    found = torch.library.opcheck(
        torch.ops.hotloop.cast_both_ways.default,
        (torch.randn(16, 32), torch.ones(()), E4, True),
        test_utils=("test_schema", "test_faketensor"),
    )
    assert set(found.values()) == {"SUCCESS"}
