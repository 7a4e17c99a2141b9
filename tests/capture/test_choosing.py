"""`auto`: graphs of eager kernels, and compiled ones only where the run is long enough."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hotloop.capture import choosing


def train(loop, epochs=4, batches=40):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    data = DataLoader(TensorDataset(torch.randn(2 * batches, 4)), batch_size=2)
    model, optimizer, loader = loop.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.01, fused=True), data
    )

    @loop.capture
    def step(x):
        loss = model(x).square().mean()
        loop.backward(loss)
        loop.update(optimizer)
        return loss

    losses = [step(x).detach() for _ in loop.epochs(epochs) for (x,) in loader]
    return step, torch.stack(losses)


@pytest.fixture
def compiling(monkeypatch):
    """Counts what is compiled instead of compiling; `fail` lets it fail."""

    class Compiling:
        count = 0
        fail = False

        def __call__(self, function, **options):
            self.count += 1

            def compiled(*args, **kwargs):
                if self.fail:
                    raise RuntimeError("no compiler here")
                return function(*args, **kwargs)

            return compiled

    made = Compiling()
    monkeypatch.setattr(torch, "compile", made)
    monkeypatch.setattr(choosing, "compile_seconds", lambda modules: 1.0)
    # wall time on the machine of the test means nothing
    monkeypatch.setattr(choosing.time, "perf_counter", lambda: 0.0)
    return made


def set_replay_ms(loop, ms):
    recorder = loop._host.recorder()
    recorder.spent_ms = ms
    return recorder


def test_a_short_run_is_never_compiled(graph_loop, compiling):
    loop = graph_loop()
    set_replay_ms(loop, 10.0)
    step, _ = train(loop, epochs=2)
    assert step.captures == 1
    assert compiling.count == 0
    assert step._choice.settled


def test_a_long_run_is_compiled_and_says_what_it_brings(graph_loop, compiling, capsys):
    _, expected = train(graph_loop(capture="graph"))
    loop = graph_loop()
    # 160 steps, of which 28 are measured; 132 of 100 ms, a quarter saved, are 3.3 s
    set_replay_ms(loop, 100.0)
    step, losses = train(loop)
    assert compiling.count == 1
    assert step.captures == 2
    assert torch.equal(losses, expected)
    said = capsys.readouterr().err
    assert "steps of 100.00 ms are to come" in said
    # as fast as before: kept, since it is compiled already
    assert step._choice.compiled


def test_compiled_kernels_that_are_slower_are_left_again(graph_loop, compiling, capsys, monkeypatch):
    loop = graph_loop()
    recorder = set_replay_ms(loop, 100.0)
    decide = choosing.Choice._decide

    def slower(self, device_ms, name):
        decide(self, device_ms, name)
        recorder.spent_ms = 120.0

    monkeypatch.setattr(choosing.Choice, "_decide", slower)
    step, _ = train(loop)
    assert not step.compiles
    assert step.captures == 2
    assert "compiled kernels take 120.00 ms a step, eager ones 100.00" in capsys.readouterr().err


def test_where_compiling_fails_training_goes_on(graph_loop, compiling, capsys):
    compiling.fail = True
    _, expected = train(graph_loop(capture="graph"))
    loop = graph_loop()
    set_replay_ms(loop, 100.0)
    step, losses = train(loop)
    assert step.reason is None
    assert step.captures == 1
    assert torch.equal(losses, expected)
    assert "compiling failed, eager kernels are used: no compiler here" in capsys.readouterr().err


def test_a_run_of_unknown_length_is_not_compiled(graph_loop, compiling):
    loop = graph_loop()
    set_replay_ms(loop, 1e6)
    step = loop.capture(lambda x: x + 1)
    for _ in range(60):
        step(torch.ones(1))
    assert compiling.count == 0


def test_cost_grows_with_the_model():
    small, large = nn.Linear(1, 1), nn.Sequential(*[nn.Linear(1, 1) for _ in range(50)])
    assert choosing.compile_seconds([small]) < choosing.compile_seconds([large])
