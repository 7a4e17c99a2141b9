"""AdamW: the twin against torch's in float64; the kernel, where Triton runs, against the twin."""

import pytest
import torch

from hotloop.errors import KernelError
from hotloop.kernels import Tables, adamw_eager, fused_adamw
from hotloop.kernels.language import runs_on

SHAPES = [(3,), (65, 17), (4096,), (2049,), (1,), (64, 64)]
HYPER = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}


def make(dtype, gradient=None, shadow=False):
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(s, generator=generator).to(dtype) for s in SHAPES]
    grads = [torch.randn(s, generator=generator).to(gradient or dtype) for s in SHAPES]
    state = {
        "exp_avgs": [torch.zeros(s, dtype=dtype) for s in SHAPES],
        "exp_avg_sqs": [torch.zeros(s, dtype=dtype) for s in SHAPES],
        "steps": [torch.zeros(()) for _ in SHAPES],
    }
    if shadow:
        state["shadows"] = [torch.zeros(s, dtype=torch.bfloat16) for s in SHAPES]
    return params, grads, state


@pytest.mark.parametrize("decoupled", [True, False])
def test_twin_is_torchs_in_float64(decoupled):
    params, grads, state = make(torch.float64)
    mine = [p.clone() for p in params]
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = kind(params, lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, foreach=False)
    for k in range(5):
        now = [g * (1 + k) for g in grads]
        for p, g in zip(params, now, strict=True):
            p.grad = g
        optimizer.step()
        adamw_eager(mine, now, *list(state.values())[:3], **HYPER, decoupled=decoupled)
    for a, b in zip(mine, params, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    assert {s.item() for s in state["steps"]} == {5.0}


def test_skip_writes_nothing_even_of_nan():
    params, grads, state = make(torch.float32, shadow=True)
    grads[0][0] = float("nan")
    before = [t.clone() for group in (params, *state.values()) for t in group]
    fused_adamw(params, grads, **state, **HYPER, skip=torch.ones(()))
    after = [t for group in (params, *state.values()) for t in group]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_coefficient_scales_gradients():
    one, two = make(torch.float32), make(torch.float32)
    fused_adamw(one[0], one[1], **one[2], **HYPER, coefficient=torch.tensor(0.25))
    fused_adamw(two[0], [g * 0.25 for g in two[1]], **two[2], **HYPER)
    for a, b in zip(one[0], two[0], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_a_step_shared_by_all_counts_once():
    params, grads, state = make(torch.float32)
    shared = torch.zeros(())
    state["steps"] = [shared] * len(params)
    for _ in range(3):
        fused_adamw(params, grads, **state, **HYPER)
    assert shared.item() == 3.0


@pytest.mark.skipif(not runs_on(torch.device("cpu")), reason="needs Triton and TRITON_INTERPRET=1")
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("gradient", [torch.float32, torch.bfloat16])
def test_kernel_is_its_twin(gradient, decoupled):
    a, b = make(torch.float32, gradient, shadow=True), make(torch.float32, gradient, shadow=True)
    tables = Tables()
    coefficient = torch.tensor(0.5)
    for _ in range(3):
        more = {"coefficient": coefficient, "skip": torch.zeros(()), "decoupled": decoupled, **HYPER}
        fused_adamw(a[0], a[1], **a[2], **more, tables=tables)
        adamw_eager(b[0], b[1], **b[2], **more)
    # numpy in Triton's interpreter rounds to bfloat16 in its own way
    for x, y in zip(a[2].pop("shadows"), b[2].pop("shadows"), strict=True):
        torch.testing.assert_close(x, y, rtol=2**-7, atol=0)
    for ours, twins in zip((a[0], *a[2].values()), (b[0], *b[2].values()), strict=True):
        for x, y in zip(ours, twins, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-7)


def test_tensors_in_different_orders_are_refused():
    a = torch.zeros(3, 4)
    with pytest.raises(KernelError, match="in one order"):
        Tables().table([[a], [a.t().contiguous().t()]])
    with pytest.raises(KernelError, match="dense"):
        Tables().table([[a[:, ::2]]])
    # the stride of a dimension with one element means nothing
    Tables().table([[torch.zeros(1, 5)], [torch.zeros(1, 5).as_strided((1, 5), (1, 1))]])
