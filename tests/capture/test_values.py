"""Whatever a step reads through Python counts in the very next call, though a recording repeats what it froze."""

import collections
import enum
import functools
import sys
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hotloop.capture.fingerprint import Fingerprint
from hotloop.capture.identities import Identities, alike
from hotloop.errors import CaptureError

SCALE, ACTIVATION, WEIGHTS, NUMBER = 2.0, F.relu, [1.0], np.float32(2.0)


def follow(step, plain, changes, calls=14):
    """Call both with the same arguments; `changes` are made before the calls of those numbers."""
    for i in range(calls):
        changes.get(i, lambda: None)()
        x = torch.full((2,), i + 1.0)
        torch.testing.assert_close(step(x), plain(x), rtol=0, atol=0)
    assert step.reason is None
    assert step.replays > 3


class Part:
    factor = 1.0

    def __init__(self):
        self.scale, self._hidden, self.act, self.rows = 2.0, 3.0, F.relu, [1.0]
        self.inner, self.shift, self.layer = types.SimpleNamespace(a=1.0), torch.ones(2), nn.Identity()

    @property
    def hidden(self):
        return self._hidden

    def scaled(self, x):
        return x * self.scale * self.factor

    def step(self, x):
        y = self.act(self.layer(self.scaled(x))) * self.hidden * self.inner.a * self.rows[0] + self.shift
        return y * getattr(self, "late", 1.0)

    def __call__(self, x):
        return self.step(x)


CHANGES_OF_PARTS = {
    "number": lambda part: setattr(part, "scale", 5.0),
    "number behind a property": lambda part: setattr(part, "_hidden", 5.0),
    "number of its class": lambda part: setattr(part, "factor", 5.0),
    "function": lambda part: setattr(part, "act", torch.tanh),
    "number of an inner object": lambda part: setattr(part.inner, "a", 5.0),
    "inner object": lambda part: setattr(part, "inner", types.SimpleNamespace(a=5.0)),
    "item": lambda part: part.rows.__setitem__(0, 5.0),
    "list": lambda part: setattr(part, "rows", [5.0]),
    "tensor": lambda part: setattr(part, "shift", torch.full((2,), 5.0)),
    "memory of a tensor": lambda part: setattr(part.shift, "data", torch.full((2,), 5.0)),
    "module": lambda part: setattr(part, "layer", nn.Tanh()),
    "attribute that was not there": lambda part: setattr(part, "late", 5.0),
}


@pytest.mark.parametrize("how", ["method", "object", "closure", "bound method", "partial"])
@pytest.mark.parametrize("change", CHANGES_OF_PARTS)
def test_what_an_object_holds(filmed_loop, how, change):
    part = Part()
    bound = part.step

    def closure(x):
        return part.step(x)

    def through(x):
        return bound(x)

    def given(extra, x):
        return part.step(x) + extra

    plain = {
        "method": part.step,
        "object": part,
        "closure": closure,
        "bound method": through,
        "partial": functools.partial(given, 1.0),
    }[how]
    step = filmed_loop().capture(plain, mode="graph")
    follow(step, plain, {7: lambda: CHANGES_OF_PARTS[change](part)})


@pytest.mark.parametrize(
    ("before", "after"), [(torch.sin, torch.cos), (F.relu, F.tanh), (lambda x: 2 * x, lambda x: 3 * x)]
)
def test_a_function_under_a_name(filmed_loop, before, after):
    use = before

    def plain(x):
        return use(x) * 2

    def change():
        nonlocal use
        use = after

    follow(filmed_loop().capture(plain, mode="graph"), plain, {7: change})


def test_globals_and_keyword_defaults(filmed_loop, monkeypatch):
    def plain(x, *, twice=2.0):
        return ACTIVATION(x) * SCALE * twice * WEIGHTS[70] * float(NUMBER)

    def put(name, value):
        monkeypatch.setitem(globals(), name, value)

    put("WEIGHTS", [1.0] * 100)
    changes = {
        7: lambda: put("SCALE", 3.0),
        10: lambda: put("ACTIVATION", torch.tanh),
        13: lambda: plain.__kwdefaults__.update(twice=5.0),
        16: lambda: WEIGHTS.__setitem__(70, 4.0),
        19: lambda: put("NUMBER", np.float32(7.0)),
    }
    follow(filmed_loop().capture(plain, mode="graph"), plain, changes, calls=24)


def test_containers(filmed_loop):
    tree, chosen, rows = {"loss": {"weight": {"deep": 1.0}}}, set(), collections.deque([1.0])

    def plain(x):
        weight = tree["loss"]["weight"]["deep"] * tree.get("late", 1.0) * rows[0]
        return x * weight * (2.0 if "a" in chosen else 1.0)

    changes = {
        7: lambda: tree["loss"]["weight"].update(deep=2.0),
        10: lambda: tree.update(late=3.0),
        13: lambda: chosen.add("a"),
        16: lambda: rows.appendleft(5.0),
    }
    follow(filmed_loop().capture(plain, mode="graph"), plain, changes, calls=20)


class Slotted:
    __slots__ = ("scale",)


def test_slots_classes_and_modules_of_the_users(filmed_loop, monkeypatch):
    slotted, constants = Slotted(), types.ModuleType("constants_of_a_user")
    slotted.scale = constants.scale = 2.0
    monkeypatch.setitem(sys.modules, constants.__name__, constants)

    def plain(x):
        return x * slotted.scale * Part.factor * constants.scale

    changes = {
        7: lambda: setattr(slotted, "scale", 3.0),
        10: lambda: monkeypatch.setattr(Part, "factor", 5.0),
        13: lambda: setattr(constants, "scale", 7.0),
    }
    follow(filmed_loop().capture(plain, mode="graph"), plain, changes, calls=18)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.act, self.lin, self.seq = (
            torch.tanh,
            nn.Linear(2, 2),
            nn.Sequential(nn.Linear(2, 2), nn.Sigmoid()),
        )
        self.rest, self.loose, self.deep = (
            [torch.sin],
            torch.ones(2),
            nn.ModuleList(nn.Linear(2, 2) for _ in range(3)),
        )
        self.register_buffer("shift", torch.ones(2))

    def forward(self, x):
        for layer in self.deep:
            x = layer(x)
        return self.rest[0](self.act(self.seq(self.lin(x)))) * SCALE * self.loose + self.shift


CHANGES_OF_NETS = {
    "function": lambda net: setattr(net, "act", torch.sin),
    "function in a list": lambda net: net.rest.__setitem__(0, torch.cos),
    "buffer": lambda net: setattr(net, "shift", torch.full((2,), 5.0)),
    "buffer registered": lambda net: net.register_buffer("shift", torch.full((2,), 5.0)),
    "tensor": lambda net: setattr(net, "loose", torch.full((2,), 5.0)),
    "module in a sequence": lambda net: net.seq.__setitem__(1, nn.Tanh()),
    "module taken away": lambda net: net.deep.__delitem__(2),
    "fewer modules": lambda net: setattr(net, "deep", net.deep[:1]),
    "forward of an object": lambda net: setattr(net.lin, "forward", lambda x: 3 * x),
    "hook": lambda net: net.lin.register_forward_hook(lambda m, i, out: 2 * out),
    "global of its forward": lambda net: globals().update(SCALE=5.0),
}


@pytest.mark.parametrize("change", CHANGES_OF_NETS)
def test_what_a_module_holds(filmed_loop, monkeypatch, change):
    monkeypatch.setitem(globals(), "SCALE", 2.0)
    torch.manual_seed(0)
    loop = filmed_loop()
    net = loop.prepare(Net())

    def plain(x):
        return net(x)

    with torch.no_grad():
        follow(loop.capture(plain, mode="graph"), plain, {7: lambda: CHANGES_OF_NETS[change](net)})


def test_a_hook_in_anothers_place_and_what_a_hook_reads(filmed_loop):
    loop, scale = filmed_loop(), 2.0
    net = loop.prepare(nn.Linear(2, 2))
    handles = [net.register_forward_hook(lambda m, i, out: out * scale)]

    def plain(x):
        return net(x)

    def change():
        nonlocal scale
        scale = 3.0

    def exchange():
        handles.pop().remove()
        handles.append(net.register_forward_hook(lambda m, i, out: out - 1))

    with torch.no_grad():
        follow(loop.capture(plain, mode="graph"), plain, {7: change, 10: exchange})


@pytest.mark.parametrize("kind", ["hook", "hook after accumulation"])
def test_hooks_of_parameters(filmed_loop, kind):
    loop = filmed_loop()
    net = loop.prepare(nn.Linear(2, 1))

    def double(p):
        p.grad.mul_(2)

    def plain(x):
        loss = net(x).sum()
        loop.backward(loss)
        return loss

    step = loop.capture(plain, mode="graph")
    for i in range(12):
        if i == 6 and kind == "hook":
            net.weight.register_hook(lambda gradient: 2 * gradient)
        elif i == 6:
            net.weight.register_post_accumulate_grad_hook(double)
        net.zero_grad()
        step(torch.ones(2))
        assert net.weight.grad.tolist() == [[1.0 if i < 6 else 2.0] * 2]
    assert step.replays > 4


def test_an_object_made_where_another_was_is_another(filmed_loop):
    # a tensor is made in the memory of the last but one again and again
    w = torch.ones(2)

    def plain(x):
        return x * w

    def change(value):
        nonlocal w
        w = torch.full((2,), value)

    changes = {i: functools.partial(change, float(i)) for i in range(6, 60, 3)}
    follow(filmed_loop().capture(plain, mode="graph"), plain, changes, calls=60)


def test_numbers_that_change_lead_nowhere_else(filmed_loop, monkeypatch):
    """A mode switched to and fro finds its recordings by values alone: what is watched is walked through once each."""
    walks = []
    look = Fingerprint.__init__

    def counted(self, *args, **kwargs):
        walks.append(self)
        look(self, *args, **kwargs)

    monkeypatch.setattr(Fingerprint, "__init__", counted)
    loop = filmed_loop()
    net = nn.Dropout(0.0).eval()
    net.scale = 2.0
    net = loop.prepare(net)
    step = loop.capture(lambda x: net(x) * net.scale, mode="graph")
    for i in range(40):
        net.train(i // 5 % 2 == 1)
        net.scale = 2.0 + i // 5 % 2
        assert torch.equal(step(torch.full((2,), i + 1.0)), torch.full((2,), (i + 1.0) * net.scale))
    assert step.captures == 2
    # one for each of the two states, and what is found again needs none
    assert len(walks) == 2


def test_a_private_number_in_a_slot(filmed_loop):
    class Held:
        __slots__ = ("__k",)

        def __init__(self):
            self.put(2.0)

        def put(self, k):
            self.__k = k

        def times(self, x):
            return x * self.__k

    held = Held()

    def plain(x):
        return held.times(x)

    follow(filmed_loop().capture(plain, mode="graph"), plain, {6: lambda: held.put(5.0)})


def test_an_object_that_comes_back_may_hold_other_values(filmed_loop):
    a, b = types.SimpleNamespace(k=2.0), types.SimpleNamespace(k=2.0)
    used = a

    def plain(x):
        return x * used.k

    def use(one):
        nonlocal used
        used = one

    changes = {
        6: lambda: use(b),
        9: lambda: setattr(a, "k", 4.0),
        12: lambda: use(a),
        15: lambda: setattr(a, "k", 6.0),
    }
    follow(filmed_loop().capture(plain, mode="graph"), plain, changes, calls=20)


def test_equal_numbers_of_other_kinds_are_others(filmed_loop):
    factor = 1

    def plain(x):
        return torch.ones(2, dtype=torch.int64) * factor + x.long()

    def change():
        nonlocal factor
        factor = 1.0

    step = filmed_loop().capture(plain, mode="graph")
    kinds = []
    for i in range(12):
        if i == 6:
            change()
        kinds.append(step(torch.ones(2)).dtype)
    assert kinds == [torch.int64] * 6 + [torch.float32] * 6


def test_a_trainers_counters_that_the_step_does_not_read_are_no_change(filmed_loop):
    loop = filmed_loop()

    class Trainer:
        def __init__(self):
            self.net = loop.prepare(nn.Linear(2, 1))
            self.step, self.epoch, self.weight, self.history = 0, 0, 2.0, []
            self.run = loop.capture(self.run, mode="graph")

        def run(self, x):
            return self.loss(self.net(x))

        def loss(self, out):
            return out.sum() * self.weight

        def fit(self):
            for i in range(20):
                self.step += 1
                self.epoch = i // 3
                self.weight = 2.0 if i < 12 else 3.0
                self.last = self.run(torch.ones(2))
                self.history.append(self.last)

    trainer = Trainer()
    trainer.fit()
    assert trainer.run.captures == 2
    assert trainer.run.replays > 12
    assert trainer.history[19].item() == pytest.approx(1.5 * trainer.history[0].item())


def test_an_attribute_that_a_method_sets_is_not_repeated(filmed_loop, capsys):
    class Trainer:
        count = 0

        def step(self, x):
            self.count += 1
            return x * 2

    trainer = Trainer()
    step = filmed_loop().capture(trainer.step, mode="graph")
    for _ in range(8):
        step(torch.ones(2))
    assert trainer.count == 8
    assert "the step changes self.count" in step.reason


def test_two_values_that_take_turns_in_changing_are_no_value_that_never_rests(filmed_loop):
    a, b = 0.0, 0.0

    def plain(x):
        return x * a + b

    step = filmed_loop().capture(plain, mode="graph")
    for i in range(1, 13):
        a, b = (float(i), b) if i % 2 else (a, float(i))
        assert torch.equal(step(torch.ones(2)), plain(torch.ones(2)))
    with pytest.raises(CaptureError, match=r"a: .* changed in each of the last 4 calls"):
        for i in range(4):
            a = 100.0 + i
            step(torch.ones(2))


def test_marks_are_of_one_object_for_ever():
    identities = Identities()
    marks = [identities.of(types.SimpleNamespace()) for _ in range(100)]
    assert len(set(marks)) == 100
    kept = types.SimpleNamespace()
    assert identities.of(kept) is identities.of(kept)
    part = Part()
    assert alike(identities.mark(part.step), identities.mark(part.step))
    assert not alike(identities.mark(part.step), identities.mark(Part().step))
    assert identities.latest("place", kept) is identities.latest("place", kept)
    first = identities.latest("place", kept)
    identities.latest("place", [])
    assert identities.latest("place", kept) is not first


def test_what_a_recording_would_freeze_alike():
    values = [0, 0.0, -0.0, False, None, "0", (0,), [0], {0: 0}, frozenset([0]), float("nan"), 1, True]
    for i, a in enumerate(values):
        for j, b in enumerate(values):
            assert alike(a, b) == (i == j)


class Batch:
    def __init__(self, x, factor=1.0):
        self.x, self.factor = x, factor


def test_objects_that_hold_tensors_are_read_anew_in_each_call(filmed_loop, capsys):
    def plain(batch):
        return batch.x * batch.factor

    step = filmed_loop().capture(plain, mode="graph")
    kept = Batch(torch.zeros(2))
    for i in range(12):
        kept.x = torch.full((2,), float(i))
        kept.factor = 1.0 + i // 6
        for batch in (kept, Batch(kept.x, 3.0)):
            assert torch.equal(step(batch), plain(batch))
    assert step.captures == 0
    assert "an argument is an object of type Batch" in capsys.readouterr().err


class Kind(enum.Enum):
    ONE, TWO = 1.0, 2.0


def test_what_objects_that_are_arguments_hold(filmed_loop):
    settings, layers, factor = types.SimpleNamespace(k=1.0), nn.Sequential(nn.Linear(2, 2), nn.Tanh()), 1.0

    def scaled(x):
        return x * factor

    def plain(x, settings, layers, function, kind):
        return function(layers(x)) * settings.k * kind.value

    def change_factor():
        nonlocal factor
        factor = 3.0

    changes = {
        8: lambda: setattr(settings, "k", 2.0),
        12: change_factor,
        16: lambda: layers.__setitem__(1, nn.Sigmoid()),
    }
    step = filmed_loop().capture(plain, mode="graph")
    with torch.no_grad():
        for i in range(26):
            changes.get(i, lambda: None)()
            given = (torch.full((2,), i + 1.0), settings, layers, scaled, Kind.ONE if i < 20 else Kind.TWO)
            assert torch.equal(step(*given), plain(*given))
    assert step.replays > 12


def test_arguments_that_are_another_object_each_time_run_eagerly(filmed_loop):
    def plain(x, chosen):
        return x * (2.0 if "a" in chosen else 1.0)

    step = filmed_loop().capture(plain, mode="graph")
    for i in range(40):
        chosen = {"a"} if i % 3 else {"b"}
        assert torch.equal(step(torch.ones(2), chosen), plain(torch.ones(2), chosen))
    assert step.captures == 0
