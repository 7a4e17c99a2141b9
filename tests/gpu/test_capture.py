"""Captured steps on a CUDA device: the eager trajectory, what falls back, no waits."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hotloop

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def build(loop, *, dropout=0.0, optimizer="adamw", schedule=True, batch=64):
    torch.manual_seed(0)
    x = torch.randn(1024, 32)
    data = TensorDataset(x, x[:, :1] * 2)
    model = nn.Sequential(
        nn.Linear(32, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(dropout), nn.Linear(64, 1)
    )
    make = {
        "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
        "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
        "foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    }[optimizer]
    made = make(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(made, 500) if schedule else None
    loader = DataLoader(data, batch_size=batch, shuffle=True)
    prepared = loop.prepare(model, made, loader, *([scheduler] if schedule else []))
    return (*prepared[:3], scheduler)


def train(captured, *, epochs=4, mode=None, settings=None, **kinds):
    loop = hotloop.Loop(seed=0, record=False, **(settings or {}))
    model, optimizer, loader, scheduler = build(loop, **kinds)

    def step(x, y):
        loss = F.mse_loss(model(x), y)
        loop.backward(loss)
        loop.update(optimizer, scheduler, max_norm=1.0)
        loop.log(loss=loss)
        return loss

    run = loop.capture(step, mode=mode or "graph") if captured else step
    losses = [run(x, y) for _ in loop.epochs(epochs) for x, y in loader]
    return loop, run, model, scheduler, torch.stack(losses).detach()


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_trajectory_is_the_eager_one(precision, optimizer, dropout):
    settings = {"precision": precision, "nonfinite": "skip"}
    eager = train(False, settings=settings, optimizer=optimizer, dropout=dropout)
    captured = train(True, settings=settings, optimizer=optimizer, dropout=dropout)
    assert captured[1].reason is None
    assert captured[1].replays == 4 * 16 - 3
    assert eager[3].get_last_lr() == captured[3].get_last_lr()
    torch.testing.assert_close(captured[4], eager[4], rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["accumulation", "ragged", "foreach", "no schedule", "stop", "ignore"])
def test_variants(kind):
    settings = {"nonfinite": kind if kind in ("stop", "ignore") else "skip"}
    kinds = {}
    if kind == "accumulation":
        settings["accumulation"] = 3
    if kind == "ragged":
        kinds["batch"] = 100
    if kind == "foreach":
        kinds["optimizer"], settings["nonfinite"] = "foreach", "ignore"
    if kind == "no schedule":
        kinds["schedule"] = False
    eager = train(False, settings=settings, epochs=6, **kinds)
    captured = train(True, settings=settings, epochs=6, **kinds)
    assert captured[1].reason is None
    assert captured[1].replays > 30
    torch.testing.assert_close(captured[4], eager[4], rtol=1e-4, atol=1e-5)


def test_full_compiles_and_records():
    eager = train(False, settings={"precision": "bf16"})
    full = train(True, mode="full", settings={"precision": "bf16"})
    assert full[1].reason is None
    torch.testing.assert_close(full[4], eager[4], rtol=0.1, atol=0.02)


def test_a_waiting_step_falls_back_and_names_the_line(capsys):
    loop = hotloop.Loop(record=False)
    model, optimizer, loader, _ = build(loop)

    @loop.capture(mode="graph")
    def step(x, y):
        loss = F.mse_loss(model(x), y)
        if loss.item() > 1e9:
            return loss
        loop.backward(loss)
        loop.update(optimizer)
        return loss

    for x, y in loader:
        step(x, y)
    assert step.captures == 0
    assert "test_capture.py" in step.reason
    assert "loss.item()" in step.reason
    assert "runs eagerly" in capsys.readouterr().err


def test_an_operation_that_cannot_be_recorded_falls_back_and_training_goes_on():
    loop = hotloop.Loop(record=False)
    model, optimizer, loader, _ = build(loop)

    def hidden(x):
        if torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()
        return x

    @loop.capture(mode="graph")
    def step(x, y):
        loss = F.mse_loss(model(hidden(x)), y)
        loop.backward(loss)
        loop.update(optimizer)
        return loss

    losses = [step(x, y) for x, y in loader]
    assert step.captures == 0
    assert "captur" in step.reason
    assert torch.isfinite(torch.stack(losses)).all()


def test_captured_steps_never_wait(tmp_path):
    loop = hotloop.Loop(seed=0, record=tmp_path / "run", nonfinite="skip", precision="bf16")
    model, optimizer, loader, scheduler = build(loop)

    @loop.capture(mode="graph")
    def step(x, y):
        loss = F.mse_loss(model(x), y)
        loop.backward(loss)
        loop.update(optimizer, scheduler, max_norm=1.0)
        loop.log(loss=loss)
        return loss

    def some(n):
        while loop.updates < n:
            for x, y in loader:
                step(x, y)

    some(20)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        some(1020)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert step.replays > 990
    loop.end_training()


def test_evaluation_step_and_modes():
    loop = hotloop.Loop(record=False)
    model, *_ = build(loop, dropout=0.5)
    model.eval()

    @loop.capture
    def evaluate(x):
        with torch.no_grad():
            return model(x)

    for _ in range(8):
        x = torch.randn(16, 32, device="cuda")
        torch.testing.assert_close(evaluate(x), model(x), rtol=1e-5, atol=1e-6)
    assert evaluate.captures == 1
    model.train()
    for _ in range(4):
        evaluate(torch.randn(16, 32, device="cuda"))
    assert evaluate.captures == 2


def test_memory_that_others_free_is_not_a_graph_s():
    """Dropping cuBLAS workspaces and cached memory, as reduce-overhead compilation does, leaves replays right."""
    eager = train(False, settings={"precision": "bf16"}, epochs=4)
    loop = hotloop.Loop(seed=0, record=False, precision="bf16")
    model, optimizer, loader, scheduler = build(loop)

    @loop.capture(mode="graph")
    def step(x, y):
        loss = F.mse_loss(model(x), y)
        loop.backward(loss)
        loop.update(optimizer, scheduler, max_norm=1.0)
        return loss

    losses = []
    for _ in loop.epochs(4):
        for x, y in loader:
            losses.append(step(x, y))
            if step.captures and len(losses) % 8 == 0:
                torch._C._cuda_clearCublasWorkspaces()
                torch.cuda.empty_cache()
                junk = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(64)]
                del junk
    torch.testing.assert_close(torch.stack(losses).detach(), eager[4], rtol=0, atol=0)


def small(loop, *, lr=0.1, width=8):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, 1))
    return loop.prepare(model, torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9))


CHANGES = {
    "replaced parameter": lambda m, o: setattr(m[0], "bias", nn.Parameter(torch.ones(16, device="cuda"))),
    "memory": lambda m, o: setattr(m[0].weight, "data", m[0].weight.data.clone() + 1.0),
    "frozen": lambda m, o: m[0].weight.requires_grad_(False),
    "hook": lambda m, o: m[0].register_forward_hook(lambda m, i, out: 2 * out),
    "eval": lambda m, o: m.eval(),
    "decay": lambda m, o: o.param_groups[0].update(weight_decay=0.5),
    "load_state_dict": lambda m, o: m.load_state_dict({k: v + 1.0 for k, v in m.state_dict().items()}),
    "assigned state": lambda m, o: m.load_state_dict(
        {k: v + 1.0 for k, v in m.state_dict().items()}, assign=True
    ),
    "optimizer state": lambda m, o: o.load_state_dict(o.state_dict()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_between_calls_counts_in_the_very_next_one(change):
    trails = []
    for captured in (False, True):
        loop = hotloop.Loop(seed=0, record=False)
        model, optimizer = small(loop)

        def step(x, loop=loop, model=model, optimizer=optimizer):
            loss = model(x).square().mean()
            loop.backward(loss)
            loop.update(optimizer)
            return loss

        run = loop.capture(step, mode="graph") if captured else step
        losses = []
        for i in range(16):
            if i == 8:
                CHANGES[change](model, optimizer)
            x = torch.full((4, 8), 1.0 + i / 16, device="cuda")
            losses.append(run(x).detach())
        trails.append(torch.stack(losses))
        if captured:
            assert run.reason is None
            assert run.replays > 4
    torch.testing.assert_close(trails[1], trails[0], rtol=1e-5, atol=1e-6)


def test_gradients_made_outside_and_kept_between_calls():
    """A step that is a backward alone: the script clears, or adds up over two calls, as it likes."""
    trails = []
    for captured in (False, True):
        loop = hotloop.Loop(seed=0, record=False, nonfinite="ignore")
        model, optimizer = small(loop)

        def step(x, loop=loop, model=model):
            loss = model(x).square().mean()
            loop.backward(loss)
            return loss

        run = loop.capture(step, mode="graph") if captured else step
        norms = []
        for i in range(24):
            run(torch.full((4, 8), 1.0 + i / 16, device="cuda"))
            norms.append(torch.stack([p.grad.norm() for p in model.parameters()]))
            if i % 2:
                optimizer.step()
                optimizer.zero_grad()
        trails.append(torch.stack(norms))
        if captured:
            assert run.reason is None
            assert run.replays > 12
    torch.testing.assert_close(trails[1], trails[0], rtol=1e-5, atol=1e-6)


class Bag(nn.Module):
    """Sequence model whose loss ignores padding: an embedding, a causal mean, a head."""

    def __init__(self, width=32):
        super().__init__()
        self.tokens, self.head = nn.Embedding(50, width), nn.Linear(width, 50)

    def forward(self, x):
        h = self.tokens(x).cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        return self.head(h)


def train_lengths(captured, lengths, **options):
    torch.manual_seed(0)
    loop = hotloop.Loop(seed=0, record=False)
    model = Bag()
    model, optimizer = loop.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))

    def step(x, y):
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-100)
        loop.backward(loss)
        loop.update(optimizer, max_norm=1.0)
        return loss

    run = loop.capture(step, mode="graph", **options) if captured else step
    generator = torch.Generator().manual_seed(1)
    losses = []
    for length in lengths:
        x = torch.randint(50, (4, length), generator=generator).cuda()
        losses.append(run(x, x.roll(-1, 1)))
    return run, torch.stack(losses).detach()


def test_variable_lengths_in_few_recordings_with_the_same_losses():
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(16, 200, (120,), generator=generator).tolist()
    from hotloop.capture import Buckets

    _, expected = train_lengths(False, lengths)
    run, losses = train_lengths(True, lengths, buckets=Buckets(pad=(0, -100), most=4, after=16))
    assert run.reason is None
    assert run.captures <= 6
    assert run.replays > 80
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)


def test_a_cap_on_memory_gives_up_what_is_used_least(capsys):
    lengths = [64, 64, 64, 64, 64, 96, 96, 96, 128, 128, 128, 64, 64, 64] * 2
    _, expected = train_lengths(False, lengths)
    roomy, losses = train_lengths(True, lengths)
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)
    assert roomy.captures == 3
    held = roomy._recorder.pool_bytes()
    assert held > 0
    tight, losses = train_lengths(True, lengths, pool_bytes=held - 1)
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)
    assert tight.evictions > 0 or tight.captures == 3
    nothing, losses = train_lengths(True, lengths, pool_bytes=1)
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)
    assert nothing.evictions == 0
    assert "MiB and pool_bytes allows 0.0 MiB" in capsys.readouterr().err


def test_a_graph_that_does_not_fit_says_the_bytes_and_training_goes_on(capsys):
    loop = hotloop.Loop(seed=0, record=False)
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)])
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))

    @loop.capture(mode="graph")
    def step(x):
        loss = model(x).square().mean()
        loop.backward(loss)
        loop.update(optimizer)
        return loss

    x = torch.randn(16384, 512, device="cuda")
    step(x)
    torch.cuda.synchronize()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 8 * 2**20) / total)
    try:
        losses = [step(x) for _ in range(5)]
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert torch.isfinite(torch.stack(losses)).all()
    assert loop.updates == 6
    assert step.captures == 0
    assert "does not fit into memory" in capsys.readouterr().err


def hidden_scale():
    return __import__("os").environ["HIDDEN_SCALE"]


@pytest.mark.parametrize("mode", ["graph", "full"])
def test_replays_are_checked_against_the_plain_step(mode, monkeypatch):
    monkeypatch.setenv("HIDDEN_SCALE", "1.0")
    loop = hotloop.Loop(seed=0, record=False, precision="bf16", nonfinite="skip")
    model, optimizer, loader, scheduler = build(loop, dropout=0.1)

    @loop.capture(mode=mode, check_every=5)
    def step(x, y):
        loss = F.mse_loss(model(x), y) * float(hidden_scale())
        loop.backward(loss)
        loop.update(optimizer, scheduler, max_norm=1.0)
        return loss

    losses = [step(x, y) for _ in loop.epochs(3) for x, y in loader]
    assert step.reason is None, step.reason
    assert step.checks == step.replays // 5 > 5
    assert loop.updates == 48
    if mode == "graph":
        # a check leaves no trace
        eager = train(False, settings={"precision": "bf16", "nonfinite": "skip"}, epochs=3, dropout=0.1)
        torch.testing.assert_close(torch.stack(losses).detach(), eager[4], rtol=0, atol=0)
    monkeypatch.setenv("HIDDEN_SCALE", "3.0")
    for x, y in loader:
        step(x, y)
    assert "beside the plain step" in step.reason


def test_generators_of_the_user_go_on_in_replays():
    trails = []
    for captured in (False, True):
        loop = hotloop.Loop(seed=0, record=False)
        generator = torch.Generator("cuda").manual_seed(7)

        def step(x, generator=generator):
            return x + torch.rand(x.shape, device="cuda", generator=generator) + torch.rand_like(x)

        run = loop.capture(step, mode="graph") if captured else step
        values = [run(torch.zeros(4, device="cuda")) for _ in range(10)]
        generator.manual_seed(9)
        values += [run(torch.zeros(4, device="cuda")) for _ in range(4)]
        trails.append(torch.stack(values))
    assert torch.equal(trails[0], trails[1])


@pytest.mark.filterwarnings("ignore:TensorFloat32")
def test_auto_compiles_where_it_pays_and_says_so(monkeypatch, capsys):
    from hotloop.capture import choosing

    monkeypatch.setattr(choosing, "compile_seconds", lambda modules: 1e-6)
    eager = train(False, epochs=8)
    captured = train(True, mode="auto", epochs=8)
    said = capsys.readouterr().err
    assert captured[1].reason is None
    assert "steps of" in said
    assert "compiling the forward" in said
    assert captured[1].captures == 2, said
    torch.testing.assert_close(captured[4], eager[4], rtol=1e-3, atol=1e-4)
    short = train(True, mode="auto", epochs=1)
    assert short[1].captures == 1


def test_two_optimizers_two_steps():
    trails = []
    for captured in (False, True):
        torch.manual_seed(0)
        loop = hotloop.Loop(seed=0, record=False)
        make, judge = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        made = torch.optim.Adam(make.parameters(), lr=1e-3), torch.optim.Adam(judge.parameters(), lr=1e-3)
        make, judge, a, b = loop.prepare(make, judge, *made)

        def gan(noise, real, loop=loop, make=make, judge=judge, a=a, b=b):
            b.zero_grad()
            fake = make(noise)
            worse = F.softplus(judge(fake.detach())).mean() + F.softplus(-judge(real)).mean()
            loop.backward(worse)
            b.step()
            a.zero_grad()
            better = F.softplus(-judge(fake)).mean()
            loop.backward(better)
            a.step()
            return worse, better

        run = loop.capture(gan, mode="graph") if captured else gan
        generator = torch.Generator("cuda").manual_seed(1)
        rows = []
        for _ in range(20):
            noise = torch.randn(32, 4, device="cuda", generator=generator)
            real = torch.randn(32, 8, device="cuda", generator=generator)
            rows.append(torch.stack(run(noise, real)).detach())
        trails.append(torch.stack(rows))
        if captured:
            assert run.reason is None
            assert run.replays > 12
    torch.testing.assert_close(trails[1], trails[0], rtol=1e-4, atol=1e-5)


def test_random_numbers_go_on_after_a_recording_that_failed():
    loop = hotloop.Loop(seed=0, record=False)

    def hidden(x):
        if torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()
        return x

    step = loop.capture(lambda x: hidden(torch.rand_like(x)), mode="graph")
    torch.manual_seed(5)
    values = [step(torch.zeros(8, device="cuda")) for _ in range(6)]
    assert step.captures == 0
    assert "captur" in step.reason
    torch.manual_seed(5)
    expected = [torch.rand(8, device="cuda") for _ in range(6)]
    assert torch.equal(torch.stack(values[:3]), torch.stack(expected[:3]))
    assert torch.isfinite(torch.stack(values)).all()
    # another step is recorded in the same process
    other = loop.capture(lambda x: x + torch.rand_like(x), mode="graph")
    torch.manual_seed(6)
    drawn = [other(torch.zeros(8, device="cuda")) for _ in range(8)]
    assert other.captures == 1
    torch.manual_seed(6)
    assert torch.equal(torch.stack(drawn), torch.stack([torch.rand(8, device="cuda") for _ in range(8)]))


def test_weights_are_cast_anew_in_each_autocast_around_the_calls():
    loop = hotloop.Loop(record=False)
    model = loop.prepare(nn.Linear(32, 8))

    def around(run, x, calls):
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            return [run(x) for _ in range(calls)]

    evaluate = loop.capture(lambda x: model(x), mode="graph")
    x = torch.randn(4, 32, device="cuda")
    for _ in range(3):
        (wanted,) = around(model, x, 1)
        assert wanted.dtype == torch.bfloat16
        assert all(torch.equal(found, wanted) for found in around(evaluate, x, 6))
        # memory that the casts had is given out again
        junk = [torch.full((size,), float("nan"), device="cuda") for size in (8, 128) for _ in range(64)]
        del junk
        with torch.no_grad():
            model.weight.mul_(2.0)
    assert (evaluate.captures, evaluate.replays, evaluate.reason) == (1, 15, None)


def test_casts_of_a_recording_that_failed_are_read_by_nobody():
    loop = hotloop.Loop(record=False)
    model = loop.prepare(nn.Linear(32, 8))

    def hidden(x):
        if torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()
        return x

    step = loop.capture(lambda x: hidden(model(x)), mode="graph")
    x = torch.randn(4, 32, device="cuda")
    for _ in range(6):
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            found = step(x)
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            assert torch.equal(found, model(x))
    assert step.captures == 0
    assert "captur" in step.reason


def test_around_a_value_read_on_the_host_modules_are_launched_as_one(capsys):
    trails = []
    for captured in (False, True):
        loop = hotloop.Loop(seed=0, record=False, precision="bf16", nonfinite="skip")
        model, optimizer, loader, scheduler = build(loop, dropout=0.2)

        def step(x, y, loop=loop, model=model, optimizer=optimizer, scheduler=scheduler):
            loss = F.mse_loss(model(x), y)
            if loss.item() > 1e9:
                return loss
            loop.backward(loss)
            loop.update(optimizer, scheduler, max_norm=1.0)
            return loss

        run = loop.capture(step, mode="graph") if captured else step
        losses = [run(x, y) for _ in loop.epochs(3) for x, y in loader]
        trails.append((torch.stack(losses).detach(), [b.clone() for b in model.buffers()]))
    assert "loss.item()" in run.reason
    assert run._parts.replays == 48 - 6, capsys.readouterr().err
    torch.testing.assert_close(trails[1][0], trails[0][0], rtol=0, atol=0)
    for a, b in zip(trails[0][1], trails[1][1], strict=True):
        torch.testing.assert_close(a, b)


def test_recordings_are_made_after_all_earlier_ones_are_gone():
    loop = hotloop.Loop(record=False)
    x = torch.ones(4, device="cuda")
    for number in range(3):
        step = loop.capture(lambda x, number=number: x * 2 + number, mode="graph")
        assert [step(x).tolist() for _ in range(6)] == [[2.0 + number] * 4] * 6
        assert (step.replays, step.reason) == (3, None)
        del step


def test_modules_launched_as_one_each_leave_each_other_s_memory_alone():
    trails = []
    for captured in (False, True):
        torch.manual_seed(0)
        loop = hotloop.Loop(seed=0, record=False)
        parts = [
            nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 32))
            for _ in range(3)
        ]
        made = torch.optim.SGD([p for part in parts for p in part.parameters()], lr=0.1)
        *parts, optimizer = loop.prepare(*parts, made)

        def step(x, loop=loop, parts=parts, optimizer=optimizer):
            a, b, c = parts
            first = a(x)
            loss = b(first).square().mean() + c(first.sin()).abs().mean()
            if loss.item() > 1e9:
                return loss
            loop.backward(loss)
            loop.update(optimizer)
            return loss

        run = loop.capture(step, mode="graph") if captured else step
        generator = torch.Generator("cuda").manual_seed(1)
        trails.append(
            [run(torch.randn(16, 32, device="cuda", generator=generator)).item() for _ in range(16)]
        )
    assert run._parts.replays == 3 * (16 - 6)
    assert trails[1] == pytest.approx(trails[0], rel=1e-5)


def test_recordings_read_inputs_and_send_counters_by_themselves(monkeypatch):
    from hotloop.capture.ports import ports_work

    loop = hotloop.Loop(record=False)
    assert ports_work(loop.device)
    torch.manual_seed(0)
    model = nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = loop.prepare(model, optimizer)
    whole = torch.randn(64, 3, 16, device=loop.device)

    @loop.capture(mode="graph", outputs="static")
    def step(x, scale):
        loss = (model(x) * scale).square().mean()
        loop.backward(loss)
        loop.update(optimizer)
        return loss

    scale = torch.tensor(1.0, device=loop.device)
    for i in range(6):
        # one stretch of memory each, that begins somewhere in the middle of another
        step(whole[i : i + 2], scale)
    (entry,) = step._usual.values()
    assert None not in entry.ports
    assert len(entry.landings) == 1
    copied = []
    copy = torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *a, **k: (copied.append(a), copy(*a, **k))[1])
    step(whole[9:11], scale)
    assert copied == []
    for i in range(4):
        # not one stretch: copied by torch, into a recording of its own
        step(whole[i : i + 4 : 2], scale)
    assert copied
    loop.end_training()


def test_inputs_are_read_before_their_memory_is_given_out_again():
    """The host runs far ahead and drops each input at once, while the device has not begun with it."""
    loop = hotloop.Loop(record=False)

    @loop.capture(mode="graph")
    def step(x, y):
        torch.cuda._sleep(300_000)
        return x.sum() + y.sum()

    found = []
    for i in range(200):
        x, y = (
            torch.full((1 << 16,), float(i % 16), device=loop.device),
            torch.full((3,), 1.0, device=loop.device),
        )
        found.append(step(x, y))
        del x, y
        torch.full((1 << 16,), -1.0, device=loop.device)
    assert step.replays == 197
    assert torch.stack(found).tolist() == [float(i % 16) * (1 << 16) + 3 for i in range(200)]


@pytest.mark.parametrize("optimizers", [1, 2])
def test_the_bad_update_is_named_by_what_the_recording_sends(optimizers):
    loop = hotloop.Loop(record=False)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    parts = [model.parameters()] if optimizers == 1 else [part.parameters() for part in model]
    made = [torch.optim.AdamW(part, lr=0.1) for part in parts]
    model, *made = loop.prepare(model, *made)

    @loop.capture(mode="graph")
    def step(x):
        torch.cuda._sleep(100_000)
        loss = model(x).square().mean()
        loop.backward(loss)
        for optimizer in made:
            optimizer.step()
        for optimizer in made:
            optimizer.zero_grad()
        return loss

    with pytest.raises(hotloop.NonFiniteError) as caught:
        for i in range(60):
            step(torch.full((8, 4), float("nan") if i == 20 else 1.0, device=loop.device))
    assert caught.value.step == 20 * optimizers
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_step_that_draws_on_the_host_draws_at_every_call():
    loop = hotloop.Loop(seed=0, record=False)

    def drawing(x):
        # no wait for the device tells of this one
        return x * 2 if torch.rand(()) < 0.5 else x

    step = loop.capture(drawing, mode="graph")
    torch.manual_seed(5)
    found = torch.stack([step(torch.ones((), device="cuda")) for _ in range(12)]).tolist()
    torch.manual_seed(5)
    assert found == [2.0 if torch.rand(()) < 0.5 else 1.0 for _ in range(12)]
    assert step.captures == 0
    assert "torch's random stream of the CPU" in step.reason

    noisy = loop.capture(lambda x: x + torch.rand_like(x), mode="graph")
    for _ in range(6):
        noisy(torch.ones(4, device="cuda"))
    assert noisy.reason is None
    assert noisy.replays == 3
