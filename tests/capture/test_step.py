"""A captured step trains as the eager loop does, and is recorded anew when something that it froze changes."""

import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hotloop
from hotloop.errors import CaptureError, SettingError

X = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
Y = torch.randn(64, 1, generator=torch.Generator().manual_seed(2))


def build(loop, *, batch=8, schedule=True, optimizer="adamw"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
    made = {
        "adamw": lambda: torch.optim.AdamW(model.parameters(), lr=0.01, fused=True),
        "foreach": lambda: torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True),
        "sgd": lambda: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True),
    }[optimizer]()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(made, 50) if schedule else None
    loader = DataLoader(TensorDataset(X, Y), batch_size=batch)
    prepared = loop.prepare(model, made, loader, *([scheduler] if schedule else []))
    return (*prepared[:3], scheduler)


def train(loop, captured, *, epochs=3, clip=0.5, batch=8, schedule=True, optimizer="adamw", poison=()):
    model, made, loader, scheduler = build(loop, batch=batch, schedule=schedule, optimizer=optimizer)

    def step(x, y):
        loss = F.mse_loss(model(x), y)
        loop.backward(loss)
        norm = loop.update(made, scheduler, max_norm=clip)
        loop.log(loss=loss)
        return loss, norm

    run = loop.capture(step) if captured else step
    losses = []
    count = 0
    for _ in loop.epochs(epochs):
        for x, y in loader:
            if count in poison:
                x = x * float("nan")
            loss, _ = run(x, y)
            losses.append(loss)
            count += 1
    return run, model, scheduler, torch.stack([loss.detach() for loss in losses])


def assert_same(a, b):
    for (name, p), q in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        assert torch.equal(p, q), name


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("schedule", [True, False])
@pytest.mark.parametrize("nonfinite", ["stop", "ignore", "skip"])
def test_trajectory_is_the_eager_one(graph_loop, nonfinite, schedule, optimizer):
    eager = train(graph_loop(nonfinite=nonfinite), False, schedule=schedule, optimizer=optimizer)
    loop = graph_loop(nonfinite=nonfinite)
    captured = train(loop, True, schedule=schedule, optimizer=optimizer)
    if schedule:
        assert torch.equal(eager[3], captured[3])
        assert_same(eager[1], captured[1])
        assert eager[2].get_last_lr() == captured[2].get_last_lr()
    else:
        # without a schedule the eager loop's rate is a Python float, the captured one's a float32 tensor
        torch.testing.assert_close(eager[3], captured[3], rtol=1e-5, atol=1e-6)
    assert loop.updates == 24
    # three warm calls, one that records, and the rest
    assert captured[0].captures == 1
    assert captured[0].replays == 20
    assert captured[0].reason is None


def test_skipped_updates_inside_replays(graph_loop):
    bad = {5, 6, 11}
    eager_loop, loop = graph_loop(nonfinite="skip"), graph_loop(nonfinite="skip")
    eager = train(eager_loop, False, poison=bad)
    captured = train(loop, True, poison=bad)
    assert_same(eager[1], captured[1])
    assert loop.skipped == eager_loop.skipped == 3
    assert eager[2].state_dict()["last_epoch"] == captured[2].state_dict()["last_epoch"] == 21


def test_stop_inside_replays_names_the_step(graph_loop):
    loop = graph_loop(nonfinite="stop")
    with pytest.raises(hotloop.NonFiniteError) as caught:
        train(loop, True, poison={9})
    assert caught.value.step == 9
    assert caught.value.indices == list(range(8, 16))


def test_results_are_each_call_s_own_or_static(graph_loop):
    loop = graph_loop()
    double = loop.capture(lambda x: 2 * x)
    static = loop.capture(lambda x: 3 * x, outputs="static")
    results = [double(torch.full((2,), float(i))) for i in range(8)]
    assert [r[0].item() for r in results] == [2.0 * i for i in range(8)]
    for i in range(8):
        value = static(torch.full((2,), float(i)))
    assert value[0].item() == 21.0
    assert static(torch.zeros(2)) is static(torch.ones(2))


def test_each_shape_has_its_own_recording(graph_loop):
    loop = graph_loop()
    captured = train(loop, True, batch=24)
    eager = train(graph_loop(), False, batch=24)
    assert_same(eager[1], captured[1])
    # 24, 24, 16: the short batch comes three times, warms once after the first recording, then records
    assert captured[0].captures == 2


@pytest.mark.parametrize("accumulation", [2, 3])
def test_windows(graph_loop, accumulation):
    eager = train(graph_loop(accumulation=accumulation), False, epochs=6)
    loop = graph_loop(accumulation=accumulation)
    captured = train(loop, True, epochs=6)
    for (name, p), q in zip(eager[1].state_dict().items(), captured[1].state_dict().values(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6, msg=name)
    assert captured[0].replays > 10
    assert eager[2].get_last_lr() == captured[2].get_last_lr()


def test_an_optimizer_that_cannot_be_recorded_steps_behind_the_graph(graph_loop):
    eager = train(graph_loop(nonfinite="ignore"), False, optimizer="foreach")
    captured = train(graph_loop(nonfinite="ignore"), True, optimizer="foreach")
    assert captured[0].replays == 20
    torch.testing.assert_close(eager[3], captured[3], rtol=1e-5, atol=1e-6)


class Config:
    def __init__(self):
        self.scale = 1.0
        self.inner = types.SimpleNamespace(shift=0.0)


SCALE = 1.0
CONFIG = Config()


def make_changing(loop, kind):
    """A step that reads a Python value of some kind, and a function that changes it."""
    global SCALE
    SCALE = 1.0
    local = 1.0
    config = Config()
    model = loop.prepare(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0)))
    table = {"scale": 1.0}

    def closure(x):
        return x * local

    def attribute(x):
        return x * config.scale + config.inner.shift

    def glob(x):
        return x * SCALE

    def mode(x):
        return model(x) if model.training else x

    def setting(x):
        return x * (1.0 + model[1].p)

    def mapping(x):
        return x * table["scale"]

    def change():
        nonlocal local
        global SCALE
        local, SCALE, config.inner.shift = 2.0, 2.0, 5.0
        table["scale"] = 2.0
        model.eval()
        model[1].p = 0.5

    return {f.__name__: f for f in (closure, attribute, glob, mode, setting, mapping)}[kind], change


@pytest.mark.parametrize("kind", ["closure", "attribute", "glob", "mode", "setting", "mapping"])
def test_a_changed_python_value_records_anew(graph_loop, kind, capsys):
    loop = graph_loop()
    function, change = make_changing(loop, kind)
    step = loop.capture(function)
    x = torch.ones(2, 2)
    for _ in range(6):
        assert torch.equal(step(x), function(x))
    assert step.captures == 1
    change()
    for _ in range(4):
        assert torch.equal(step(x), function(x))
    assert step.captures == 2
    assert "captured anew" in capsys.readouterr().err


def test_going_back_to_a_known_state_records_nothing(graph_loop):
    loop = graph_loop()
    model = loop.prepare(nn.Linear(2, 2))
    step = loop.capture(lambda x: model(x) * (2.0 if model.training else 1.0))
    x = torch.ones(1, 2)
    for train_mode in (True, False) * 6:
        model.train(train_mode)
        for _ in range(4):
            assert torch.equal(step(x), model(x) * (2.0 if train_mode else 1.0))
    assert step.captures == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda m, o: setattr(m[0], "weight", nn.Parameter(torch.ones(2, 2))),
        lambda m, o: m[0].weight.requires_grad_(False),
        lambda m, o: m[0].register_forward_hook(lambda *a: None),
        lambda m, o: o.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
        lambda m, o: o.param_groups[0].update(weight_decay=0.5),
        lambda m, o: o.load_state_dict(o.state_dict()),
    ],
    ids=["replaced parameter", "frozen", "hook", "group", "decay", "load"],
)
def test_changes_of_modules_and_optimizers_record_anew(graph_loop, change):
    loop = graph_loop()
    model = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    model, optimizer = loop.prepare(model, optimizer)

    @loop.capture
    def step(x):
        loss = model(x).square().mean()
        loop.backward(loss)
        loop.update(optimizer)
        return loss

    for _ in range(6):
        step(torch.ones(1, 2))
    assert step.captures == 1
    change(model, optimizer)
    for _ in range(4):
        step(torch.ones(1, 2))
    assert step.captures == 2


def test_a_rate_set_by_hand_is_obeyed_without_recording_anew(graph_loop):
    loop = graph_loop()
    weight = nn.Parameter(torch.ones(1))
    optimizer = loop.prepare(torch.optim.SGD([weight], lr=0.5, fused=True))

    @loop.capture
    def step(x):
        loop.backward((weight * x).sum())
        loop.update(optimizer)

    for _ in range(6):
        step(torch.ones(1))
    assert weight.item() == pytest.approx(1.0 - 6 * 0.5)
    optimizer.param_groups[0]["lr"] = 0.25
    step(torch.ones(1))
    assert weight.item() == pytest.approx(1.0 - 6 * 0.5 - 0.25)
    assert step.captures == 1


def test_a_value_that_changes_every_call_is_an_error_with_its_name(graph_loop):
    loop = graph_loop()
    count = 0

    def step(x):
        return x * count

    step = loop.capture(step)
    with pytest.raises(CaptureError, match="count"):
        for _ in range(20):
            count += 1
            step(torch.ones(1))


def test_scalar_changes_without_recording_anew(graph_loop):
    loop = graph_loop()
    loop.scalar("temperature", 1.0)
    step = loop.capture(lambda x: x * loop.scalar("temperature"))
    for i in range(8):
        loop.scalar("temperature", float(i))
        assert step(torch.ones(1)).item() == float(i)
    assert step.captures == 1


SEEN = []


def test_python_effects_are_refused_by_line(graph_loop, capsys):
    loop = graph_loop()

    def step(x):
        SEEN.append(x)
        return x

    step = loop.capture(step)
    SEEN.clear()
    for _ in range(6):
        step(torch.ones(1))
    assert len(SEEN) == 6
    assert step.captures == 0
    assert "SEEN.append" in step.reason
    assert "line" in step.reason
    assert "runs eagerly" in capsys.readouterr().err


class Counting(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.calls = kind, 0
        self.register_buffer("average", torch.zeros(1))

    def forward(self, x):
        if self.kind == "counter":
            self.calls += 1
        else:
            self.average = 0.9 * self.average + 0.1 * x.mean()
        return x * 2


@pytest.mark.parametrize(("kind", "name"), [("counter", "calls"), ("buffer", "average")])
def test_what_a_forward_changes_in_python_is_refused_by_name(graph_loop, kind, name):
    loop = graph_loop()
    model = loop.prepare(Counting(kind))
    step = loop.capture(lambda x: model(x))
    for _ in range(6):
        step(torch.ones(1))
    assert step.captures == 0
    assert name in step.reason
    expected = 6 if kind == "counter" else 1 - 0.9**6
    assert (model.calls if kind == "counter" else model.average.item()) == pytest.approx(expected)


def test_eager_context_runs_plain_python(graph_loop):
    loop = graph_loop()
    step = loop.capture(lambda x: x + 1)
    for _ in range(6):
        step(torch.ones(1))
    before = step.replays
    with loop.eager():
        assert step(torch.ones(1)).item() == 2.0
    assert step.replays == before


def test_log_and_mean_inside_a_step_happen_at_every_replay(graph_loop, tmp_path):
    from hotloop.metrics import read_metrics

    loop = graph_loop(record=tmp_path / "run")

    @loop.capture
    def step(x):
        value = x.sum()
        loop.log(value=value)
        loop.mean("m", value)
        return value

    for i in range(9):
        step(torch.full((2,), float(i)))
    assert loop.mean("m") == pytest.approx(2 * sum(range(9)) / 9)
    loop.end_training()
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    values = [row["value"] if isinstance(row, dict) else row.values["value"] for row in rows]
    assert values == [2.0 * i for i in range(9)]


def test_a_failing_recording_falls_back_and_says_the_line(graph_loop, monkeypatch, capsys):
    loop = graph_loop()
    step = loop.capture(lambda x: x + 1)

    def record(work, generators=(), feeds=None):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(step._recorder, "record", record)
    assert [step(torch.full((1,), float(i))).item() for i in range(6)] == [i + 1.0 for i in range(6)]
    assert "not permitted" in step.reason
    assert "runs eagerly" in capsys.readouterr().err


def test_modes_on_the_cpu(capsys):
    loop = hotloop.Loop(record=False, device="cpu")
    assert loop.capture(lambda x: x).mode == "off"
    assert capsys.readouterr().err == ""
    assert loop.capture(lambda x: x, mode="graph").mode == "off"
    assert "records no graphs" in capsys.readouterr().err
    assert loop.capture(lambda x: x, mode="full").mode == "compile"
    with pytest.raises(hotloop.HotloopError, match="auto, off, compile, graph, full"):
        loop.capture(lambda x: x, mode="fast")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"mode": "fast"}, "auto, off, compile, graph, full"),
        ({"outputs": "mine"}, '"clone", "static"'),
        ({"check_every": 2.5}, "check_every=2.5.*whole number"),
        ({"check_every": 0}, "at least 1"),
        ({"pool_bytes": "4GB"}, "pool_bytes='4GB'.*whole number"),
        ({"buckets": 8}, "hotloop.capture.Buckets"),
        ({"function": "full"}, r"mode=\.\.\."),
        ({"function": lambda x: (yield x)}, "yields"),
    ],
)
def test_options_that_make_no_sense_are_errors(given, said):
    loop = hotloop.Loop(record=False, device="cpu")
    with pytest.raises(SettingError, match=said):
        loop.capture(**{"function": torch.neg, **given})


def test_a_step_without_recordings_is_shown_as_that():
    loop = hotloop.Loop(record=False, device="cpu")
    assert repr(loop.capture(torch.neg)) == "<captured step neg, mode 'off': runs as it is>"
    assert "forwards compiled" in repr(loop.capture(torch.neg, mode="compile"))


def test_how_a_step_runs_is_what_it_is_shown_as(graph_loop):
    def step(x):
        return x + 1

    captured = graph_loop().capture(step, mode="graph")
    for _ in range(8):
        captured(torch.ones(1))
    assert repr(captured) == "<captured step step, mode 'graph': 1 recordings, 4 replays>"
    printing = graph_loop().capture(lambda x: print(x), mode="graph")
    assert "runs eagerly: line" in repr(printing)


def test_a_method_is_captured_for_its_object():
    loop = hotloop.Loop(record=False, device="cpu")

    class Trainer:
        def __init__(self, factor):
            self.factor = factor
            self.step = loop.capture(self.step)

        def step(self, x):
            return x * self.factor

    assert [Trainer(k).step(torch.ones(())).item() for k in (2, 3)] == [2.0, 3.0]


def test_a_scalar_is_one_number():
    loop = hotloop.Loop(record=False, device="cpu")
    with pytest.raises(SettingError, match=r"holds one number; pass a tensor of shape \(3,\)"):
        loop.scalar("weights", torch.ones(3))
    assert loop.scalar("weight", torch.tensor([0.5])).item() == 0.5


def test_a_state_loaded_after_captures_brings_its_rate_to_the_recording(graph_loop, tmp_path):
    def run(save_at):
        torch.manual_seed(0)
        loop = graph_loop()
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        model, optimizer = loop.prepare(model, optimizer)

        @loop.capture
        def train(x):
            loss = model(x).square().mean()
            loop.backward(loss)
            loop.update(optimizer)
            return loss

        for k in range(8):
            if k == 6:
                optimizer.param_groups[0]["lr"] = 0.01
            train(torch.full((2, 3), 1.0 + k))
            if k == save_at:
                loop.save_state(tmp_path / "c", wait=True)
        return loop, model, optimizer, train

    loop, model, optimizer, train = run(save_at=5)
    late = model.weight.detach().clone()
    loop.resume(tmp_path / "c")
    captures = train.captures
    for k in (6, 7):
        # without the loaded rate, 0.1, the recording would go on with 0.01
        train(torch.full((2, 3), 1.0 + k))
    assert optimizer.param_groups[0]["lr"].item() == pytest.approx(0.1)
    assert not torch.equal(model.weight, late)
    again, model_again, optimizer_again, train_again = run(save_at=-1)
    again.resume(tmp_path / "c")
    optimizer_again.param_groups[0]["lr"] = 0.1
    with again.eager():
        for k in (6, 7):
            train_again(torch.full((2, 3), 1.0 + k))
    assert torch.equal(model.weight, model_again.weight)
    assert train.captures <= captures + 1


def test_a_tensor_may_be_given_twice_and_is_told_from_two(graph_loop, monkeypatch):
    loop = graph_loop()
    step = loop.capture(lambda x, y, z: x + 10 * y + 100 * z, mode="graph")
    a, b = torch.tensor([1.0]), torch.tensor([2.0])
    for _ in range(5):
        assert step(a, b, a).item() == 121.0
    general = []
    call = step._call_generally
    monkeypatch.setattr(step, "_call_generally", lambda *args: (general.append(1), call(*args))[1])
    for x, y in ((a, b), (b, a), (torch.tensor([3.0]), b)):
        assert step(x, y, x).item() == 101 * x.item() + 10 * y.item()
    assert general == []
    # other tensors in those places, too many of them, or of another kind
    assert step(a, b, b).item() == 221.0
    assert step(a, a, a).item() == 111.0
    assert len(general) == 2
    assert step(a.double(), b, a).item() == 121.0
    with pytest.raises(TypeError):
        step(a, b)
    assert step.captures == 1
