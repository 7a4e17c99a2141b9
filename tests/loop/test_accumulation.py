"""Accumulation: N micro-batches give the gradient of the whole batch, and nothing around them disturbs that.

Expected weights come from the closed form for a linear model, in float64 with numpy.
"""

import contextlib
import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hotloop.errors import DataError

KINDS = ["host", "resident"]
X = torch.randn(30, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.randn(30, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
RATE = 0.05


def expected(windows, weights=None):
    """SGD over `windows` (lists of sample numbers), each one step on the mean over its samples."""
    w = np.zeros(3)
    x, y = X.numpy(), Y.numpy()
    for window in windows:
        importance = np.ones(len(window)) if weights is None else weights[window]
        error = x[window] @ w - y[window]
        w = w - RATE * 2.0 * (importance * error) @ x[window] / importance.sum()
    return torch.tensor(w)


def windows_of(count, batch, accumulation, epochs=1):
    """Sample numbers of each window over `count` samples in order."""
    size = batch * accumulation
    one = [list(range(at, min(at + size, count))) for at in range(0, count, size)]
    return one * epochs


class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def forward(self, x):
        return x @ self.w


def build(make_loop, kind="host", accumulation=3, batch=4, **options):
    loop = make_loop(kind, accumulation=accumulation, **options)
    model = Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, fused=True if kind == "resident" else None)
    loader = DataLoader(TensorDataset(X, Y), batch_size=batch)
    return (loop, *loop.prepare(model, optimizer, loader))


def close(a, b):
    # a factor for the fused kernels is float32, a mean's rounding apart
    torch.testing.assert_close(a.detach(), b, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("accumulation", [1, 2, 3, 4, 100])
def test_short_tails(make_loop, kind, accumulation):
    loop, model, optimizer, loader = build(make_loop, kind, accumulation)
    for _ in loop.epochs(2):
        for x, y in loader:
            loop.backward(F.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    windows = windows_of(30, 4, accumulation, epochs=2)
    assert loop.updates == len(windows)
    close(model.w, expected(windows))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["int", "float", "tensor", "mixed"])
def test_token_weights(make_loop, kind, form):
    """Loss is a mean over some of the batch's elements, how many is the weight; one micro-batch has none at all."""
    mask = torch.tensor([i % 5 != 1 and not 8 <= i < 12 for i in range(30)])
    loop, model, optimizer, loader = build(make_loop, kind, 3)
    at = 0
    for x, y in loader:
        here = mask[at : at + len(x)]
        at += len(x)
        count = here.sum()
        loss = ((model(x) - y).square() * here).sum() / count.clamp(min=1)
        tensor = form == "tensor" or (form == "mixed" and at % 8)
        weight = count if tensor else (int(count) if form == "int" else float(count))
        loop.backward(loss, weight=weight)
        optimizer.step()
        optimizer.zero_grad()
    close(model.w, expected(windows_of(30, 4, 3), mask.double().numpy()))


@pytest.mark.parametrize("kind", KINDS)
def test_a_window_of_nothing_changes_nothing(make_loop, kind):
    loop, model, optimizer, _ = build(make_loop, kind, 2)
    for weight in (0, torch.tensor(0), 0, 0):
        with loop.accumulate():
            loop.backward((model(X) * 0.0).sum(), weight=weight)
            optimizer.step()
            optimizer.zero_grad()
    assert loop.updates == 2
    assert torch.equal(model.w, torch.zeros(3, dtype=torch.float64))


def test_negative_weights_are_refused(make_loop):
    loop, model, _, _ = build(make_loop)
    for weight in (-1, float("nan")):
        with pytest.raises(DataError, match="weight"):
            loop.backward(model(X).sum(), weight=weight)


def train_with_evaluation(make_loop, kind, evaluate=None, place=None, open_ended=None):
    """Two epochs; `evaluate(model, loader)` is called at `place` in every step."""
    loop, model, optimizer, loader = build(make_loop, kind, 2)
    other = loop.prepare(DataLoader(TensorDataset(X, Y), batch_size=7))
    kept = []

    def visit(here):
        if here == place:
            kept.append(evaluate(model, other))

    visit("before training")
    for _ in loop.epochs(2):
        for x, y in loader:
            visit("before forward")
            loss = F.mse_loss(model(x), y)
            visit("before backward")
            loop.backward(loss)
            visit("before step")
            optimizer.step()
            visit("before zero_grad")
            optimizer.zero_grad()
            visit("after step")
        visit("after epoch")
    assert loop.updates == 8
    return model.w.detach()


def abandoned(model, loader):
    with torch.no_grad():
        for x, _ in loader:
            model(x)
            break


def abandoned_with_gradients(model, loader):
    model.eval()
    for x, _ in loader:
        model(x)
        break
    model.train()


def complete(model, loader):
    with torch.no_grad():
        for x, _ in loader:
            model(x)


def complete_with_gradients(model, loader):
    model.eval()
    for x, _ in loader:
        model(x)
    model.train()


def left_open(model, loader):
    batches = iter(loader)
    with torch.no_grad():
        model(next(batches)[0])
    return batches


def left_open_with_gradients(model, loader):
    batches = iter(loader)
    model.eval()
    model(next(batches)[0])
    model.train()
    return batches


PLACES = [
    "before training",
    "before forward",
    "before backward",
    "before step",
    "before zero_grad",
    "after step",
]


EVALUATIONS = [
    abandoned,
    abandoned_with_gradients,
    complete,
    complete_with_gradients,
    left_open,
    left_open_with_gradients,
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("evaluate", "place"),
    [
        (evaluate, place)
        for evaluate in EVALUATIONS
        for place in [*PLACES, "after epoch"]
        # between a batch and its backward, a loader that stays open and hands out batches for learning is a second
        # training loader
        if evaluate is not left_open_with_gradients or place not in ("before forward", "before backward")
    ],
)
def test_evaluation_disturbs_nothing(make_loop, kind, place, evaluate):
    undisturbed = train_with_evaluation(make_loop, kind)
    assert torch.equal(train_with_evaluation(make_loop, kind, evaluate, place), undisturbed)
    close(undisturbed, expected(windows_of(30, 4, 2, epochs=2)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES[1:])
@pytest.mark.parametrize("stepping", ["always", "at the boundary"])
def test_zero_grad_anywhere(make_loop, kind, place, stepping):
    loop, model, optimizer, loader = build(make_loop, kind, 3)
    places = {
        "before forward": 0,
        "before backward": 1,
        "before zero_grad": 3,
        "after step": 3,
        "before step": 3,
    }
    for _ in loop.epochs(2):
        for i, (x, y) in enumerate(loader):
            if places[place] == 0:
                optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            if places[place] == 1:
                optimizer.zero_grad()
            loop.backward(loss)
            if stepping == "always" or (i + 1) % 3 == 0 or i == len(loader) - 1:
                optimizer.step()
                if places[place] == 3 and stepping == "at the boundary":
                    optimizer.zero_grad()
            if places[place] == 3 and stepping == "always":
                optimizer.zero_grad()
    assert loop.updates == 6
    close(model.w, expected(windows_of(30, 4, 3, epochs=2)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_left_out_at_the_boundary_joins_its_window_to_the_next(make_loop, kind):
    """`continue` on a boundary: the waiting gradients are not lost and keep their weight."""
    loop, model, optimizer, loader = build(make_loop, kind, 2)
    for i, (x, y) in enumerate(loader):
        if i == 1:
            optimizer.zero_grad()
            continue
        loop.backward(F.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    # batch 0 is taken with batch 2, which fills the window that batch 1 never joined
    close(model.w, expected([[*range(4), *range(8, 12)], list(range(12, 20)), list(range(20, 28)), [28, 29]]))


@pytest.mark.parametrize("kind", KINDS)
def test_zero_grad_instead_of_a_step_gives_the_window_up(make_loop, kind):
    loop, model, optimizer, loader = build(make_loop, kind, 2)
    for i, (x, y) in enumerate(loader):
        loop.backward(F.mse_loss(model(x), y))
        if i != 3:
            optimizer.step()
        optimizer.zero_grad()
    windows = windows_of(30, 4, 2)
    close(model.w, expected([windows[0], *windows[2:]]))


@pytest.mark.parametrize("kind", KINDS)
def test_schedule_once_per_update_or_per_epoch(make_loop, kind):
    loop, model, optimizer, loader = build(make_loop, kind, 3)
    per_update = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1.0 / (1 + k))
    per_update = loop.prepare(per_update)
    for _ in loop.epochs(2):
        for x, y in loader:
            loop.backward(F.mse_loss(model(x), y))
            optimizer.step()
            per_update.step()
            optimizer.zero_grad()
    assert per_update.get_last_lr() == pytest.approx([RATE / 7])

    loop, model, optimizer, loader = build(make_loop, kind, 3)
    per_epoch = loop.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
    for _ in loop.epochs(3):
        for i, (x, y) in enumerate(loader):
            loop.backward(F.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            if i == 3:
                break  # leaves a window open
        per_epoch.step()
    assert per_epoch.get_last_lr() == pytest.approx([RATE / 8])


@pytest.mark.parametrize("kind", KINDS)
def test_an_epoch_left_inside_a_window_goes_on_in_the_next(make_loop, kind):
    loop, model, optimizer, loader = build(make_loop, kind, 3)
    for _ in loop.epochs(2):
        for i, (x, y) in enumerate(loader):
            loop.backward(F.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            if i == 3:
                break
    # four batches an epoch: three make an update, the fourth waits for two of the next epoch
    close(model.w, expected([list(range(12)), [*range(12, 16), *range(8)]]))


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_loader(make_loop, kind):
    loop, model, optimizer, _ = build(make_loop, kind, 3)
    for at in range(0, 24, 4):
        loop.backward(F.mse_loss(model(X[at : at + 4]), Y[at : at + 4]), weight=4)
        optimizer.step()
        optimizer.zero_grad()
    close(model.w, expected(windows_of(24, 4, 3)))

    loop, model, optimizer, _ = build(make_loop, kind, 2)
    sizes = [4, 2, 6, 3]
    at = 0
    for size in sizes:
        with loop.accumulate():
            for part in (slice(at, at + size),):
                loop.backward(F.mse_loss(model(X[part]), Y[part]), weight=size)
            optimizer.step()
            optimizer.zero_grad()
        at += size
    assert loop.updates == 2
    close(model.w, expected([list(range(6)), list(range(6, 15))]))


@pytest.mark.parametrize("kind", KINDS)
def test_accumulate_around_each_batch_of_a_loader(make_loop, kind):
    """The way that Accelerate's scripts are written."""
    loop, model, optimizer, loader = build(make_loop, kind, 3)
    for x, y in loader:
        with loop.accumulate():
            loop.backward(F.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    close(model.w, expected(windows_of(30, 4, 3)))


@pytest.mark.parametrize("kind", KINDS)
def test_batches_taken_out_of_the_loader_first(make_loop, kind):
    loop, model, optimizer, loader = build(make_loop, kind, 2)
    for x, y in list(loader):
        loop.backward(F.mse_loss(model(x), y), weight=len(x))
        optimizer.step()
        optimizer.zero_grad()
    assert loop.updates == 4
    close(model.w, expected(windows_of(30, 4, 2)))


@pytest.mark.parametrize("kind", KINDS)
def test_one_batch_ahead(make_loop, kind):
    """A script that fetches one batch ahead of its step."""
    loop, model, optimizer, loader = build(make_loop, kind, 2)
    batches = iter(loader)
    batch = next(batches)
    while batch is not None:
        following = next(batches, None)
        x, y = batch
        with loop.accumulate():
            loop.backward(F.mse_loss(model(x), y), weight=len(x))
            optimizer.step()
            optimizer.zero_grad()
        batch = following
    # the loader's end shows one batch early, and the last batch is a window of its own
    windows = windows_of(30, 4, 2)
    close(model.w, expected([*windows[:3], windows[3][:4], windows[3][4:]]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("short", [14, 30])
def test_two_loaders_side_by_side(make_loop, kind, swap, short):
    """zip ends with the shorter one; what it accumulated last is not lost."""
    loop, model, optimizer, loader = build(make_loop, kind, 3)
    other = loop.prepare(DataLoader(TensorDataset(X[:short], Y[:short]), batch_size=4))
    pair = (other, loader) if swap else (loader, other)
    sizes = []
    for (x, y), (u, v) in zip(*pair, strict=False):
        size = len(x) + len(u)
        loss = ((model(x) - y).square().sum() + (model(u) - v).square().sum()) / size
        loop.backward(loss, weight=size)
        optimizer.step()
        optimizer.zero_grad()
        sizes.append((len(x), len(u)))
    windows, at = [], 0
    for group in itertools.batched(sizes, 3) if hasattr(itertools, "batched") else _batched(sizes, 3):
        window = []
        for _ in group:
            for count in (30, short):
                window += range(at, min(at + 4, count))
            at += 4
        windows.append(window)
    assert loop.updates == len(windows)
    close(model.w, expected(windows))


def _batched(values, size):
    return [values[at : at + size] for at in range(0, len(values), size)]


@pytest.mark.parametrize("kind", KINDS)
def test_several_backwards_of_one_micro_batch(make_loop, kind):
    loop, model, optimizer, loader = build(make_loop, kind, 3)
    for x, y in loader:
        out = model(x)
        for loss in (0.25 * F.mse_loss(out, y), 0.75 * F.mse_loss(out, y)):
            loop.backward(loss, retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
    close(model.w, expected(windows_of(30, 4, 3)))


def test_weights_in_different_proportions_are_refused(make_loop):
    loop, model, optimizer, _ = build(make_loop, accumulation=2)
    with pytest.raises(DataError, match="proportion"):
        for first, second in ((4, 10), (4, 5)):
            with loop.accumulate():
                loop.backward(model(X).sum(), weight=first)
                loop.backward(model(X).sum(), weight=second)
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", ["in turn", "together"])
@pytest.mark.parametrize("zero", ["before", "after"])
def test_two_optimizers_each_with_its_own_weights(make_loop, kind, order, zero):
    """As in a GAN: one loss for each network, averaged over different counts."""
    loop = make_loop(kind, accumulation=3)
    fused = True if kind == "resident" else None
    models = [Line(), Line()]
    optimizers = [torch.optim.SGD(m.parameters(), lr=RATE, fused=fused) for m in models]
    (a, b), (first, second), loader = loop.prepare(
        models, optimizers, DataLoader(TensorDataset(X, Y), batch_size=4)
    )
    at = 0
    for x, y in loader:
        part = slice(at, at + len(x))
        half = max(len(x) - at // 8, 1) if order == "in turn" else len(x)
        at += len(x)
        if zero == "before":
            first.zero_grad()
        loop.backward(F.mse_loss(a(x), y), weight=len(x))
        if order == "in turn":
            first.step()
            if zero == "after":
                first.zero_grad()
        if zero == "before":
            second.zero_grad()
        loop.backward(F.mse_loss(b(x[:half]), y[:half]), weight=half)
        if order == "together":
            first.step()
            if zero == "after":
                first.zero_grad()
        second.step()
        if zero == "after":
            second.zero_grad()
        del part
    close(a.w, expected(windows_of(30, 4, 3)))
    windows = []
    for window in windows_of(30, 4, 3):
        kept = []
        for start in range(window[0], window[-1] + 1, 4):
            batch = list(range(start, min(start + 4, 30)))
            kept += batch[: max(len(batch) - start // 8, 1)] if order == "in turn" else batch
        windows.append(kept)
    close(b.w, expected(windows))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("marked", [False, True])
def test_optimizers_in_turn_need_to_know_where_a_batch_ends(make_loop, kind, marked):
    loop = make_loop(kind, accumulation=2)
    fused = True if kind == "resident" else None
    models = [Line(), Line()]
    optimizers = [torch.optim.SGD(m.parameters(), lr=RATE, fused=fused) for m in models]
    models, optimizers = loop.prepare(models, optimizers)

    def batches(count):
        for at in range(0, 4 * count, 4):
            with loop.accumulate() if marked else contextlib.nullcontext():
                for model, optimizer in zip(models, optimizers, strict=True):
                    loop.backward(F.mse_loss(model(X[at : at + 4]), Y[at : at + 4]))
                    loop.update(optimizer)

    if not marked:
        with pytest.raises(
            DataError, match=r"each backward was taken for a batch.*with loop.accumulate\(\):"
        ):
            batches(2)
        return
    batches(4)
    for model in models:
        close(model.w, expected([list(range(8)), list(range(8, 16))]))


@pytest.mark.parametrize("kind", KINDS)
def test_optimizers_of_one_loss_need_no_marks(make_loop, kind):
    loop = make_loop(kind, accumulation=2)
    fused = True if kind == "resident" else None
    models = [Line(), Line()]
    optimizers = [torch.optim.SGD(m.parameters(), lr=RATE, fused=fused) for m in models]
    (a, b), optimizers = loop.prepare(models, optimizers)
    for at in range(0, 16, 4):
        loop.backward(
            F.mse_loss(a(X[at : at + 4]), Y[at : at + 4]) + F.mse_loss(b(X[at : at + 4]), Y[at : at + 4])
        )
        for optimizer in optimizers:
            loop.update(optimizer)
    for model in (a, b):
        close(model.w, expected([list(range(8)), list(range(8, 16))]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("accumulation", [1, 3])
def test_clipping_makes_gradients_true(make_loop, kind, accumulation):
    loop, model, optimizer, loader = build(make_loop, kind, accumulation)
    batches = iter(loader)
    size = 0
    for _ in range(accumulation):
        x, y = next(batches)
        size += len(x)
        loop.backward(F.mse_loss(model(x), y))
        norm = loop.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step() if size < 4 * accumulation else None
    gradient = -2.0 * Y[:size] @ X[:size] / size
    assert norm.item() == pytest.approx(gradient.norm().item(), rel=1e-6)
    close(model.w.grad, gradient * min(1.0, 0.5 / (gradient.norm().item() + 1e-6)))
    optimizer.step()
    close(model.w, -RATE * gradient * min(1.0, 0.5 / (gradient.norm().item() + 1e-6)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("accumulation", [1, 3])
def test_one_clipping_over_two_optimizers(make_loop, kind, accumulation):
    loop = make_loop(kind, accumulation=accumulation)
    fused = True if kind == "resident" else None
    a, b = Line(), Line()
    first, second = (torch.optim.SGD(m.parameters(), lr=RATE, fused=fused) for m in (a, b))
    a, b, first, second = loop.prepare(a, b, first, second)
    for at in range(0, 4 * accumulation, 4):
        with loop.accumulate():
            x, y = X[at : at + 4], Y[at : at + 4]
            loop.backward(F.mse_loss(a(x), y) + 2.0 * F.mse_loss(b(x), y), weight=4)
            loop.clip_grad_norm_([*a.parameters(), *b.parameters()], 0.5)
            first.step()
            second.step()
    size = 4 * accumulation
    gradient = -2.0 * Y[:size] @ X[:size] / size
    both = torch.cat([gradient, 2.0 * gradient])
    clipped = both * min(1.0, 0.5 / (both.norm().item() + 1e-6))
    close(torch.cat([a.w, b.w]), -RATE * clipped)


@pytest.mark.parametrize("kind", KINDS)
def test_summing_by_hand_stays_plain(make_loop, kind):
    """accumulation=1 and a step every third backward is PyTorch's own sum of gradients."""
    loop, model, optimizer, loader = build(make_loop, kind, 1)
    for i, (x, y) in enumerate(loader):
        loop.backward(F.mse_loss(model(x), y) / 3.0)
        if i % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    close(model.w, expected([list(range(12)), list(range(12, 24))]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_refused_window_leaves_nothing_in_the_next(make_loop, kind):
    loop, model, optimizer, loader = build(make_loop, kind, 3, nonfinite="skip")
    for i, (x, y) in enumerate(loader):
        loss = F.mse_loss(model(x), y)
        loop.backward(loss * float("nan") if i == 1 else loss)
        optimizer.step()
        optimizer.zero_grad()
    assert (loop.updates, loop.skipped) == (3, 1)
    close(model.w, expected(windows_of(30, 4, 3)[1:]))


def test_gradients_at_one_micro_batch_are_plain(make_loop):
    loop, model, _, loader = build(make_loop, accumulation=1)
    for x, y in loader:
        loop.backward(F.mse_loss(model(x), y))
        mine = model.w.grad.clone()
        model.w.grad = None
        F.mse_loss(model(x), y).backward()
        assert torch.equal(mine, model.w.grad)
        break
