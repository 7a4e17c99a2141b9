"""Random numbers drawn on the host, which a recording would repeat."""

import copy
import random
from random import uniform

import numpy as np
import pytest
import torch
from torch import nn

from hotloop.capture.host_streams import HostStreams

OWN = np.random.default_rng(3)
LEGACY = np.random.RandomState(3)
PYTHON = random.Random(3)


def of_python(x):
    return x * random.random()


def imported(x):
    return x * uniform(0, 1)


def of_numpy(x):
    return x * float(np.random.beta(1, 1))


def of_a_generator(x):
    return x * OWN.random()


def of_a_legacy_generator(x):
    return x * LEGACY.rand()


def of_an_own_stream(x):
    return x * PYTHON.random()


def of_a_default(x, *, stream=PYTHON):
    return x * stream.random()


DRAWS = {
    "random.random": of_python,
    "uniform": imported,
    "np.random.beta": of_numpy,
    "OWN.random": of_a_generator,
    "LEGACY.rand": of_a_legacy_generator,
    "PYTHON.random": of_an_own_stream,
    "stream.random": of_a_default,
}


def seed():
    random.seed(1)
    np.random.seed(1)
    PYTHON.setstate(random.Random(3).getstate())
    LEGACY.set_state(np.random.RandomState(3).get_state())
    OWN.bit_generator.state = copy.deepcopy(np.random.default_rng(3).bit_generator.state)


@pytest.mark.parametrize("name", DRAWS)
def test_a_step_that_draws_on_the_host_draws_at_every_call(graph_loop, name, capsys):
    seed()
    expected = [DRAWS[name](1.0) for _ in range(8)]
    assert len(set(expected)) == 8
    seed()
    step = graph_loop().capture(DRAWS[name])
    found = [step(torch.ones((), dtype=torch.float64)).item() for _ in range(8)]
    assert found == expected
    assert step.captures == 0
    said = capsys.readouterr().err
    assert f": {name}() draws from" in said
    assert "pass it as a tensor" in said


class LayerDrop(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            if random.random() < 0.5:
                x = layer(x)
        return x


def trail(loop, captured):
    torch.manual_seed(0)
    seed()
    model = LayerDrop()
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, fused=True))

    def train(x):
        loss = model(x).square().mean()
        loop.backward(loss)
        loop.update(optimizer)
        return loss

    step = loop.capture(train) if captured else train
    x = torch.ones(2, 4)
    return step, [step(x + i).item() for i in range(12)]


def test_a_module_that_draws_on_the_host_is_no_recording_either(graph_loop, capsys):
    _, expected = trail(graph_loop(), captured=False)
    step, found = trail(graph_loop(), captured=True)
    assert found == expected
    assert step.captures == 0
    assert "python's random stream" in step.reason
    assert "forward and backward of LayerDrop run eagerly too: line" in capsys.readouterr().err


def test_torch_on_the_host_draws_where_the_device_is_another():
    own = torch.Generator().manual_seed(3)

    def step(x, named):
        return x * (torch.rand((), generator=own) if named else torch.rand(()))

    for named, stream in ((True, "`own` on the host"), (False, "torch's random stream of the CPU")):
        streams = HostStreams(step, torch.device("xpu"))
        assert streams.drawn() is None
        step(1.0, named)
        assert f"it draws from {stream}; " in streams.drawn()
    here = HostStreams(step, torch.device("cpu"))
    step(step(1.0, True), False)
    assert here.drawn() is None


def test_what_is_drawn_outside_is_nobody_s_business(graph_loop):
    step = graph_loop().capture(lambda x: x * 2)
    for _ in range(8):
        random.random()
        np.random.rand()
        step(torch.ones(1))
    assert step.captures == 1
    assert step.reason is None
