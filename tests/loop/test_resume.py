"""Exact resume: broken anywhere and taken up again, a run gives the unbroken one's losses and weights, bit for bit."""

import json
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset

import hotloop
from hotloop.errors import CheckpointError, PrepareError

KINDS = ["host", "resident"]
SAMPLES, BATCH, EPOCHS = 30, 8, 4  # four batches an epoch, the last one short


class Noisy(Dataset):
    """Samples with noise from all three global streams."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, i):
        noise = torch.randn(6) + random.random() + np.random.rand()
        return torch.sin(torch.arange(6.0) * (i + 1)) + 0.1 * noise, torch.tensor([i % 3 - 1.0])


class Ema:
    """An average of weights kept beside the loop, as users write it."""

    def __init__(self, model):
        self.model = model
        self.values = [p.detach().clone() for p in model.parameters()]

    def update(self):
        for value, p in zip(self.values, self.model.parameters(), strict=True):
            value.lerp_(p.detach(), 0.1)

    def state_dict(self):
        return {"values": self.values}

    def load_state_dict(self, state):
        self.values = [v.clone() for v in state["values"]]


SCHEDULERS = {
    "none": None,
    "onecycle": lambda o: lr_scheduler.OneCycleLR(o, 0.05, total_steps=EPOCHS * 4),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(o, 12)], [3]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 3), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "multistep": lambda o: lr_scheduler.MultiStepLR(o, [2, 5, 9]),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda k: 0.9**k),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.05, step_size_up=3, cycle_momentum=False),
}


class Script:
    """One user's script; `run` is what a process executes."""

    def __init__(self, make_loop, folder, kind, *, optimizer="adamw", scheduler="onecycle", **options):
        self.make_loop, self.folder, self.kind = make_loop, folder, kind
        self.optimizer, self.scheduler = optimizer, scheduler
        self.workers = options.pop("workers", 0)
        self.start = options.pop("start", None)
        self.options = options
        self.losses, self.events, self.batches = [], [], 0

    def build(self):
        self.loop = loop = self.make_loop(self.kind, seed=7, **self.options)
        model = nn.Sequential(
            nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 1)
        )
        fused = True if self.kind == "resident" else None
        if self.optimizer == "adamw":
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=fused)
        make = SCHEDULERS[self.scheduler]
        scheduler = None if make is None else make(optimizer)
        loader = DataLoader(Noisy(), BATCH, shuffle=True, num_workers=self.workers)
        self.model, self.optim, self.loader = loop.prepare(model, optimizer, loader)
        self.schedule = None if scheduler is None else loop.prepare(scheduler)
        self.ema = Ema(self.model)
        loop.register(self.ema)

    def run(self, stop=None, resume=True):
        """Trains; after saving at the place `stop` = (epoch, batch or "start" or "end"), the process is gone."""
        # a new process has other random numbers, whatever the last one had
        torch.manual_seed(random.SystemRandom().randrange(2**31))
        self.build()
        loop = self.loop
        resumed = loop.resume(self.folder) if resume else False
        for epoch in loop.epochs(EPOCHS):
            if stop == (epoch, "start"):
                loop.save_state(self.folder, wait=True)
                return resumed
            self.events.append(epoch)
            for x, y in self.loader:
                loss = F.mse_loss(self.model(x), y)
                loop.backward(loss)
                loop.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optim.step()
                if self.schedule is not None and self.scheduler != "plateau":
                    self.schedule.step()
                self.optim.zero_grad()
                self.ema.update()
                self.losses.append(loss.item())
                loop.mean("loss", loss, weight=len(x))
                place = self.batches % 4
                self.batches += 1
                if stop == (epoch, place):
                    loop.save_state(self.folder, wait=True)
                    return resumed
            mean = loop.mean("loss")
            self.losses.append(mean)
            if self.scheduler == "plateau":
                self.schedule.step(mean)
            if stop == (epoch, "end"):
                loop.save_state(self.folder, wait=True)
                return resumed
        return resumed

    def final(self):
        return {
            "model": self.model.state_dict(),
            "ema": self.ema.state_dict(),
            "lr": [float(group["lr"]) for group in self.optim.param_groups],
            "optimizer": self.optim.state_dict()["state"],
            "updates": self.loop.updates,
            "rng": torch.get_rng_state(),
        }


def assert_equal(a, b, where=""):
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b), where
    elif isinstance(a, dict):
        assert list(a) == list(b), where
        for key in a:
            assert_equal(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_equal(x, y, f"{where}[{i}]")
    else:
        assert a == b, where


def check(make_loop, tmp_path, kind, stops, **options):
    whole = Script(make_loop, tmp_path / "whole", kind, **options)
    assert whole.run() is False
    broken = Script(make_loop, tmp_path / "broken", kind, **options)
    for number, stop in enumerate([*stops, None]):
        assert broken.run(stop) is (number > 0)
    # an epoch that is taken up again in its middle announces itself a second time
    assert sorted(set(broken.events)) == whole.events == list(range(EPOCHS))
    repeated = sum(1 for epoch, place in stops if place not in ("start", "end"))
    assert len(broken.events) == len(whole.events) + repeated
    assert_equal(broken.losses, whole.losses)
    assert_equal(broken.final(), whole.final())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "stop", [(0, 0), (1, 1), (1, 3), (1, "end"), (2, "start"), (0, "start"), (3, 3)], ids=str
)
def test_broken_once(make_loop, tmp_path, kind, stop):
    check(make_loop, tmp_path, kind, [stop])


@pytest.mark.parametrize("kind", KINDS)
def test_broken_often(make_loop, tmp_path, kind):
    check(make_loop, tmp_path, kind, [(0, 2), (0, 3), (1, "end"), (2, 1), (2, 3), (3, "start")])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stop", [(1, 0), (1, 1), (2, 3)], ids=str)
@pytest.mark.parametrize("accumulation", [2, 3])
def test_broken_inside_an_accumulation_window(make_loop, tmp_path, kind, stop, accumulation):
    check(make_loop, tmp_path, kind, [stop], accumulation=accumulation, scheduler="none")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scheduler", sorted(SCHEDULERS))
def test_every_schedule(make_loop, tmp_path, kind, scheduler):
    check(make_loop, tmp_path, kind, [(0, 2), (2, "end")], scheduler=scheduler, optimizer="sgd")


def test_worker_processes(make_loop, tmp_path):
    check(make_loop, tmp_path, "host", [(1, 1), (2, "end")], workers=2)


@pytest.mark.parametrize("kind", KINDS)
def test_bf16(make_loop, tmp_path, kind):
    check(make_loop, tmp_path, kind, [(1, 1)], precision="bf16")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nonfinite", ["skip", "ignore"])
def test_other_guards(make_loop, tmp_path, kind, nonfinite):
    check(make_loop, tmp_path, kind, [(1, 1)], nonfinite=nonfinite, optimizer="sgd")


def small(make_loop, kind="host", **options):
    """A loop with one layer and a loader of ten batches."""
    loop = make_loop(kind, **options)
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True if kind == "resident" else None)
    data = [(torch.randn(4, 2), torch.randn(4, 1)) for _ in range(10)]
    model, optimizer, loader = loop.prepare(model, optimizer, data)
    return loop, model, optimizer, loader


def step(loop, model, optimizer, batch):
    x, y = batch
    loop.backward(F.mse_loss(model(x), y))
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("kind", KINDS)
def test_steps_goes_on_at_the_right_number(make_loop, tmp_path, kind):
    loop, model, optimizer, loader = small(make_loop, kind)
    batches = iter(loader)
    seen = []
    for number in loop.steps(9):
        seen.append(number)
        step(loop, model, optimizer, next(batches))
        if number == 3:
            loop.save_state(tmp_path, wait=True)
    assert seen == list(range(9))
    again, twin, optimizer, loader = small(make_loop, kind)
    assert again.resume(tmp_path)
    batches = iter(loader)
    seen = []
    for number in again.steps(9):
        seen.append(number)
        step(again, twin, optimizer, next(batches))
    assert seen == [4, 5, 6, 7, 8]
    assert torch.equal(model.weight, twin.weight)
    assert list(again.steps(9)) == []


@pytest.mark.parametrize("kind", KINDS)
def test_steps_repeats_the_number_inside_a_window(make_loop, kind):
    loop, model, optimizer, loader = small(make_loop, kind, accumulation=2)
    batches = iter(loader)
    seen = []
    for number in loop.steps(3):
        seen.append(number)
        step(loop, model, optimizer, next(batches))
    assert seen == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("kind", KINDS)
def test_save_before_the_first_update(make_loop, tmp_path, kind):
    loop, model, _, _ = small(make_loop, kind)
    with torch.no_grad():
        model.weight.fill_(3.0)
    loop.save_state(tmp_path, wait=True)
    again, twin, _, _ = small(make_loop, kind)
    assert again.resume(tmp_path)
    assert torch.equal(twin.weight, model.weight)
    assert list(again.epochs(2)) == [0, 1]


def test_resume_without_a_checkpoint_is_false_and_load_state_an_error(make_loop, tmp_path):
    loop, _, _, _ = small(make_loop)
    assert loop.resume(tmp_path / "nothing") is False
    (tmp_path / "empty").mkdir()
    assert loop.resume(tmp_path / "empty") is False
    with pytest.raises(CheckpointError, match="no checkpoint"):
        loop.load_state(tmp_path / "empty")


def test_resume_before_prepare_is_an_error(make_loop, tmp_path):
    with pytest.raises(PrepareError, match="after prepare"):
        make_loop().resume(tmp_path)


def test_other_objects_than_saved_are_named(make_loop, tmp_path):
    loop, _, _, _ = small(make_loop)
    loop.save_state(tmp_path, wait=True)

    other = make_loop()
    other.prepare(nn.Linear(2, 1))
    with pytest.raises(CheckpointError) as caught:
        other.resume(tmp_path)
    text = str(caught.value)
    assert "1 modules, 1 optimizers, 1 loaders" in text
    assert str(tmp_path) in text

    wide = make_loop()
    model = nn.Linear(3, 1)
    wide.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), [(torch.ones(1, 2), torch.ones(1, 1))])
    with pytest.raises(CheckpointError, match=r"(?s)module number 0 \(Linear\).*weight"):
        wide.resume(tmp_path)

    renamed = make_loop()
    model = nn.Bilinear(1, 1, 1)
    renamed.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), [(torch.ones(1, 2), torch.ones(1, 1))]
    )
    with pytest.raises(CheckpointError, match="module number 0"):
        renamed.resume(tmp_path)

    groups = make_loop()
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias]}], lr=0.1)
    groups.prepare(model, optimizer, [(torch.ones(1, 2), torch.ones(1, 1))])
    with pytest.raises(CheckpointError, match=r"optimizer number 0 \(SGD\)"):
        groups.resume(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_save_beside_training_holds_the_values_of_its_moment(make_loop, tmp_path, kind):
    loop, model, optimizer, loader = small(make_loop, kind)
    batches = iter(loader)
    step(loop, model, optimizer, next(batches))
    expected = {k: v.clone() for k, v in model.state_dict().items()}
    loop.save_state(tmp_path)
    for _ in range(3):
        step(loop, model, optimizer, next(batches))
    with torch.no_grad():
        model.weight.fill_(float("nan"))
    loop.end_training()
    again, twin, _, _ = small(make_loop, kind)
    assert again.resume(tmp_path)
    assert_equal(dict(twin.state_dict()), expected)
    assert again.updates == 1


def saved(folder):
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))


def test_every_so_many_updates(make_loop, tmp_path):
    loop, model, optimizer, loader = small(make_loop)
    due = []
    for _ in loop.epochs(4):
        for batch in loader:
            step(loop, model, optimizer, batch)
            if loop.save_state(tmp_path, every="7 updates", keep=3):
                due.append(loop.updates)
    loop.end_training()
    assert due == [7, 14, 21, 28, 35]
    assert saved(tmp_path) == [21, 28, 35]

    # a resumed run saves where the unbroken one does
    again, model, optimizer, loader = small(make_loop)
    assert again.resume(tmp_path / "step-0000000021")
    due = []
    for _ in again.epochs(4):
        for batch in loader:
            step(again, model, optimizer, batch)
            if again.save_state(tmp_path / "again", every="7 updates"):
                due.append(again.updates)
    assert due == [28, 35]


def test_every_epoch(make_loop, tmp_path):
    loop, model, optimizer, loader = small(make_loop)
    due = []
    for epoch in loop.epochs(5):
        for batch in loader:
            step(loop, model, optimizer, batch)
        if loop.save_state(tmp_path, every="2 epochs"):
            due.append(epoch)
    assert due == [1, 3]


def test_every_so_many_seconds(make_loop, tmp_path, monkeypatch):
    import hotloop.loop.every as every

    clock = [100.0]
    monkeypatch.setattr(every.time, "monotonic", lambda: clock[0])
    loop, model, optimizer, loader = small(make_loop)
    due = []
    for _ in loop.epochs(1):
        for batch in loader:
            step(loop, model, optimizer, batch)
            clock[0] += 0.09
            if loop.save_state(tmp_path, every="0.2 seconds"):
                due.append(loop.updates)
    # counted from the first call, at 100.09
    assert due == [4, 7, 10]


def test_save_goes_to_the_path_given_last(make_loop, tmp_path):
    loop, model, optimizer, loader = small(make_loop, record=tmp_path / "run")
    for batch in loader:
        step(loop, model, optimizer, batch)
        break
    loop.save_state(wait=True)
    assert saved(tmp_path / "run" / "checkpoint") == [1]
    loop.resume(tmp_path / "elsewhere")
    loop.save_state(wait=True)
    assert saved(tmp_path / "elsewhere") == [1]


def test_what_every_does_not_understand(make_loop):
    loop = make_loop()
    for wrong in ("100", "5 fortnights", "1.5 epochs", "0 updates", "-3 updates"):
        with pytest.raises(hotloop.HotloopError, match=r"every|greater than 0"):
            loop.save_state("nowhere", every=wrong)


@pytest.mark.parametrize("kind", KINDS)
def test_refused_updates_are_remembered(make_loop, tmp_path, kind):
    """Counts of skipped updates go on, and the schedule does not advance with the first refused one after a resume."""

    def build():
        loop, model, optimizer, _ = small(make_loop, kind, nonfinite="skip")
        schedule = loop.prepare(lr_scheduler.StepLR(optimizer, 1, gamma=0.5))
        return loop, model, optimizer, schedule

    def run(loop, model, optimizer, schedule, bad):
        loop.backward(model(torch.ones(1, 2)).sum() * (float("nan") if bad else 1.0))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    loop, *rest = build()
    for bad in (False, True, False):
        run(loop, *rest, bad)
    assert rest[-1].get_last_lr() == [0.025]
    loop.save_state(tmp_path, wait=True)
    again, *rest = build()
    assert again.resume(tmp_path)
    assert (again.updates, again.skipped) == (3, 1)
    run(again, *rest, True)
    assert rest[-1].get_last_lr() == [0.025]
    run(again, *rest, False)
    assert rest[-1].get_last_lr() == [0.0125]
    assert (again.updates, again.skipped) == (5, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_going_back_after_a_fault(make_loop, tmp_path, kind):
    """After "stop" has raised, load_state makes the loop usable again."""
    loop, model, optimizer, loader = small(make_loop, kind)
    loop.save_state(tmp_path, wait=True)
    with pytest.raises(hotloop.NonFiniteError):
        for _ in loop.epochs(1):
            for x, y in loader:
                step(loop, model, optimizer, (x * float("nan"), y))
    loop.load_state(tmp_path)
    before = model.weight.clone()
    for _ in loop.epochs(1):
        for batch in loader:
            step(loop, model, optimizer, batch)
    assert torch.isfinite(model.weight).all()
    assert not torch.equal(model.weight, before)
    assert loop.updates == 10


@pytest.mark.parametrize("kind", KINDS)
def test_the_update_of_a_fault_is_counted_over_resumes(make_loop, tmp_path, kind):
    loop, model, optimizer, loader = small(make_loop, kind)
    for batch in list(loader)[:4]:
        step(loop, model, optimizer, batch)
    loop.save_state(tmp_path, wait=True)
    again, model, optimizer, _ = small(make_loop, kind)
    again.resume(tmp_path)
    with pytest.raises(hotloop.NonFiniteError) as caught:
        for number in again.steps(30):
            batch = (torch.full((4, 2), float("nan") if number == 6 else 1.0), torch.ones(4, 1))
            step(again, model, optimizer, batch)
    assert caught.value.step == 6


def test_accumulated_means_and_the_record_name_go_along(make_loop, tmp_path):
    loop, _, _, _ = small(make_loop)
    loop.mean("a", 1.0)
    loop.mean("a", 2.0, weight=3)
    loop.save_state(tmp_path, wait=True)
    again, _, _, _ = small(make_loop)
    again.resume(tmp_path)
    again.mean("a", 10.0)
    assert again.mean("a") == pytest.approx((1 + 2 * 3 + 10) / 5)
    manifests = list(tmp_path.glob("step-*/*.json"))
    assert manifests
    for path in manifests:
        json.loads(path.read_text())


def test_registered_objects_need_a_state(make_loop):
    with pytest.raises(PrepareError, match="int"):
        make_loop().register(3)
