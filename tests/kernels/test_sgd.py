"""SGD: the twin against torch's in float64; the kernel, where Triton runs, against the twin."""

import pytest
import torch

from hotloop.kernels.language import runs_on
from hotloop.kernels.sgd import fused_sgd, sgd_eager
from hotloop.kernels.tables import Tables

SHAPES = [(3,), (65, 17), (4096,), (2049,), (1,)]


def make(dtype, gradient=None, momentum=True):
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in SHAPES]
    grads = [torch.randn(s, generator=generator, dtype=torch.float64).to(gradient or dtype) for s in SHAPES]
    return params, grads, [torch.zeros_like(p) for p in params] if momentum else None


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("nesterov", [True, False])
def test_twin_is_torchs_in_float64(momentum, nesterov):
    nesterov = nesterov and momentum > 0
    params, grads, sums = make(torch.float64, momentum=momentum > 0)
    mine = [p.clone() for p in params]
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=momentum, weight_decay=0.05, nesterov=nesterov)
    for k in range(5):
        for p, g in zip(params, grads, strict=True):
            p.grad = g * (1 + k)
        optimizer.step()
        sgd_eager(
            mine,
            [g * (1 + k) for g in grads],
            sums,
            lr=torch.tensor(0.1, dtype=torch.float64),
            momentum=momentum,
            weight_decay=0.05,
            nesterov=nesterov,
        )
    for a, b in zip(mine, params, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_skip_writes_nothing_even_of_nan():
    params, grads, sums = make(torch.float32)
    grads[0][0] = float("nan")
    shadows = [p.half() for p in params]
    before = [t.clone() for t in (*params, *sums, *shadows)]
    fused_sgd(params, grads, sums, lr=0.1, momentum=0.9, skip=torch.ones(()), shadows=shadows)
    assert all(torch.equal(a, b) for a, b in zip((*params, *sums, *shadows), before, strict=True))


@pytest.mark.skipif(not runs_on(torch.device("cpu")), reason="needs Triton and TRITON_INTERPRET=1")
@pytest.mark.parametrize("kind", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("momentum", "nesterov", "shadowed"), [(0.0, False, True), (0.9, False, False), (0.9, True, True)]
)
def test_kernel_is_its_twin(momentum, nesterov, shadowed, kind):
    results = []
    for step, more in ((fused_sgd, {"tables": Tables()}), (sgd_eager, {})):
        params, grads, sums = make(kind, torch.float16, momentum > 0)
        shadows = [p.half() for p in params] if shadowed else None
        for _ in range(3):
            step(
                params,
                grads,
                sums,
                lr=torch.tensor(0.1),
                momentum=momentum,
                weight_decay=0.05,
                nesterov=nesterov,
                coefficient=torch.tensor(0.5),
                skip=torch.zeros(()),
                shadows=shadows,
                **more,
            )
        results.append([*params, *(sums or []), *(shadows or [])])
    for a, b in zip(*results, strict=True):
        bound = 2e-6 if a.dtype == torch.float32 else 4e-3
        torch.testing.assert_close(a, b, rtol=bound, atol=bound)
