"""Data parallelism beside the user's module: what it exchanges, what it leaves alone, what stays the user's."""

import pytest

pytestmark = pytest.mark.multi


def check_all(rank, world):
    """Everything in one launch: each process costs seconds of imports."""
    import copy
    import io
    import os
    import pickle

    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import hotloop
    from hotloop.errors import DataError

    os.environ["HOTLOOP_PROGRESS"] = "0"
    x = torch.randn(24, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    y = torch.randn(24, 1, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    mine = slice(12 * rank, 12 * rank + 12)

    def make_loop(**options):
        return hotloop.Loop(device="cpu", record=False, **options)

    def spread(tensor):
        """The largest difference between ranks."""
        low, high = tensor.detach().clone(), tensor.detach().clone()
        dist.all_reduce(low, dist.ReduceOp.MIN)
        dist.all_reduce(high, dist.ReduceOp.MAX)
        return (high - low).abs().max().item()

    def whole(module, loss_of):
        """Gradients of the mean of both ranks' losses, computed here alone."""
        twin = copy.deepcopy(module)
        for p in twin.parameters():
            p.grad = None
        (
            sum(loss_of(twin, x[12 * r : 12 * r + 12], y[12 * r : 12 * r + 12]) for r in range(world)) / world
        ).backward()
        return [None if p.grad is None else p.grad for p in twin.parameters()]

    def assert_gradients(module, want):
        for p, g in zip(module.parameters(), want, strict=True):
            if g is None:
                assert p.grad is None or not p.grad.any()
            else:
                torch.testing.assert_close(p.grad, g)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Linear(5, 4).double()
            self.head = nn.Linear(4, 1).double()
            self.spare = nn.Linear(4, 1).double()

        def forward(self, value, spare=False):
            hidden = torch.tanh(self.encoder(value))
            return self.spare(hidden) if spare else self.head(hidden)

        def score(self, value):
            return self.head(torch.tanh(self.encoder(value)))

    def mse(module, a, b):
        return F.mse_loss(module(a), b)

    # ranks begin with other weights, also in a module in which nothing learns: rank 0's are taken
    torch.manual_seed(100 + rank)
    loop = make_loop()
    model, frozen = nn.Linear(5, 1).double(), nn.BatchNorm1d(5).double()
    nn.init.normal_(frozen.weight)
    frozen.running_mean.normal_()
    frozen.requires_grad_(False)
    before = [frozen.running_mean.clone(), model.weight.clone()]
    model, frozen = loop.prepare(model, frozen)
    for value in (model.weight, model.bias, frozen.weight, frozen.running_mean):
        assert spread(value) == 0.0
    if rank == 0:
        assert torch.equal(frozen.running_mean, before[0])
        assert torch.equal(model.weight, before[1])

    # the module stays the user's
    assert type(model).__name__ == "Linear"
    assert isinstance(model, nn.Linear)
    assert list(model.state_dict()) == ["weight", "bias"]
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for twin in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(buffer, weights_only=False),
        copy.deepcopy(nn.ModuleList([model]))[0],
    ):
        assert type(twin) is nn.Linear
        assert torch.equal(twin.weight, model.weight)
        F.mse_loss(twin(x[mine]), y[mine]).backward()  # of this rank alone: no exchange
        assert spread(twin.weight.grad) > 0.0
        assert model.weight.grad is None

    # an exponential average kept as a deep copy, taken after a step too
    optimizer = loop.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    loop.backward(mse(model, x[mine], y[mine]))
    optimizer.step()
    optimizer.zero_grad()
    average = copy.deepcopy(model)
    assert type(average) is nn.Linear
    assert spread(average.weight) == 0.0
    assert all(p.grad is None for p in average.parameters())

    # gradients are those of both ranks' batches together
    loop = make_loop()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net, optimizer = loop.prepare(net, optimizer)
    want = whole(net, mse)
    for _ in range(2):
        loop.backward(mse(net, x[mine], y[mine]))
        assert_gradients(net, want)
        for p in net.parameters():
            p.grad = None

    # evaluation and forwards without gradients exchange nothing: one rank may do them alone
    if rank == 0:
        net.eval()
        net(x)
        net.train()
        with torch.no_grad():
            net(x)

    # forwards within no_sync keep their gradients here; the next ordinary backward takes the mean of all
    with loop.no_sync():
        loss = mse(net, x[mine], y[mine])
    loop.backward(loss)
    assert spread(net[0].weight.grad) > 0.0
    loop.backward(mse(net, x[mine], y[mine]))
    assert_gradients(net, [2.0 * g for g in want])
    optimizer.zero_grad()

    # two backwards of one forward; a part of the module; a method of it: none of them goes through its forward
    out = net(x[mine])
    loop.backward(0.25 * F.mse_loss(out, y[mine]), retain_graph=True)
    loop.backward(0.75 * F.mse_loss(out, y[mine]))
    assert_gradients(net, want)
    optimizer.zero_grad()
    loop.backward(F.mse_loss(net[2](net[1](net[0](x[mine]))), y[mine]))
    assert_gradients(net, want)
    optimizer.step()
    assert spread(net[0].weight) == 0.0
    optimizer.zero_grad()

    # parameters without a gradient in some steps
    loop = make_loop(parallel=hotloop.Plan(find_unused_parameters=True))
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net, optimizer = loop.prepare(net, optimizer)
    for spare in (False, True, False):
        want = whole(net, lambda m, a, b, spare=spare: F.mse_loss(m(a, spare=spare), b))
        loop.backward(F.mse_loss(net(x[mine], spare=spare), y[mine]))
        assert_gradients(net, want)
        optimizer.step()
        optimizer.zero_grad()
    want = whole(net, lambda m, a, b: F.mse_loss(m.score(a), b))
    loop.backward(F.mse_loss(net.score(x[mine]), y[mine]))
    assert_gradients(net, want)
    optimizer.step()
    optimizer.zero_grad()
    for p in net.parameters():
        assert spread(p) == 0.0

    # partly frozen
    loop = make_loop()
    torch.manual_seed(0)
    net = Net()
    net.encoder.requires_grad_(False)
    del net.spare
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    net, optimizer = loop.prepare(net, optimizer)
    want = whole(net, mse)
    loop.backward(mse(net, x[mine], y[mine]))
    assert_gradients(net, want)
    optimizer.step()
    assert spread(net.head.weight) == 0.0

    # two optimizers that take turns, as in a GAN, with and without windows
    for accumulation in (1, 2):
        loop = make_loop(accumulation=accumulation)
        torch.manual_seed(0)
        maker, judge = nn.Linear(5, 5).double(), nn.Linear(5, 1).double()
        first = torch.optim.SGD(maker.parameters(), lr=0.1)
        second = torch.optim.SGD(judge.parameters(), lr=0.1)
        alone = copy.deepcopy((maker, judge))
        maker, judge, first, second = loop.prepare(maker, judge, first, second)
        loader = loop.prepare(DataLoader(TensorDataset(x), 3))

        def judge_loss(maker, judge, value):
            fake = judge(maker(value).detach())
            return F.softplus(-judge(value)).mean() + F.softplus(fake).mean()

        def maker_loss(maker, judge, value):
            return F.softplus(-judge(maker(value))).mean()

        for (value,) in loader:
            second.zero_grad()
            loop.backward(judge_loss(maker, judge, value))
            second.step()
            if accumulation > 1:
                judge.requires_grad_(False)  # else a window of the judge's would hold the maker's gradients
            first.zero_grad()
            loop.backward(maker_loss(maker, judge, value))
            first.step()
            judge.requires_grad_(True)
        steps = [torch.optim.SGD(m.parameters(), lr=0.1) for m in alone]
        size = 6 * accumulation
        for at in range(0, 24, size):
            value = x[at : at + size]
            # all micro-batches of a window are judged by the weights before it
            old = copy.deepcopy(alone)
            steps[1].zero_grad()
            judge_loss(*alone, value).backward()
            steps[1].step()
            # the judge steps at the window's end, where the maker's last micro-batch meets it as it is then
            early, late = value[:-6], value[-6:]
            judges = [old[1], alone[1]]
            steps[0].zero_grad()
            total = sum(
                F.softplus(-judge_now(alone[0](part))).sum()
                for judge_now, part in zip(judges, (early, late), strict=True)
            )
            (total / len(value)).backward()
            steps[0].step()
        for ours, theirs in zip((maker, judge), alone, strict=True):
            torch.testing.assert_close(ours.weight, theirs.weight)

    # batch norm: what torch's own data parallelism gives, statistics of rank 0 included; a replayed batch leaves none
    def with_norm():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1)).double()

    for count in (24, 21):
        loop = make_loop()
        net = with_norm()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        loader = DataLoader(TensorDataset(x[:count], y[:count]), 3)
        net, optimizer, loader = loop.prepare(net, optimizer, loader)
        seen = []
        for a, b in loader:
            was = copy.deepcopy(net[1].state_dict())
            loop.backward(F.mse_loss(net(a), b))
            if loader.is_replay:
                assert all(torch.equal(v, was[k]) for k, v in net[1].named_buffers())
                seen.append(rank)
            optimizer.step()
            optimizer.zero_grad()
        assert spread(net[0].weight) == 0.0
        assert bool(seen) == (count == 21 and rank == 1)
        if count == 24:
            twin = with_norm()
            parallel = nn.parallel.DistributedDataParallel(twin)
            optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
            for step in range(4):
                at = 6 * step + 3 * rank
                F.mse_loss(parallel(x[at : at + 3]), y[at : at + 3]).backward()
                optimizer.step()
                optimizer.zero_grad()
            for ours, theirs in zip(net.state_dict().values(), twin.state_dict().values(), strict=True):
                torch.testing.assert_close(ours, theirs)

    # what is gathered and averaged is exact, replays or not, also for an evaluation inside a training step
    loop = make_loop()
    train = loop.prepare(DataLoader(TensorDataset(torch.arange(7.0)), 2))  # rank 1 replays at the end
    test = loop.prepare(DataLoader(TensorDataset(torch.arange(10.0, 19.0)), 3))  # and here too
    sizes = []
    for (batch,) in train:
        loop.mean("train", batch.mean(), weight=len(batch))
        sizes.append(len(loop.gather_for_metrics(batch)))
        got = []
        with torch.no_grad():
            for (value,) in test:
                loop.mean("test", value.mean(), weight=len(value))
                got += loop.gather_for_metrics(value).tolist()
        assert got == [float(v) for v in range(10, 19)]
        assert loop.mean("test") == 14.0
    assert loop.mean("train") == 3.0
    assert sizes == [4, 3]

    # the rest of what talks: reduce, gather of uneven rows, print on one rank
    assert loop.reduce(torch.tensor([rank + 1.0])).item() == 3.0
    assert loop.reduce(torch.tensor([rank + 1.0]), "mean").item() == 1.5
    assert loop.gather(torch.full((rank + 1,), float(rank))).tolist() == [0.0, 1.0, 1.0]
    loop.wait_for_everyone()
    assert loop.is_main_process is (rank == 0)

    # a rank that never has a batch: every rank raises together
    loader = loop.prepare(DataLoader(TensorDataset(torch.arange(2.0)), 2))
    try:
        list(loader)
    except DataError as error:
        text = str(error)
    assert "never had a batch" in text
    return True


def test_what_data_parallelism_does(run_ranks):
    import inspect

    script = "from __future__ import annotations\n" + inspect.getsource(check_all)
    assert run_ranks(2, script, name="check_all", timeout=240) == [True, True]
