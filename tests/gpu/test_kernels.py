"""Triton kernels on a CUDA device against their twins in float64, and inside a CUDA graph."""

import copy

import pytest
import torch

from hotloop.kernels import (
    Tables,
    adamw_eager,
    bias_gelu,
    bias_gelu_eager,
    clip_norm,
    compile_fused,
    cross_entropy_eager,
    fused_adamw,
    layer_norm,
    layer_norm_eager,
    linear_cross_entropy,
    scale_all,
    self_attention,
    self_attention_eager,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPES = [(3,), (65, 384), (384,), (4099,), (1,), (1536, 384), (65, 17)]
HYPER = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}


def make(dtype=torch.float32, gradient=torch.float32, *, shadow=False, shift=0):
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(shape, kind):
        # `shift` elements into a larger tensor: an address that is no multiple of 16 bytes
        numel = torch.Size(shape).numel()
        whole = torch.randn(numel + shift, generator=generator, device="cuda").to(kind)
        return whole[shift:].view(shape)

    params = [draw(s, dtype) for s in SHAPES]
    grads = [draw(s, gradient) for s in SHAPES]
    state = {
        "exp_avgs": [torch.zeros_like(p) for p in params],
        "exp_avg_sqs": [torch.zeros_like(p) for p in params],
        "steps": [torch.zeros((), device="cuda") for _ in SHAPES],
    }
    if shadow:
        state["shadows"] = [torch.full_like(p, float("nan"), dtype=torch.bfloat16) for p in params]
    return params, grads, state


def distance(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("gradient", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("decoupled", [True, False])
def test_adamw_is_its_twin_in_float64(gradient, decoupled, shift):
    params, grads, state = make(gradient=gradient, shadow=True, shift=shift)
    exact = [p.double() for p in params]
    twin = {k: [t.double() for t in v] for k, v in state.items() if k != "shadows"}
    tables, coefficient = Tables(), torch.tensor(0.5, device="cuda")
    for k in range(4):
        now = [g * (k + 1) for g in grads]
        more = {**HYPER, "coefficient": coefficient, "skip": torch.zeros((), device="cuda")}
        fused_adamw(params, now, **state, **more, decoupled=decoupled, tables=tables)
        adamw_eager(exact, now, **twin, **more, decoupled=decoupled)
    for a, b in zip(params, exact, strict=True):
        assert distance(a, b) < 3e-7
    for name in ("exp_avgs", "exp_avg_sqs"):
        assert max(distance(a, b) for a, b in zip(state[name], twin[name], strict=True)) < 3e-7
    assert all(torch.equal(s, p.bfloat16()) for s, p in zip(state["shadows"], params, strict=True))
    assert {s.item() for s in state["steps"]} == {4.0}


def test_adamw_is_torchs_fused_one():
    params, grads, state = make()
    theirs = [p.clone().requires_grad_() for p in params]
    optimizer = torch.optim.AdamW(theirs, lr=1e-2, weight_decay=0.1, fused=True)
    tables = Tables()
    for k in range(5):
        for p, g in zip(theirs, grads, strict=True):
            p.grad = g * (k + 1)
        optimizer.step()
        fused_adamw(params, [p.grad for p in theirs], **state, **HYPER, tables=tables)
    assert max(distance(a, b.detach()) for a, b in zip(params, theirs, strict=True)) < 6e-7


def test_adamw_refused_writes_nothing():
    params, grads, state = make(shadow=True)
    grads[0][0] = float("nan")
    before = [t.clone() for group in (params, *state.values()) for t in group]
    fused_adamw(params, grads, **state, **HYPER, skip=torch.ones((), device="cuda"))
    after = [t for group in (params, *state.values()) for t in group]
    assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shift", [0, 1])
def test_norm_is_that_in_float64_and_the_same_each_time(dtype, shift):
    grads = make(gradient=dtype, shift=shift)[1]
    exact = torch.nn.utils.get_total_norm([g.double() for g in grads]).item()
    results = [clip_norm(grads, 1.0, tables=Tables()) for _ in range(5)]
    assert len({r[0].item() for r in results}) == 1
    assert results[0][0].item() == pytest.approx(exact, rel=1e-6)
    assert results[0][1].item() == pytest.approx(1.0 / (exact + 1e-6), rel=1e-6)
    grads[3][11] = float("inf")
    assert not clip_norm(grads, 1.0)[0].isfinite().item()


def test_scale_all_is_a_product():
    grads = make(shift=1)[1]
    expected = [g * 0.3 for g in grads]
    scale_all(grads, torch.tensor(0.3, device="cuda"))
    assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("classes", [65, 5003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy_is_near_float64(reduction, classes, dtype):
    torch.manual_seed(0)
    x = torch.randn(1000, 96, device="cuda").to(dtype).requires_grad_()
    w = (torch.randn(classes, 96, device="cuda") / 8).to(dtype).requires_grad_()
    b = torch.randn(classes, device="cuda").to(dtype).requires_grad_()
    t = torch.randint(classes, (1000,), device="cuda")
    t[5:50] = -100
    options = {"reduction": reduction, "label_smoothing": 0.1}
    wide = [v.detach().double().requires_grad_() for v in (x, w, b)]
    exact = cross_entropy_eager(wide[0], wide[1], t, wide[2], **options)
    ours = linear_cross_entropy(x, w, t, b, chunk_bytes=300 * classes * 4, **options)
    assert distance(ours.detach(), exact.detach()) < (1e-6 if dtype == torch.float32 else 3e-3)
    ours.sum().backward()
    exact.sum().backward()
    for a, e in zip((x, w, b), wide, strict=True):
        assert distance(a.grad, e.grad) < (1e-5 if dtype == torch.float32 else 1e-2)


def test_cross_entropy_needs_no_memory_for_all_logits():
    x = torch.randn(8192, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(50304, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    t = torch.randint(50304, (8192,), device="cuda")
    linear_cross_entropy(x, w, t, chunk_bytes=64 << 20).backward()
    x.grad = w.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy(x, w, t, chunk_bytes=64 << 20).backward()
    used = torch.cuda.max_memory_allocated() - before
    # logits alone would be 824 MB in bfloat16
    assert used < 350e6


def test_cross_entropy_under_compile():
    torch.manual_seed(0)
    head = torch.nn.Linear(64, 300, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(256, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    t = torch.randint(300, (256,), device="cuda")

    def loss(x):
        return linear_cross_entropy(x * 2, head.weight, t, head.bias)

    plain = torch.autograd.grad(loss(x), [x, head.weight, head.bias])
    compiled = torch.autograd.grad(torch.compile(loss)(x), [x, head.weight, head.bias])
    for a, b in zip(compiled, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=1e-4)


def gradients(function, given, slopes):
    outputs = function(**given)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    loss = sum((o.double() * s).sum() for o, s in zip(outputs, slopes, strict=True))
    return [o.detach() for o in outputs], torch.autograd.grad(loss, list(given.values()))


@pytest.mark.parametrize("width", [384, 65, 1000, 4096])
@pytest.mark.parametrize(
    ("dtype", "branch_dtype"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32)],
)
def test_layer_norm_is_near_float64(width, dtype, branch_dtype):
    torch.manual_seed(0)

    def draw(*size, kind=dtype):
        return torch.randn(*size, device="cuda").to(kind).requires_grad_()

    given = {
        "x": draw(7, 301, width),
        "branch": draw(7, 301, width, kind=branch_dtype),
        "weight": draw(width),
        "shift": draw(width),
        "branch_bias": draw(width),
    }
    slopes = [torch.randn(7, 301, width, device="cuda", dtype=torch.float64) for _ in range(2)]
    ours = gradients(layer_norm, given, slopes)
    exact = gradients(
        layer_norm_eager, {k: v.detach().double().requires_grad_() for k, v in given.items()}, slopes
    )
    for a, e in zip((*ours[0], *ours[1]), (*exact[0], *exact[1]), strict=True):
        bound = 2e-6 if a.dtype == torch.float32 and branch_dtype == torch.float32 else 6e-3
        assert distance(a, e) < bound
    again = gradients(layer_norm, given, slopes)
    assert all(torch.equal(a, b) for a, b in zip(ours[1], again[1], strict=True))


@pytest.mark.parametrize("width", [1536, 65, 513])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 5e-3)])
def test_gelu_is_near_float64(width, dtype, bound):
    torch.manual_seed(0)
    given = {
        "z": (3 * torch.randn(1003, width, device="cuda")).to(dtype).requires_grad_(),
        "bias": torch.randn(width, device="cuda").to(dtype).requires_grad_(),
    }
    slopes = [torch.randn(1003, width, device="cuda", dtype=torch.float64)]
    ours = gradients(bias_gelu, given, slopes)
    exact = gradients(
        bias_gelu_eager, {k: v.detach().double().requires_grad_() for k, v in given.items()}, slopes
    )
    for a, e in zip((*ours[0], *ours[1]), (*exact[0], *exact[1]), strict=True):
        assert distance(a, e) < bound


@pytest.mark.filterwarnings("ignore:TensorFloat32")
@pytest.mark.parametrize("autocast", [True, False])
def test_compiled_with_our_kernels_is_the_eager_model(autocast):
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = torch.nn.LayerNorm(96), torch.nn.LayerNorm(96)
            self.mix, self.up, self.down = (
                torch.nn.Linear(a, b) for a, b in ((96, 96), (96, 384), (384, 96))
            )

        def forward(self, x):
            x = x + self.mix(torch.sin(self.norm1(x)))
            return x + self.down(torch.nn.functional.gelu(self.up(self.norm2(x))))

    torch.manual_seed(0)
    model = torch.nn.Sequential(Block(), Block(), torch.nn.LayerNorm(96), torch.nn.Linear(96, 5)).cuda()
    x = torch.randn(8, 33, 96, device="cuda")

    def run(forward, module, dtype):
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast and dtype == torch.float32):
            out = forward(x.to(dtype))
        return out.detach(), torch.autograd.grad(out.float().square().mean(), list(module.parameters()))

    compiled = run(torch.compile(model, backend=compile_fused), model, torch.float32)
    eager = run(model, model, torch.float32)
    wide = copy.deepcopy(model).double()
    exact = run(wide, wide, torch.float64)
    for c, e, w in zip(
        (compiled[0], *compiled[1]), (eager[0], *eager[1]), (exact[0], *exact[1]), strict=True
    ):
        # no farther from float64 than the eager model, give or take a half
        assert distance(c, w) < max(1.5 * distance(e, w), 5e-6)


def test_a_recorded_update_reads_what_is_there_at_replay():
    """Gradients made inside the recording; then other gradients, another rate, a refused update, one more."""
    params, grads, state = make(shadow=True)
    exact = [p.double() for p in params]
    twin = {k: [t.double() for t in v] for k, v in state.items() if k != "shadows"}
    rate, skip = torch.tensor(1e-2, device="cuda"), torch.zeros((), device="cuda")
    more = {**HYPER, "lr": rate, "skip": skip}
    tables = Tables()
    stream = torch.cuda.Stream()

    def update():
        # memory of the graph that is free again when the tables are made, and written to in every replay
        torch.full((1 << 20,), -1.0, device="cuda").sum()
        for size in (1, 64, 1000, 5000):
            torch.full((size,), -1.0, device="cuda").sum()
        fresh = [g * 2.0 for g in grads]
        norm, coefficient = clip_norm(fresh, 1.0, tables=tables)
        fused_adamw(params, fresh, **state, **more, coefficient=coefficient, tables=tables)
        return norm

    def by_hand():
        fresh = [g.double() * 2.0 for g in grads]
        norm = torch.nn.utils.get_total_norm(fresh)
        factor = torch.clamp(1.0 / (norm + 1e-6), max=1.0)
        adamw_eager(exact, fresh, **twin, **more, coefficient=factor)
        return norm

    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        update()
    by_hand()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        norm = update()
        graph.capture_end()
    for k, refused in enumerate((0.0, 1.0, 0.0, 0.0)):
        for g in grads:
            g.mul_(0.5)
        rate.fill_(1e-2 / (k + 1))
        skip.fill_(refused)
        graph.replay()
        assert norm.item() == pytest.approx(by_hand().item(), rel=1e-6)
    assert max(distance(a, b) for a, b in zip(params, exact, strict=True)) < 5e-7
    assert {s.item() for s in state["steps"]} == {4.0}


@pytest.mark.parametrize(
    "settings", [{"precision": "fp32"}, {"precision": "bf16"}, {"precision": "bf16-true"}]
)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_captured_step_uses_the_kernels_and_learns_as_the_eager_one(settings, accumulation, monkeypatch):
    import hotloop
    import hotloop.kernels.adamw
    from hotloop.kernels.programs import many

    calls = []
    launch = many.adamw.run

    def counted(*args, **kwargs):
        calls.append(1)
        return launch(*args, **kwargs)

    monkeypatch.setattr(many.adamw, "run", counted)

    def train(mode):
        loop = hotloop.Loop(seed=0, record=False, accumulation=accumulation, nonfinite="skip", **settings)
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.LayerNorm(64), torch.nn.Linear(64, 1)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        x = torch.randn(512, 32)
        data = torch.utils.data.TensorDataset(x, x[:, :1] * 2)
        loader = torch.utils.data.DataLoader(data, batch_size=64, shuffle=True)
        model, optimizer, loader = loop.prepare(model, optimizer, loader)

        def step(x, y):
            loss = torch.nn.functional.mse_loss(model(x), y)
            loop.backward(loss)
            loop.update(optimizer, max_norm=0.5)
            return loss

        run = loop.capture(step, mode=mode)
        losses = torch.stack([run(x, y) for _ in loop.epochs(6) for x, y in loader]).detach()
        return losses, run, optimizer

    eager, _, plain = train("off")
    assert not calls
    captured, run, optimizer = train("full")
    assert run.reason is None
    assert calls
    assert optimizer.state_dict()["state"].keys() == plain.state_dict()["state"].keys()
    bound = 1e-4 if settings["precision"] == "fp32" else 0.1
    assert (captured[-8:].mean() - eager[-8:].mean()).abs() <= bound * eager[-8:].mean() + 1e-4
    assert captured[-8:].mean() < 0.2 * captured[0]


@pytest.mark.parametrize("length", [256, 100, 33])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("depth", [64, 32])
def test_self_attention_is_near_float64(length, causal, depth):
    torch.manual_seed(0)
    heads, width = 3, 96
    columns = 3 * heads * depth
    x = torch.randn(4, length, width, device="cuda").bfloat16().requires_grad_()
    w = (torch.randn(columns, width, device="cuda") / width**0.5).bfloat16().requires_grad_()
    b = torch.randn(columns, device="cuda").bfloat16().requires_grad_()
    slope = torch.randn(4, length, heads, depth, device="cuda").bfloat16()
    wide = [v.detach().double().requires_grad_() for v in (x, w, b)]
    exact = self_attention_eager(*wide, heads, causal=causal)
    ours = self_attention(x, w, b, heads, causal=causal)
    stock = self_attention_eager(x, w, b, heads, causal=causal)
    assert distance(ours.detach(), exact.detach()) < 1e-2
    right = torch.autograd.grad(exact, wide, slope.double())
    for a, s, e in zip(
        torch.autograd.grad(ours, [x, w, b], slope),
        torch.autograd.grad(stock, [x, w, b], slope),
        right,
        strict=True,
    ):
        assert distance(a, e) < max(1.3 * distance(s, e), 1e-2)
