"""How many updates a run will have, as the progress line shows it and `auto` capture reckons with it."""

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from hotloop.metrics.progress_line import ProgressLine

BATCHES = 4


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.ones(2 * BATCHES, 1))


def prepare(make_loop, *, length=True):
    loop = make_loop()
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.ones(2 * BATCHES, 1)) if length else Stream()
    return loop, *loop.prepare(model, optimizer, DataLoader(data, batch_size=2))


def learn(loop, model, optimizer, batch, times=1):
    x = batch[0] if isinstance(batch, list) else batch
    for _ in range(times):
        loop.backward(model(x).mean())
        loop.update(optimizer)


def total(loop):
    return loop._session.progress._measure().total_updates


def test_updates_before_epochs_and_between_them_are_counted_in(make_loop):
    loop, model, optimizer, loader = prepare(make_loop)
    for batch in loader:
        learn(loop, model, optimizer, batch)
    told = []
    for n in (2, 3):
        for _ in loop.epochs(n):
            told.append((total(loop), loop._course.remaining()))
            for batch in loader:
                learn(loop, model, optimizer, batch)
        told.append(loop.updates)
        learn(loop, model, optimizer, batch)
    # 4 before, 2 epochs of 4; one more, and a third epoch
    assert told == [(12, 8), (12, 4), 12, (17, 4), 17]


def test_what_follows_a_pass_has_no_total(make_loop):
    loop, model, optimizer, loader = prepare(make_loop)
    for _ in loop.epochs(1):
        for batch in loader:
            learn(loop, model, optimizer, batch)
        assert "4/4 100%" in loop._session.progress.line()
    for batch in loader:
        learn(loop, model, optimizer, batch)
    assert total(loop) is None
    assert "8 steps" in loop._session.progress.line()


def test_an_epoch_of_more_updates_than_batches_corrects_the_total(make_loop):
    for length in (True, False):
        loop, model, optimizer, loader = prepare(make_loop, length=length)
        told = []
        for _ in loop.epochs(3):
            told.append(total(loop))
            for batch in loader:
                learn(loop, model, optimizer, batch, times=2)
        assert told == [3 * BATCHES if length else None, 6 * BATCHES, 6 * BATCHES]
        assert loop.updates == 6 * BATCHES


def test_a_run_that_is_resumed_inside_an_epoch_keeps_its_total(make_loop, tmp_path):
    loop, model, optimizer, loader = prepare(make_loop)
    for _ in loop.epochs(3):
        for batch in loader:
            learn(loop, model, optimizer, batch)
            if loop.updates == BATCHES + 2:
                loop.save_state(tmp_path, wait=True)
    loop, model, optimizer, loader = prepare(make_loop)
    assert loop.resume(tmp_path)
    told = []
    for _ in loop.epochs(3):
        told.append((total(loop), loop._course.remaining()))
        for batch in loader:
            learn(loop, model, optimizer, batch)
    assert told == [(3 * BATCHES, 2 * BATCHES - 2), (3 * BATCHES, BATCHES)]
    assert loop.updates == 3 * BATCHES


def test_a_total_that_is_passed_was_a_guess():
    def line(updates):
        return ProgressLine(updates, 12, 2, 3, 1.0, None, 2.0, {})

    assert line(12).text() == "epoch 3/3  12/12 100%  1.0 steps/s  0:02"
    assert line(16).text() == "epoch 3/3  16 steps  1.0 steps/s  0:02"
    assert line(12).left_s == 0.0
    assert line(16).left_s is None
    assert "#" in line(12).text(100)
    assert "#" not in line(16).text(100)
