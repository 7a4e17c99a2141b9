"""Muon's kernels: the twins against the formula in float64; the kernels, where Triton runs, against the twins."""

import pytest
import torch

from hotloop.kernels import muon
from hotloop.kernels.language import runs_on
from hotloop.kernels.muon import (
    muon_apply,
    muon_apply_eager,
    muon_gather,
    muon_gather_eager,
    newton_schulz,
    newton_schulz_eager,
)
from hotloop.kernels.tables import Tables

QUINTIC = (3.4445, -4.7750, 2.0315)
interpreted = pytest.mark.skipif(
    not runs_on(torch.device("cpu")), reason="needs Triton and TRITON_INTERPRET=1"
)


def make(shape, count=3, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(count)]


@pytest.mark.parametrize("nesterov", [True, False])
def test_gathering_is_the_formula_in_float64(nesterov):
    gradients, means = make((4, 6), dtype=torch.float64), make((4, 6), dtype=torch.float64, seed=1)
    expected = [0.9 * m + 0.1 * 0.5 * g for m, g in zip(means, gradients, strict=True)]
    found = muon_gather_eager(
        gradients,
        means,
        momentum=torch.tensor(0.9, dtype=torch.float64),
        nesterov=nesterov,
        eps=0.0,
        dtype=torch.float64,
        coefficient=torch.tensor(0.5),
    )
    for i, (mean, m) in enumerate(zip(means, expected, strict=True)):
        torch.testing.assert_close(mean, m, rtol=1e-12, atol=1e-14)
        u = 0.9 * m + 0.1 * 0.5 * gradients[i] if nesterov else m
        torch.testing.assert_close(found[i], u / u.norm(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("shape", [(2, 4, 7), (2, 7, 4)])
def test_iteration_is_the_polynomial_of_singular_values(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = x / torch.linalg.matrix_norm(x, keepdim=True)
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    a, b, c = QUINTIC
    for _ in range(3):
        s = a * s + b * s**3 + c * s**5
    expected = u @ torch.diag_embed(s) @ vh
    torch.testing.assert_close(newton_schulz_eager(x, 3, QUINTIC), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_applying_moves_what_lies_in_memory(memory_format):
    weights = [w.contiguous(memory_format=memory_format) for w in make((4, 2, 3, 3), dtype=torch.float64)]
    shadows = [w.bfloat16() for w in weights]
    before = [w.clone() for w in weights]
    updates = torch.stack([w.permute(0, 2, 3, 1).reshape(4, 18) for w in make((4, 2, 3, 3), seed=2)])
    if memory_format == torch.contiguous_format:
        updates = torch.stack([w.reshape(4, 18) for w in make((4, 2, 3, 3), seed=2)])
    more = {"lr": 0.1, "weight_decay": 0.5, "scale": 2.0, "shadows": shadows}
    muon_apply_eager(weights, updates, **more, skip=torch.ones(()))
    assert all(torch.equal(w, b) for w, b in zip(weights, before, strict=True))
    muon_apply_eager(weights, updates, **more, skip=torch.zeros(()))
    for w, b, u, s in zip(weights, before, make((4, 2, 3, 3), seed=2), shadows, strict=True):
        torch.testing.assert_close(w, b * (1 - 0.1 * 0.5) - 0.1 * 2.0 * u.double(), rtol=1e-12, atol=1e-14)
        assert torch.equal(s, w.bfloat16())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, over a result of no meaning
def test_a_refused_gathering_moves_nothing():
    gradients, means = make((4, 6)), make((4, 6), seed=1)
    gradients[0].fill_(float("nan"))
    before = [m.clone() for m in means]
    muon_gather(gradients, means, momentum=0.9, skip=torch.ones(()))
    assert all(torch.equal(m, b) for m, b in zip(means, before, strict=True))


@interpreted
@pytest.mark.parametrize("gradient", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(65, 40), (3, 2, 5, 5), (64, 64)])
def test_kernels_are_their_twins(shape, gradient, kind):
    results = []
    for gather, apply in ((muon_gather, muon_apply), (muon_gather_eager, muon_apply_eager)):
        gradients = make(shape, dtype=gradient)
        means, weights = make(shape, seed=1, dtype=kind), make(shape, seed=2, dtype=kind)
        shadows = [w.half() for w in weights]
        more = {} if gather is muon_gather_eager else {"tables": Tables()}
        for _ in range(2):
            x = gather(
                gradients,
                means,
                momentum=torch.tensor(0.95),
                dtype=torch.float32,
                coefficient=torch.tensor(0.5),
                skip=torch.zeros(()),
                **more,
            )
            apply(
                weights,
                x,
                lr=torch.tensor(0.1),
                weight_decay=0.2,
                scale=1.5,
                skip=torch.zeros(()),
                shadows=shadows,
                **more,
            )
        results.append([x, *means, *weights, *shadows] if kind == torch.float16 else [x, *means, *weights])
    bound = 2e-3 if kind == torch.float16 else 2e-6
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=bound, atol=bound)


@interpreted
def test_many_sums_of_squares_are_added_first(monkeypatch):
    monkeypatch.setattr(muon, "_MOST_PARTIALS", 1)
    results = []
    for gather in (muon_gather, muon_gather_eager):
        gradients, means = make((65, 70)), make((65, 70), seed=1)
        results.append([gather(gradients, means, momentum=0.9, dtype=torch.float32), *means])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)


@interpreted
@pytest.mark.parametrize("shape", [(2, 24, 40), (3, 70, 33), (1, 64, 128), (2, 1, 9)])
def test_products_are_their_twin(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    x = x / torch.linalg.matrix_norm(x, keepdim=True)
    found, twin = newton_schulz(x, 3, QUINTIC), newton_schulz_eager(x, 3, QUINTIC)
    torch.testing.assert_close(found, twin, rtol=0, atol=2e-5)
