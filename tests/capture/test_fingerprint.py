"""What a step may have frozen: found, and a change noticed at once."""

import types

import pytest
import torch
from torch import nn

from hotloop.capture.fingerprint import Fingerprint

LIST = [1.0, 2.0]
SETTINGS = types.SimpleNamespace(rate=0.5, inner=types.SimpleNamespace(depth=2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.drop, self.lin = nn.LayerNorm(4), nn.Dropout(0.5), nn.Linear(4, 4)
        self.heads, self.flavour = 2, "plain"
        self.config, self.factors = types.SimpleNamespace(scale=1.0, unread=1.0), [1.0, 2.0]
        self.register_buffer("shift", torch.zeros(1))

    def forward(self, x):
        return (
            self.lin(self.drop(self.norm(x))) * self.heads * self.config.scale * self.factors[0] + self.shift
        )


def made():
    local, table, helper_scale = 1.0, {"a": 1.0}, 3.0
    model = Block()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator()
    held = {"loose": torch.zeros(2), "generator": generator}

    def helper(x):
        return x * helper_scale

    def step(x, twice=2.0):
        return helper(model(x)) * local * table["a"] * twice * SETTINGS.rate * SETTINGS.inner.depth + LIST[0]

    def change_local():
        nonlocal local
        local = 5.0

    def change_helper():
        nonlocal helper_scale
        helper_scale = 4.0

    def keep():
        return held

    def outer(x):
        return step(x) + keep()["loose"]

    changes = {
        "closure": change_local,
        "closure of a helper": change_helper,
        "dict": lambda: table.update(a=2.0),
        "list": lambda: LIST.__setitem__(0, 9.0),
        "attribute": lambda: setattr(SETTINGS, "rate", 0.7),
        "attribute of an attribute": lambda: setattr(SETTINGS.inner, "depth", 3),
        "default": lambda: setattr(step, "__defaults__", (3.0,)),
        "eval": model.eval,
        "eps": lambda: setattr(model.norm, "eps", 0.1),
        "probability": lambda: setattr(model.drop, "p", 0.1),
        "own attribute": lambda: setattr(model, "heads", 3),
        "configuration of a module": lambda: setattr(model.config, "scale", 2.0),
        "another configuration": lambda: setattr(model, "config", types.SimpleNamespace(scale=3.0)),
        "list of a module": lambda: model.factors.__setitem__(1, 7.0),
        "text": lambda: setattr(model, "flavour", "other"),
        "replaced parameter": lambda: setattr(model.lin, "bias", nn.Parameter(torch.ones(4))),
        "parameter past setattr": lambda: model.lin._parameters.__setitem__(
            "bias", nn.Parameter(torch.ones(4))
        ),
        "new module": lambda: setattr(model, "lin", nn.Linear(4, 4)),
        "frozen": lambda: model.lin.weight.requires_grad_(False),
        "module frozen": lambda: model.requires_grad_(False),
        "memory": lambda: setattr(model.lin.weight, "data", torch.zeros(4, 4)),
        "cast": lambda: model.double(),
        "assigned state": lambda: model.load_state_dict(
            {k: v.clone() for k, v in model.state_dict().items()}, assign=True
        ),
        "hook": lambda: model.lin.register_forward_hook(lambda *a: None),
        "pre-hook": lambda: model.norm.register_forward_pre_hook(lambda *a: None),
        "backward hook": lambda: model.lin.register_full_backward_hook(lambda *a: None),
        "group": lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
        "decay": lambda: optimizer.param_groups[0].update(weight_decay=0.5),
        "optimizer state": lambda: optimizer.load_state_dict(optimizer.state_dict()),
    }
    return outer, model, optimizer, generator, held["loose"], changes


@pytest.fixture(autouse=True)
def _as_before():
    yield
    LIST[0], SETTINGS.rate, SETTINGS.inner.depth = 1.0, 0.5, 2


@pytest.mark.parametrize("name", sorted(made()[-1]))
def test_a_change_is_noticed_at_the_next_look(name):
    step, model, optimizer, *_, changes = made()
    fingerprint = Fingerprint(step, [model], [optimizer])
    before = fingerprint.take()
    assert fingerprint.unchanged()
    changes[name]()
    # what is written into a module's table past torch is looked for in turn
    looks = 3 if name == "parameter past setattr" else 1
    assert False in [fingerprint.unchanged() for _ in range(looks)]
    after = fingerprint.take()
    if name not in ("new module", "group"):
        assert after != before
        assert fingerprint.difference(before, after) != "nothing"


def test_a_hook_taken_away_is_noticed():
    step, model, optimizer, *_ = made()
    handle = model.lin.register_forward_hook(lambda *a: None)
    fingerprint = Fingerprint(step, [model], [optimizer])
    assert fingerprint.unchanged()
    handle.remove()
    assert not fingerprint.unchanged()


def test_modes_are_noticed():
    step, model, optimizer, *_ = made()
    fingerprint = Fingerprint(step, [model], [optimizer])
    with torch.no_grad():
        assert not fingerprint.unchanged()
    with torch.autocast("cpu", torch.bfloat16):
        assert not fingerprint.unchanged()
    assert fingerprint.unchanged()


def test_an_equal_value_set_again_is_no_change():
    step, model, optimizer, *_ = made()
    fingerprint = Fingerprint(step, [model], [optimizer])
    before = fingerprint.take()
    SETTINGS.rate = float("0.5")
    model.train()
    assert fingerprint.take() == before
    fingerprint.remember()
    assert fingerprint.unchanged()


def test_tensors_and_generators_that_the_step_reaches_are_found():
    step, model, optimizer, generator, loose, _ = made()
    fingerprint = Fingerprint(step, [model], [optimizer])
    assert any(g is generator for g in fingerprint.generators)
    assert any(t is loose for t in fingerprint.reached)
    names = fingerprint.live_tensors()
    assert any(t is model.shift for t in names.values())
    assert any(t is model.lin.weight for t in names.values())


def test_gradients_that_wait_are_seen():
    step, model, optimizer, *_ = made()
    fingerprint = Fingerprint(step, [model], [optimizer])
    assert not fingerprint.gradients_wait()
    model(torch.ones(1, 4)).sum().backward()
    assert fingerprint.gradients_wait()
