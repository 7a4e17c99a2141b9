"""Rates as torch schedulers: groups, units, saving and resuming, chaining, momentum and weight decay."""

import copy
import math

import pytest
import torch
from torch.optim import lr_scheduler

from hotloop.errors import OptimizerError, SettingError
from hotloop.optim import RateScheduler, courses, rates


def make(kind="sgd", lr=0.1):
    p, q = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    groups = [{"params": [p]}, {"params": [q], "lr": lr / 5}]
    if kind == "adamw":
        return torch.optim.AdamW(groups, lr=lr)
    return torch.optim.SGD(groups, lr=lr, momentum=0.9 if kind == "sgd" else 0.0)


def step(optimizer, *schedulers):
    optimizer.step()
    for scheduler in schedulers:
        scheduler.step()


def lrs(optimizer):
    return [group["lr"] for group in optimizer.param_groups]


def test_one_rate_for_all_groups_or_one_each():
    rate, other = rates.linear(0.0, 0.4, 8), rates.constant(0.3)
    optimizer = make()
    scheduler = rate.scheduler(optimizer)
    for k in range(12):
        assert lrs(optimizer) == [rate(k)] * 2 == scheduler.get_last_lr()
        step(optimizer, scheduler)
    optimizer = make()
    scheduler = RateScheduler(optimizer, [rate, other])
    step(optimizer, scheduler)
    assert lrs(optimizer) == [rate(1), 0.3]


def test_relative_rates_are_factors_of_each_group():
    optimizer = make()
    scheduler = rates.linear(0.0, 1.0, 4).scheduler(optimizer, relative=True)
    for k in range(6):
        assert lrs(optimizer) == [0.1 * min(k / 4, 1), 0.02 * min(k / 4, 1)]
        step(optimizer, scheduler)


@pytest.mark.parametrize(("kind", "read"), [("sgd", "momentum"), ("adamw", "betas")])
def test_momentum_and_weight_decay_go_along(kind, read):
    rate = courses.one_cycle(0.4, 20).with_weight_decay(rates.linear(0.1, 0.0, 20))
    optimizer = make(kind)
    theirs = make(kind)
    reference = lr_scheduler.OneCycleLR(theirs, 0.4, total_steps=21, pct_start=7 / 21)
    scheduler = rate.scheduler(optimizer)
    same = courses.one_cycle(0.4, 20, warm=6 / 20).scheduler(make(kind))
    for k in range(20):
        for group in optimizer.param_groups:
            momentum = group[read] if read == "momentum" else group[read][0]
            assert momentum == rate.momentum(k)
            assert group["weight_decay"] == pytest.approx(0.1 * (1 - k / 20))
        for ours, torchs in zip(same.optimizer.param_groups, theirs.param_groups, strict=True):
            assert ours["lr"] == pytest.approx(torchs["lr"], rel=1e-9)
            assert ours[read] == pytest.approx(torchs[read], rel=1e-9)
        step(optimizer, scheduler)
        step(same.optimizer, same)
        step(theirs, reference)


def test_units():
    epochs = courses.one_cycle(0.4, 3, unit="epochs")
    scheduler = epochs.scheduler(make(), per_step=1 / 7)
    samples = rates.linear(0.0, 1.0, 1000, unit="samples").scheduler(make(), per_step=50)
    tokens = rates.linear(0.0, 1.0, 1000, unit="tokens").scheduler(
        make(), per_step=lambda k: 10 if k < 5 else 100
    )
    for k in range(22):
        assert scheduler.get_last_lr()[0] == pytest.approx(epochs(k / 7))
        assert samples.get_last_lr()[0] == pytest.approx(min(k * 50 / 1000, 1))
        assert tokens.time == min(k, 5) * 10 + max(k - 5, 0) * 100
        for each in (scheduler, samples, tokens):
            step(each.optimizer, each)


@pytest.mark.parametrize("relative", [False, True])
def test_state_goes_on_where_it_stopped(relative):
    def build():
        optimizer = make()
        mine = courses.warmup_cosine(1.0, 30, warm=5).scheduler(
            optimizer, relative=relative, per_step=lambda k: 2
        )
        return optimizer, mine

    optimizer, scheduler = build()
    whole = []
    for k in range(12):
        if k == 6:
            state, saved = scheduler.state_dict(), optimizer.state_dict()
        whole.append(lrs(optimizer))
        step(optimizer, scheduler)
    assert torch.utils._pytree.tree_all(lambda v: v is None or isinstance(v, int | float), state)
    optimizer, scheduler = build()
    scheduler.load_state_dict(state)
    optimizer.load_state_dict(saved)
    for k in range(6, 12):
        assert lrs(optimizer) == whole[k]
        step(optimizer, scheduler)


def test_relative_rates_chain_with_others():
    def run(order):
        optimizer = make()
        mine = rates.linear(0.5, 1.0, 10).scheduler(optimizer, relative=True)
        theirs = lr_scheduler.ExponentialLR(optimizer, 0.9)
        for k in range(15):
            # the initial lr of torch's is the one that ours has set
            wanted = [lr * (0.5 + 0.05 * min(k, 10)) * 0.9**k for lr in (0.1, 0.02)]
            assert lrs(optimizer) == pytest.approx(wanted)
            step(optimizer, *((mine, theirs) if order else (theirs, mine)))

    run(True)
    run(False)
    optimizer = make()
    chain = lr_scheduler.ChainedScheduler(
        [
            rates.linear(0.5, 1.0, 10).scheduler(optimizer, relative=True),
            lr_scheduler.StepLR(optimizer, 4, 0.1),
        ]
    )
    for k in range(9):
        assert lrs(optimizer)[0] == pytest.approx(0.1 * (0.5 + 0.05 * k) * 0.1 ** (k // 4))
        step(optimizer, chain)


@pytest.mark.parametrize("restore", [True, False])
@pytest.mark.parametrize("by_hand", [1.0, 0.5])
def test_a_state_loaded_again_gives_the_same_rates(restore, by_hand):
    """Whether the optimizer's own state comes back after it, or the groups still hold the rates of the run before."""
    optimizer = make()
    scheduler = rates.linear(1.0, 0.25, 6).scheduler(optimizer, relative=True)
    at_start, groups = scheduler.state_dict(), optimizer.state_dict()
    for run in range(2):
        for k in range(4):
            if k or not run or restore:
                wanted = [lr * (1 - k / 8) * (by_hand if k > 2 else 1.0) for lr in (0.1, 0.02)]
                assert lrs(optimizer) == pytest.approx(wanted)
            if k == 2:
                for group in optimizer.param_groups:
                    group["lr"] *= by_hand
            step(optimizer, scheduler)
        scheduler.load_state_dict(at_start)
        if restore:
            optimizer.load_state_dict(groups)


def test_inside_torchs_sequential():
    optimizer = make()
    rate = rates.exponential(0.2, 0.5)
    both = lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.ConstantLR(optimizer, 0.5, 100), rate.scheduler(optimizer)], [3]
    )
    found = []
    for _ in range(6):
        found.append(lrs(optimizer)[0])
        step(optimizer, both)
    assert found == pytest.approx([0.05] * 3 + [0.2, 0.1, 0.05])


def test_a_rate_that_is_a_tensor_is_written_into():
    p = torch.nn.Parameter(torch.ones(1))
    rate = torch.tensor(0.1)
    optimizer = torch.optim.SGD([p], lr=rate, foreach=False)
    scheduler = rates.linear(0.0, 0.4, 4).scheduler(optimizer)
    held = optimizer.param_groups[0]["lr"]
    step(optimizer, scheduler)
    assert optimizer.param_groups[0]["lr"] is held
    assert held.item() == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("make_it", "error", "text"),
    [
        (
            lambda: RateScheduler(make(), [rates.constant(1.0)] * 3),
            OptimizerError,
            "3 rates for the 2 groups",
        ),
        (lambda: RateScheduler(make(), 0.1), SettingError, "give a Rate"),
        (lambda: RateScheduler(make(), [rates.constant(1.0), 0.1]), SettingError, "give a Rate"),
        (lambda: rates.constant(1.0).scheduler(make(), factor=2.0), SettingError, "function of the update"),
        (lambda: rates.constant(1.0, unit="epochs").scheduler(make()), SettingError, "1 / len"),
        (
            lambda: RateScheduler(make(), [rates.constant(1.0), rates.constant(1.0, unit="epochs")]),
            SettingError,
            "epochs and steps",
        ),
        (
            lambda: courses.one_cycle(1.0, 10).scheduler(torch.optim.Adagrad([torch.zeros(1)])),
            OptimizerError,
            "with_momentum",
        ),
        (
            lambda: rates.constant(1.0).with_weight_decay(0.1).scheduler(torch.optim.Rprop([torch.zeros(1)])),
            OptimizerError,
            "no weight decay",
        ),
    ],
)
def test_mistakes_are_told(make_it, error, text):
    with pytest.raises(error, match=text):
        make_it()


@pytest.mark.parametrize("scheduler_first", [True, False])
def test_a_chain_resumes_whatever_is_loaded_first(scheduler_first):
    def build():
        optimizer = make()
        mine = courses.one_cycle(1.0, 10, momentum=None).scheduler(optimizer, relative=True)
        return optimizer, lr_scheduler.ChainedScheduler([mine, lr_scheduler.ExponentialLR(optimizer, 0.9)])

    rate = courses.one_cycle(1.0, 10)
    for stop in range(12):
        optimizer, chain = build()
        for _ in range(stop):
            step(optimizer, chain)
        parts = [(chain, chain.state_dict()), (optimizer, copy.deepcopy(optimizer.state_dict()))]
        new = dict(zip((chain, optimizer), reversed(build()), strict=True))
        for old, state in parts if scheduler_first else reversed(parts):
            new[old].load_state_dict(state)
        for k in range(stop, 12):
            assert lrs(new[optimizer])[0] == pytest.approx(0.1 * rate(k) * 0.9**k, rel=1e-12)
            step(new[optimizer], new[chain])


def test_a_state_of_something_else_is_refused():
    one = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
    scheduler = rates.constant(0.1).scheduler(one)
    with pytest.raises(OptimizerError, match="of 2 groups"):
        scheduler.load_state_dict(rates.constant(0.1).scheduler(make()).state_dict())
    with pytest.raises(OptimizerError, match="of another scheduler"):
        scheduler.load_state_dict(lr_scheduler.StepLR(make(), 3).state_dict())
    for per_step in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(SettingError, match="per_step"):
            rates.constant(0.1).scheduler(make(), per_step=per_step)


@pytest.mark.parametrize("stop", [None, 3, 10, 17])
def test_relative_rates_follow_each_other_and_multiply(stop):
    """In torch's SequentialLR, which begins its first part twice, and beside one another; also when resumed."""
    up, down = rates.linear(0.1, 1.0, 10), rates.cosine(1.0, 0.1, 20)

    def sequence(optimizer):
        parts = [rate.scheduler(optimizer, relative=True) for rate in (up, down)]
        return lr_scheduler.SequentialLR(optimizer, parts, [10])

    def product(optimizer):
        parts = [rate.scheduler(optimizer, relative=True) for rate in (up, down)]
        parts.insert(1, lr_scheduler.ExponentialLR(optimizer, 0.9))
        return lr_scheduler.ChainedScheduler(parts, optimizer=optimizer)

    def rise(k):
        return 0.1 + 0.09 * min(k, 10)

    def fall(k):
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(k, 20) / 20))

    for build, wanted in (
        (sequence, lambda k: rise(k) if k < 10 else fall(k - 10)),
        (product, lambda k: rise(k) * 0.9**k * fall(k)),
    ):
        optimizer = make()
        scheduler = build(optimizer)
        for k in range(30):
            assert lrs(optimizer) == pytest.approx([lr * wanted(k) for lr in (0.1, 0.02)], rel=1e-12)
            step(optimizer, scheduler)
            if k == stop:
                saved, state = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(scheduler.state_dict())
                optimizer = make()
                scheduler = build(optimizer)
                scheduler.load_state_dict(state)
                optimizer.load_state_dict(saved)


def test_a_second_relative_rate_counts_from_the_rate_of_now():
    optimizer = make()
    first = rates.linear(1.0, 0.5, 4).scheduler(optimizer, relative=True)
    for _ in range(4):
        step(optimizer, first)
    second = rates.linear(1.0, 0.0, 10).scheduler(optimizer, relative=True)
    for k in range(10):
        assert lrs(optimizer) == pytest.approx([0.05 * (1 - k / 10), 0.01 * (1 - k / 10)])
        step(optimizer, second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_relative_rate_in_a_tensor_keeps_what_others_did(dtype):
    p = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([p], lr=torch.tensor(0.1, dtype=dtype), foreach=False)
    mine = rates.linear(0.5, 1.0, 10).scheduler(optimizer, relative=True)
    theirs = lr_scheduler.ExponentialLR(optimizer, 0.9)
    for k in range(15):
        wanted = 0.1 * (0.5 + 0.05 * min(k, 10)) * 0.9**k
        assert float(lrs(optimizer)[0]) == pytest.approx(wanted, rel=1e-6)
        step(optimizer, mine, theirs)


@pytest.mark.parametrize("n", [49, 98, 103])
@pytest.mark.parametrize("varies", [False, True])
def test_an_epoch_of_steps_is_an_epoch(n, varies):
    """49 * (1 / 49) is below 1: a step schedule must not fall an update late for it."""
    optimizer, theirs = make(), make()
    rate = rates.piecewise([(0, 0.1), (3, 0.01), (5, 0.001)], shape="constant", unit="epochs")
    scheduler = rate.scheduler(optimizer, per_step=(lambda k: 1 / n) if varies else 1 / n)
    reference = lr_scheduler.MultiStepLR(theirs, [3 * n, 5 * n])
    for _ in range(6 * n):
        assert scheduler.get_last_lr()[0] == pytest.approx(reference.get_last_lr()[0], rel=1e-12)
        step(optimizer, scheduler)
        step(theirs, reference)


def test_a_long_sum_of_batches_is_whole_epochs():
    scheduler = rates.constant(0.1, unit="epochs").scheduler(make(), per_step=lambda k: 1 / 1009)
    scheduler.last_epoch = 300 * 1009
    assert scheduler.time == pytest.approx(300, rel=1e-15)


def test_a_group_that_is_added_is_told():
    optimizer = make()
    scheduler = rates.constant(0.1).scheduler(optimizer)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    optimizer.step()
    for use in (scheduler.step, scheduler.state_dict):
        with pytest.raises(OptimizerError, match="3 groups now, and had 2"):
            use()


@pytest.mark.parametrize("varies", [False, True])
def test_time_goes_on_where_batches_are_others(varies):
    """Twice resumed: in epochs of 10 updates, then of 25, then of 4."""
    rate = courses.one_cycle(0.4, 6, unit="epochs")

    def build(n):
        return rate.scheduler(make(), per_step=(lambda k: 1 / n) if varies else 1 / n)

    scheduler, passed = build(10), 0.0
    for n, stop in ((10, 13), (25, 40), (4, 12)):
        if passed:
            state = scheduler.state_dict()
            scheduler = build(n)
            scheduler.load_state_dict(state)
            again = build(n)
            again.load_state_dict(copy.deepcopy(scheduler.state_dict()))
            assert again.state_dict() == scheduler.state_dict()
        for _ in range(stop):
            step(scheduler.optimizer, scheduler)
            passed += 1 / n
            assert scheduler.time == pytest.approx(passed)
            assert scheduler.get_last_lr() == pytest.approx([rate(passed)] * 2)
    assert passed == pytest.approx(1.3 + 1.6 + 3.0)
