"""Captured steps over several processes: what one rank wishes reaches all, also through a sum that is recorded."""

import pytest

pytestmark = pytest.mark.multi


def check_all(rank, world):
    import os

    import torch
    import torch.nn.functional as F
    from torch import nn

    import hotloop
    from hotloop.loop.window import Window

    os.environ["HOTLOOP_PROGRESS"] = "0"
    found = {}

    # gloo records nothing: a captured step is the plain one
    def train(captured):
        torch.manual_seed(0)
        loop = hotloop.Loop(device="cpu", record=False)
        model = nn.Linear(3, 1)
        model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

        def step(x):
            loss = F.mse_loss(model(x), x[:, :1])
            loop.backward(loss)
            loop.update(optimizer, max_norm=1.0)
            return loss

        run = loop.capture(step) if captured else step
        generator = torch.Generator().manual_seed(rank)
        for _ in range(6):
            run(torch.randn(4, 3, generator=generator))
        loop.end_training()
        return model.weight.flatten().tolist()

    found["plain"], found["captured"] = train(False), train(True)

    # the window as a recording has it: the sum reads the wishes where they lie, every time it is made
    loop = hotloop.Loop(device="cpu", record=False)
    window = Window(1, loop.processes, torch.device("cpu"), resident=True)
    seen = []
    for i in range(4):
        window.begin()
        window.weigh(torch.ones(()), 4.0)
        window.flags[0] = i == 1 and rank == 0
        window.flags[1] = i == 2 and rank == 1
        window.send_wishes()
        window.tape = []
        factor = float(window.factor())
        window.tape = None
        seen.append((factor, *window.flags_on_device.tolist()))
    found["seen"] = seen
    loop.end_training()
    return found


def test_two_ranks(run_ranks):
    import inspect

    a, b = run_ranks(2, inspect.getsource(check_all), name="check_all", timeout=240)
    assert a["plain"] == a["captured"] == b["plain"] == b["captured"]
    # world * n_ref / N = 2 * 4 / 8
    assert a["seen"] == b["seen"] == [(1.0, 0.0, 0.0), (1.0, 1.0, 0.0), (1.0, 0.0, 1.0), (1.0, 0.0, 0.0)]
