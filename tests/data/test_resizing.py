"""Progressive resizing: schedules, sizes, batches, rates; resized images and refreshed norms against torch's own."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hotloop
from hotloop.data import (
    Augment,
    ResidentImages,
    ResidentLoader,
    ResidentWindows,
    Resizing,
    refresh_norms,
    resize_images,
)
from hotloop.errors import DataError
from hotloop.optim import RateScheduler, constant, linear, one_cycle


def images(n, size, g=None):
    g = g or torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (n, size, size, 3), dtype=torch.uint8, generator=g)


def test_stages_hold_where_the_schedule_says():
    plan = Resizing([(1.5, 16), (1.0, 24), (2.0, 32)], batch_size=60, multiple=4)
    assert [(plan.at(e).size, plan.at(e).batch_size) for e in (0, 1.499, 1.5, 2.4, 2.5, 99)] == [
        (16, 240),
        (16, 240),
        (24, 104),
        (24, 104),
        (32, 60),
        (32, 60),
    ]
    assert plan.epochs == 4.5


@pytest.mark.parametrize(("cost", "batch"), [(2, 128), (1, 64), (0, 32)])
def test_batches_grow_as_pixels_shrink_and_rates_follow(cost, batch):
    for rate, factor in (("linear", batch / 32), ("sqrt", math.sqrt(batch / 32)), ("none", 1.0)):
        first, last = Resizing([(1, 16), (1, 32)], batch_size=32, cost=cost, rate=rate).stages
        assert first.batch_size == batch
        assert first.rate == pytest.approx(factor)
        assert (last.batch_size, last.rate) == (32, 1.0)
    assert Resizing([(1, 8), (1, 32)], batch_size=32, most=100).stages[0].batch_size == 96


def test_a_ramp_begins_waits_and_ends_as_told():
    plan = Resizing.ramp(96, 128, 20, delay=0.5, finish=0.25, step=16, batch_size=8)
    assert [(s.until, s.size) for s in plan.stages] == [(10.0, 96), (15.0, 112), (math.inf, 128)]
    assert [s.size for s in Resizing.ramp(24, 28, 10, batch_size=8).stages] == [24, 28]


def test_misuse_says_what_to_do():
    with pytest.raises(DataError, match="pairs"):
        Resizing([(0, 16)], batch_size=4)
    with pytest.raises(DataError, match="valid values are"):
        Resizing([(1, 16)], batch_size=4, rate="cubic")


@pytest.mark.parametrize("size", [5, 17, 24, 32, 41])
def test_resized_images_are_torchs_within_half_a_unit(size):
    x = images(7, 32)
    ours = resize_images(x, size, chunk_bytes=3 * 32 * 32 * 3)
    theirs = F.interpolate(
        x.permute(0, 3, 1, 2).double(), (size, size), mode="bilinear", antialias=True, align_corners=False
    ).permute(0, 2, 3, 1)
    assert (ours.double() - theirs).abs().max() <= 0.501
    wide = torch.randint(0, 256, (2, 32, 48, 1), dtype=torch.uint8)
    assert resize_images(wide, 16).shape == (2, 16, 24, 1)


def test_the_loader_hands_out_what_the_schedule_says():
    plan = Resizing([(1.5, 4), (1.0, 6), (1.0, 8)], batch_size=8, multiple=4)
    loader = hotloop.Loop(record=False).prepare(
        ResidentLoader(ResidentImages(images(64, 8), torch.arange(64)), resizing=plan, seed=2)
    )
    sizes, stages, seen = [], [], []
    for _ in range(4):
        assert len(loader) == sum(1 for _ in loader.source.cuts(0, 1))
        ids = []
        for x, y in loader:
            assert x.shape[-1] == x.shape[-2] == loader.stage.size
            sizes.append((loader.epoch, x.shape[-1], len(x)))
            stages.append(loader.stage)
            ids.append(y)
        seen.append(torch.cat(ids))
    assert all(torch.equal(s.sort().values, torch.arange(64)) for s in seen)
    assert sizes == [
        *[(0, 4, 32)] * 2,
        (1, 4, 32),
        *[(1, 6, 12)] * 2,
        (1, 6, 8),
        *[(2, 6, 12)] * 3,
        *[(2, 8, 8)] * 3,
        (2, 8, 4),
        *[(3, 8, 8)] * 8,
    ]
    assert stages == plan.batches(64, 4)


def test_a_run_is_resumed_in_the_middle_of_a_stage():
    def make():
        plan = Resizing([(1, 4), (1, 8)], batch_size=4)
        source = ResidentImages(images(40, 8), torch.arange(40))
        return hotloop.Loop(record=False).prepare(ResidentLoader(source, resizing=plan, seed=2))

    loader, whole = make(), []
    for _ in range(2):
        whole += list(loader)
    loader, again = make(), []
    for x in loader:
        again.append(x)
        if len(again) == 2:
            break
    loader, fresh = make(), loader
    loader.load_state_dict(fresh.state_dict())
    # left in the middle, the next epoch comes; a state taken inside goes on inside
    inside = make()
    running = iter(inside)
    next(running), next(running)
    state = inside.state_dict()
    other = make()
    other.load_state_dict(state)
    rest = list(other) + list(other)
    assert all(
        torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(whole[2:], rest, strict=True)
    )


def test_short_contexts_first():
    plan = Resizing([(1, 4), (1, 8)], batch_size=3, cost=1, multiple=1, rate="none")
    source = ResidentWindows(torch.arange(60.0)[:, None], 8, torch.arange(60))
    loader = ResidentLoader(source, resizing=plan, seed=2)
    shapes = []
    for _ in range(2):
        for x, y in loader:
            shapes.append(tuple(x.shape[:2]))
            assert torch.equal(x[:, -1, 0].long(), y)
    assert len(source) == 53
    assert shapes == [*[(6, 4)] * 8, (5, 4), *[(3, 8)] * 17, (2, 8)]


def test_rates_in_samples_follow_the_batches():
    plan = Resizing([(1, 4), (1, 8)], batch_size=4, multiple=1)
    batches = plan.batches(32)
    assert [b.batch_size for b in batches] == [16] * 2 + [4] * 8
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    size = [b.batch_size for b in batches]
    whole = RateScheduler(
        optimizer, linear(1.0, 0.0, 64, unit="samples"), per_step=lambda k: size[min(k, len(size) - 1)]
    )
    found = []
    for k in range(len(batches)):
        found.append(whole.get_last_lr()[0] * batches[k].rate)
        optimizer.step()
        whole.step()
    assert found == pytest.approx([4.0, 3.0, *[1 - (32 + 4 * i) / 64 for i in range(8)]])
    assert constant(1.0)(3) == 1.0


def test_norms_are_refreshed_as_torchs_own_helper_does():
    torch.manual_seed(0)

    def make():
        torch.manual_seed(1)
        return nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(0.5), nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4)
        )

    ours, theirs = make().train(), make().train()
    batches = [torch.randn(6, 3, 9, 9) * (k + 1) for k in range(4)]
    torch.optim.swa_utils.update_bn(batches, theirs[:2])
    assert refresh_norms(ours, batches) == 4
    assert torch.equal(ours[1].running_mean, theirs[1].running_mean)
    assert torch.equal(ours[1].running_var, theirs[1].running_var)
    assert ours[1].momentum == ours[4].momentum == 0.1
    assert all(m.training for m in ours.modules())
    seen = []
    hook = ours[3].register_forward_hook(lambda _m, _i, out: seen.append(out.mean((0, 2, 3))))
    refresh_norms(ours, [(b, None) for b in batches])
    hook.remove()
    assert torch.allclose(ours[4].running_mean, torch.stack(seen).mean(0), atol=1e-6)
    assert refresh_norms(nn.Linear(2, 2), iter(())) == 0


def test_small_images_can_be_crops():
    x = images(40, 8)
    source = ResidentImages(x, torch.arange(40), shrink="crop")
    loader = ResidentLoader(source, seed=2, resizing=Resizing([(1, 4), (1, 8)], batch_size=4))
    whole = ResidentImages(x).cut(torch.arange(40), torch.tensor(0), 0, None)
    seen = set()
    for crops, labels in loader:
        assert crops.shape[2:] == (4, 4)
        for crop, label in zip(crops, labels, strict=True):
            places = [
                (i, j)
                for i in range(5)
                for j in range(5)
                if torch.equal(crop, whole[label, :, i : i + 4, j : j + 4])
            ]
            assert len(places) == 1
            seen.update(places)
    assert len(seen) > 10  # of 25
    assert all(b[0].shape[2:] == (8, 8) for b in loader)
    with pytest.raises(DataError, match="resize, crop"):
        ResidentImages(x, shrink="squeeze")


@pytest.mark.parametrize(
    "settings",
    [
        {"batch_size": 0},
        {"batch_size": 8, "multiple": 0},
        {"batch_size": 8, "cost": -1.0},
        {"batch_size": 8, "most": 4},
        {"batch_size": 8, "sizes": [(float("nan"), 16)]},
        {"batch_size": 8, "sizes": [(float("inf"), 16), (1, 32)]},
        {"batch_size": 8, "sizes": [(1, 16.5), (1, 32)]},
        {"batch_size": 8, "sizes": [16, 32]},
    ],
)
def test_plans_that_cannot_be_are_refused(settings):
    sizes = settings.pop("sizes", [(1, 16), (1, 32)])
    with pytest.raises(DataError, match="|".join(["sizes", "at least", "most"])):
        Resizing(sizes, **settings)


def test_batches_of_smaller_samples_are_never_smaller():
    plan = Resizing([(1, 31), (1, 32)], batch_size=12)
    assert [(s.batch_size, s.rate) for s in plan.stages] == [(12, 1.0), (12, 1.0)]
    with pytest.raises(DataError, match="start < end"):
        Resizing.ramp(32, 24, 10, batch_size=8)
    with pytest.raises(DataError, match="below 1"):
        Resizing.ramp(24, 32, 10, batch_size=8, delay=0.9, finish=0.9)
    for odd in (torch.rand(2, 8, 8, 3), torch.zeros(8, 8, 3, dtype=torch.uint8)):
        with pytest.raises(DataError, match="uint8"):
            resize_images(odd, 4)


def test_a_loop_knows_how_many_updates_are_to_come_though_epochs_differ():
    loop = hotloop.Loop(record=False, seed=0)
    plan = Resizing([(1.3, 8), (0.7, 16)], batch_size=8)
    model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, loader = loop.prepare(
        model, optimizer, ResidentLoader(ResidentImages(images(100, 16)), resizing=plan)
    )
    total, told = len(plan.batches(100, 3)), []
    for _ in loop.epochs(3):
        for x in loader:
            told.append(loop._course.remaining())
            loop.backward(model(x).square().mean())
            loop.update(optimizer)
    assert told == list(range(total, 0, -1))


@pytest.mark.parametrize("unit", ["steps", "samples", "epochs"])
@pytest.mark.parametrize(("world", "drop_last"), [(1, False), (2, False), (1, True)])
def test_rates_follow_the_batches(unit, world, drop_last):
    plan = Resizing([(1.5, 16), (1.5, 32)], batch_size=8, rate="sqrt")
    samples = 100
    length = {"steps": 20, "samples": 300, "epochs": 3}[unit]
    rate = one_cycle(0.1, length, unit=unit)
    passed, wanted = 0.0, []
    for epoch in range(3):
        # batches of a smaller size are four times as large, their rate twice as high
        at = 0
        while at < samples:
            begins = epoch + at / samples
            factor, size = (2.0, 32) if begins < 1.5 else (1.0, 8)
            taken = min(size * world, samples - at)
            at += taken
            if drop_last and taken < size * world:
                break
            # what is dropped is no sample of an update, but the epoch is over all the same
            wanted.append(rate(begins if unit == "epochs" else passed) * factor)
            passed += taken if unit == "samples" else 1
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0, momentum=0.9)
    scheduler = plan.scheduler(optimizer, rate, samples, world=world, drop_last=drop_last)
    found = []
    for _ in wanted:
        found.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert found == pytest.approx(wanted, rel=1e-12)


def test_a_rate_that_the_plan_cannot_count_is_refused():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    plan = Resizing([(1, 16), (1, 32)], batch_size=8)
    with pytest.raises(DataError, match="tokens"):
        plan.scheduler(optimizer, constant(0.1, unit="tokens"), 64)
    with pytest.raises(DataError, match="no update"):
        plan.scheduler(optimizer, constant(0.1), 4, drop_last=True)
    with pytest.raises(DataError, match="whole epochs"):
        plan.scheduler(optimizer, constant(0.1), 64, 1.5)


@pytest.mark.parametrize(("start", "end"), [(24, 32), (16, 32), (8, 64)])
def test_a_ramp_takes_the_epochs_it_was_given(start, end):
    for epochs in range(1, 60):
        plan = Resizing.ramp(start, end, epochs, batch_size=8, cost=0)
        assert plan.epochs == epochs
        assert len(plan.batches(16)) == 2 * epochs


def test_a_rate_in_epochs_ends_with_a_run_that_drops_batches():
    plan = Resizing([(5, 16), (5, 32)], batch_size=32, cost=0)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = plan.scheduler(optimizer, linear(1.0, 0.0, 10, unit="epochs"), 100, drop_last=True)
    for k in range(30):
        assert scheduler.get_last_lr()[0] == pytest.approx(1.0 - (k // 3 + k % 3 * 0.32) / 10)
        optimizer.step()
        scheduler.step()
    assert scheduler.get_last_lr() == [0.0]


def test_whole_sizes_may_be_floats():
    plan = Resizing([(1, 8.0), (1, 16)], batch_size=8)
    loader = ResidentLoader(ResidentImages(images(8, 16)), resizing=plan)
    assert [x.shape[2:] for _ in range(2) for x in loader] == [(8, 8), (16, 16)]


@pytest.mark.parametrize("batches", [[], [torch.randn(4, 2), torch.randn(1, 2)]])
def test_norms_that_cannot_be_refreshed_stay_as_they_were(batches):
    """No batch at all, and one of a single sample, whose variance torch refuses."""
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).train()
    model(torch.randn(8, 2))
    model.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises((DataError, ValueError), match=r"no batch|more than 1 value"):
        refresh_norms(model, batches)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not model[1].training
    assert model[1].momentum == 0.1


def test_a_fixed_view_moves_in_proportion_to_the_size():
    x = images(3, 16)
    index, zero = torch.arange(3), torch.tensor(0)
    small = ResidentImages(resize_images(x, 8), how=Augment(offset=(2, -1)))
    seen = ResidentImages(x, how=Augment(offset=(4, -2))).cut(index, zero, 0, 8)
    assert torch.equal(seen, small.cut(index, zero, 0, None))


@pytest.mark.parametrize("unit", ["samples", "epochs"])
def test_rates_follow_the_batches_of_a_run_resumed_with_others(unit):
    """At each end of a batch of 64, also the last of an epoch, it goes on with batches of 32, and then of 8."""
    samples, length = 160, {"samples": 640, "epochs": 4}[unit]
    plans = [Resizing([(2, 16), (2, 32)], batch_size=size) for size in (16, 8)]

    def run(plan, stop, state=None):
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        rate = linear(1.0, 0.0, length, unit=unit)
        scheduler = plan.scheduler(optimizer, rate, samples)
        if state is not None:
            scheduler.load_state_dict(state)
        found = []
        for _ in range(stop):
            optimizer.step()
            scheduler.step()
            found.append(scheduler.get_last_lr()[0])
        return found, scheduler.state_dict()

    whole, _ = run(plans[1], 60)
    for updates, passed in enumerate([0, 64, 128, 160, 224, 288, 320]):
        _, state = run(plans[0], updates)
        rest, _ = run(plans[1], 40, state)
        assert rest == pytest.approx(whole[passed // 32 :][:40], abs=1e-12)


def test_a_plan_is_printed_without_the_rounding_errors_of_its_rates():
    plan = Resizing([(1, 24), (1, 32)], batch_size=32, rate="sqrt")
    assert plan.stages[0].rate == pytest.approx(math.sqrt(56 / 32))
    assert repr(plan) == "Resizing([(1.0, 24, 56, 1.3229), (inf, 32, 32, 1.0)])"
