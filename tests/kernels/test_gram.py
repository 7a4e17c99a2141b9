"""A Muon step on Gram matrices: the twin against singular values in float64; the kernels, where Triton runs, too."""

import math

import pytest
import torch

from hotloop.kernels.gram import muon_step, muon_step_eager, muon_step_takes
from hotloop.kernels.language import runs_on
from hotloop.kernels.tables import Tables

QUINTIC = (3.4445, -4.7750, 2.0315)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
programs = pytest.mark.skipif(not runs_on(DEVICE), reason="Triton runs no programs here")


def make(shapes, scale, dtype=torch.float16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = []
    for shape in shapes:
        x = (scale * torch.randn(shape, generator=generator, dtype=torch.float64)).to(DEVICE, dtype)
        made.append(x.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else x)
    return made


def by_singular_values(weight, gradient, mean, *, steps, lr, decay, momentum, scale, norm):
    """One step in float64 by another way: the polynomial on singular values. (weight, mean)."""
    w, g, m = (t.double().flatten(1) for t in (weight, gradient, mean))
    m = momentum * m + (1 - momentum) * g
    u, s, vh = torch.linalg.svd(momentum * m + (1 - momentum) * g, full_matrices=False)
    s = s / s.norm()
    a, b, c = QUINTIC
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    w = w * (norm / w.norm() * (1 - lr * decay)) - lr * scale * (u * s @ vh)
    return w.view(weight.shape), m.view(weight.shape)


def settings(weights, steps):
    return {
        "lr": torch.tensor(0.2, device=DEVICE),
        "momentum": torch.tensor(0.65, device=DEVICE),
        "weight_decay": 0.1,
        "coefficients": QUINTIC,
        "steps": steps,
        "scales": [1.5 + i for i in range(len(weights))],
        "norms": [math.sqrt(len(w)) for w in weights],
    }


def expected(weights, gradients, means, steps):
    return [
        by_singular_values(
            w, g, m, steps=steps, lr=0.2, decay=0.1, momentum=0.65, scale=1.5 + i, norm=math.sqrt(len(w))
        )
        for i, (w, g, m) in enumerate(zip(weights, gradients, means, strict=True))
    ]


def test_the_twin_is_the_polynomial_of_singular_values():
    shapes = [(4, 7), (6, 2, 3, 3)]
    weights, gradients, means = (make(shapes, s, torch.float64, i) for i, s in enumerate((0.1, 3.0, 1.0)))
    wanted = expected(weights, gradients, means, 3)
    muon_step_eager(weights, gradients, means, eps=0.0, **settings(weights, 3))
    for w, m, (weight, mean) in zip(weights, means, wanted, strict=True):
        torch.testing.assert_close(w, weight, rtol=1e-6, atol=1e-7)  # the rates are float32
        torch.testing.assert_close(m, mean, rtol=1e-6, atol=1e-7)


@programs
@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("kind", [torch.float16, torch.float32])
@pytest.mark.parametrize("shapes", [[(64, 32, 3, 3), (64, 64)], [(128, 160), (192, 64, 3, 3)], [(64, 96)]])
def test_programs_are_near_the_polynomial_of_singular_values(shapes, kind, steps):
    weights, gradients, means = make(shapes, 0.1, kind), make(shapes, 50, seed=1), make(shapes, 20, seed=2)
    assert all(muon_step_takes(*each, torch.float16) for each in zip(weights, gradients, means, strict=True))
    shadows = [w.half() for w in weights] if kind == torch.float32 else None
    wanted, begun = expected(weights, gradients, means, steps), [w.double() for w in weights]
    muon_step(
        weights, gradients, means, **settings(weights, steps), shadows=shadows, skip=torch.zeros((), device=DEVICE),
        tables=Tables(),
    )  # fmt: skip
    for w, m, b, (weight, mean) in zip(weights, means, begun, wanted, strict=True):
        moved = weight - b * (math.sqrt(len(b)) / b.norm())
        assert (w.double() - weight).norm() < 0.01 * moved.norm()
        torch.testing.assert_close(m.double(), mean, rtol=2e-3, atol=1e-2)
    for w, shadow in zip(weights, shadows or [], strict=False):
        assert torch.equal(shadow, w.half())


@programs
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, over a result of no meaning
@pytest.mark.parametrize("rows", [64, 128])
def test_a_refused_step_moves_nothing(rows):
    weights, gradients, means = (make([(rows, 128)], 1.0, seed=i) for i in range(3))
    gradients[0].fill_(float("nan"))
    before = weights[0].clone(), means[0].clone()
    muon_step(
        weights, gradients, means, **settings(weights, 2), coefficient=torch.ones((), device=DEVICE),
        skip=torch.ones((), device=DEVICE),
    )  # fmt: skip
    assert torch.equal(weights[0], before[0])
    assert torch.equal(means[0], before[1])


def test_which_matrices_are_taken():
    def takes(shape, dtype=torch.float16, products=torch.float16):
        x = torch.zeros(shape, dtype=dtype)
        return muon_step_takes(x, x.clone(), x.clone(), products)

    assert takes((64, 32, 3, 3))
    assert takes((256, 2304))
    assert not takes((64, 24, 3, 3))
    assert not takes((65, 128))
    assert not takes((128, 64))
    assert not takes((64, 64), torch.float32)
    assert not takes((64, 64), torch.float16, torch.bfloat16)
