"""Newton-Schulz iteration against what it does to singular values, in float64."""

import pytest
import torch

from hotloop.optim import orthogonalise
from hotloop.optim.orthogonal import QUINTIC

SHAPES = [(5, 5), (4, 9), (9, 4), (1, 6), (3, 2, 7), (2, 2, 6, 3)]


def matrices(shape, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_the_quintic_applied_to_singular_values(shape):
    given = matrices(shape)
    u, values, vh = torch.linalg.svd(given, full_matrices=False)
    values = values / (given.square().sum((-2, -1)).sqrt()[..., None] + 1e-7)
    a, b, c = QUINTIC
    for _ in range(5):
        values = a * values + b * values**3 + c * values**5
    expected = u @ torch.diag_embed(values) @ vh
    torch.testing.assert_close(orthogonalise(given), expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_cubic_converges_to_the_nearest_semi_orthogonal_matrix(shape):
    given = matrices(shape)
    u, _, vh = torch.linalg.svd(given, full_matrices=False)
    found = orthogonalise(given, 60, coefficients=(1.5, -0.5, 0.0), eps=0.0)
    torch.testing.assert_close(found, u @ vh, rtol=0, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fewer_bits_come_near(dtype):
    given = matrices((4, 32, 64))
    exact = orthogonalise(given)
    found = orthogonalise(given.float(), dtype=dtype)
    assert found.dtype == dtype
    error = (found.double() - exact).norm() / exact.norm()
    assert error < (1e-5 if dtype == torch.float32 else 3e-2)
    values = torch.linalg.svdvals(found.double())
    assert values.min() > 0.6
    assert values.max() < 1.3


def test_zeros_stay_zeros_and_size_does_not_matter():
    assert torch.equal(orthogonalise(torch.zeros(2, 3, 4)), torch.zeros(2, 3, 4))
    given = matrices((3, 4))
    torch.testing.assert_close(orthogonalise(given * 1e9, eps=0.0), orthogonalise(given, eps=0.0))


def test_matrices_whose_norm_float16_does_not_hold():
    given = (matrices((2, 24, 40)) * 4000).half()
    assert torch.linalg.matrix_norm(given).isinf().all()
    found = orthogonalise(given, dtype=torch.float32)
    torch.testing.assert_close(found.double(), orthogonalise(given.double()), rtol=0, atol=1e-4)
    assert orthogonalise(given).dtype == torch.float16
