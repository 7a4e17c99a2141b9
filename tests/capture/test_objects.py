"""Mappings and dataclasses of tensors that a captured step is given or returns are what they are to the plain step."""

import collections
import dataclasses
import gc
import math
import types
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hotloop.capture import Buckets
from hotloop.capture.arguments import Opened
from hotloop.capture.entry import Entry
from hotloop.capture.noting import noting

SCALE = 1.0


class Encoded(collections.UserDict):
    """Of the form of a tokenizer's batch: items that are attributes, too, and something of its own beside them."""

    factor = 1.0

    def __init__(self, items, encodings=None):
        super().__init__(items)
        self._encodings = encodings

    def __getitem__(self, key):
        return self._encodings[key] if isinstance(key, int) else self.data[key]

    def __getattr__(self, name):
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None

    def to(self, device):
        self.data = {name: value.to(device) for name, value in self.data.items()}
        return self

    @property
    def count(self):
        return self._encodings[0]

    def scaled(self):
        return self["x"] * SCALE


class Bunch(dict):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class Ordered(collections.OrderedDict):
    pass


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    x: torch.Tensor
    y: torch.Tensor
    weight: float = 1.0
    names: list = dataclasses.field(default_factory=lambda: ["a", None])


@dataclasses.dataclass
class Nested:
    first: Encoded
    rest: list


@dataclasses.dataclass
class Noted:
    x: torch.Tensor

    def __post_init__(self):
        self.double = 2 * self.x
        self.row = [7]


@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    more: dict
    note: str = "kept"


def in_encoded(model, batch):
    return F.mse_loss(model(batch["x"]), batch.y)


def by_name(model, batch):
    return F.mse_loss(model(*[v for k, v in batch.to("cpu").items() if k == "x"]), batch["y"])


def in_batch(model, batch):
    return batch.weight * F.mse_loss(model(batch.x), batch.y)


def in_nested(model, batch):
    return F.mse_loss(model(batch.first.x), batch.rest[0]["y"]) * batch.rest[1].weight


def in_items(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"])


def nested(x, y):
    return Nested(Encoded({"x": x}), [Ordered(y=y), Batch(x, y, 0.5)])


FORMS = {
    "encoded": (in_encoded, lambda x, y: Encoded({"x": x, "y": y}, [object()])),
    "by name": (by_name, lambda x, y: Encoded({"x": x, "y": y}, [object()])),
    "frozen dataclass": (in_batch, Batch),
    "nested": (in_nested, nested),
    "bunch": (in_encoded, lambda x, y: Bunch(x=x, y=y)),
    "ordered": (in_items, lambda x, y: Ordered(x=x, y=y)),
    "proxy": (in_items, lambda x, y: types.MappingProxyType({"x": x, "y": y})),
    "in a dict": (lambda model, d: in_batch(model, d["of"][0]), lambda x, y: {"of": [Batch(x, y)]}),
}


def fit(loop, form, *, captured, calls=12, rows=(4,), by_key=False, **options):
    """Losses and the model after `calls` steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1), momentum=0.9, fused=True)
    model, optimizer = loop.prepare(model, optimizer)
    loss_of, make = FORMS[form]

    def train(batch):
        loss = loss_of(model, batch)
        loop.backward(loss)
        loop.update(optimizer, max_norm=1.0)
        return loss

    run = loop.capture(train, mode="graph", **options) if captured else train
    losses = []
    for i in range(calls):
        x = torch.randn(rows[i % len(rows)], 3)
        batch = make(x, x.sum(1, keepdim=True))
        losses.append((run(batch=batch) if by_key else run(batch)).detach())
    return run, torch.stack(losses), model.state_dict()


def assert_as_eager(make_loop, form, replays, **options):
    loop_options = options.pop("loop", {})
    eager = fit(make_loop(**loop_options), form, captured=False, **{**options, "check_every": None})
    captured = fit(make_loop(**loop_options), form, captured=True, **options)
    assert torch.equal(eager[1], captured[1])
    for name, value in eager[2].items():
        assert torch.equal(value, captured[2][name]), name
    assert captured[0].reason is None
    assert captured[0].replays >= replays
    return captured[0]


@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_training_step_is_the_eager_one(filmed_loop, form, by_key):
    assert_as_eager(filmed_loop, form, 7, by_key=by_key)


@pytest.mark.parametrize("form", FORMS)
def test_recordings_that_read_their_inputs_themselves(ported_loop, form):
    assert_as_eager(ported_loop, form, 7)


@pytest.mark.parametrize("form", ["encoded", "nested"])
def test_shapes_windows_and_checks(filmed_loop, form):
    assert assert_as_eager(filmed_loop, form, 10, calls=24, rows=(4, 4, 3)).captures == 2
    assert_as_eager(filmed_loop, form, 6, calls=20, loop={"accumulation": 2})
    assert assert_as_eager(filmed_loop, form, 7, check_every=2).checks >= 3


def follow(step, plain, given, *, calls=16):
    """Call both with what `given` makes of a call's number; each gets objects of its own."""
    for i in range(calls):
        torch.testing.assert_close(step(*given(i)), plain(*given(i)), rtol=0, atol=0)
    assert step.reason is None


def test_an_evaluation_and_values_beside_the_tensors(filmed_loop):
    model = nn.Linear(2, 2)
    loop = filmed_loop()
    loop.prepare(model)

    def plain(batch, scale):
        return model(batch.x) * batch.weight * scale["k"] + len(batch.names)

    def given(i):
        x = torch.full((1, 2), float(i))
        weight, names = (1.0, ["a"]) if i % 2 else (-2.0, ["a", "b"])
        return Batch(x, x, weight, names), Bunch(k=1 + (i >= 16))

    step = loop.capture(plain, mode="graph")
    with torch.no_grad():
        follow(step, plain, given, calls=32)
    # two weights with either of two scales
    assert step.captures == 4


def test_one_object_written_in_place(filmed_loop):
    def plain(batch, kept):
        return batch["x"] * 2 + kept.x * len(batch)

    step = filmed_loop().capture(plain, mode="graph")
    batch, kept = Encoded({"x": torch.zeros(2)}), Noted(torch.zeros(2))
    for i in range(20):
        if i % 2:
            batch["x"] = torch.full((2,), float(i))
        else:
            batch["x"].fill_(i)
        kept.x = torch.full((2,), 10.0 * i)
        if i == 8:
            batch["y"] = torch.zeros(1)
        if i == 14:
            del batch["y"]
        given = (batch["x"], kept.x)
        assert torch.equal(step(batch, kept), plain(batch, kept))
        assert (batch["x"], kept.x) == given
    assert step.captures == 2
    assert step.replays >= 12


def test_one_tensor_in_two_places(filmed_loop):
    def plain(batch):
        return batch["x"] + 10 * batch["y"]

    def given(i):
        x = torch.full((2,), float(i))
        return (Encoded({"x": x, "y": x if i % 3 else 2 * x}),)

    step = filmed_loop().capture(plain, mode="graph")
    follow(step, plain, given)
    assert step.captures == 1


def test_a_tensor_of_an_object_that_the_step_writes(filmed_loop):
    def plain(batch):
        batch["x"].add_(1)
        return batch["x"] * batch["y"]

    step = filmed_loop().capture(plain, mode="graph")
    for i in range(12):
        x, y = torch.full((2,), float(i)), torch.full((2,), 3.0)
        batch = Encoded({"x": x, "y": x if i == 10 else y})
        expected = (i + 1.0) * (i + 1.0 if i == 10 else 3.0)
        assert step(batch).tolist() == [expected] * 2
        assert x.tolist() == [i + 1.0] * 2
        assert batch["x"] is x
    assert step.replays >= 5


def test_items_that_come_go_and_change_places(filmed_loop):
    def plain(batch):
        total = torch.zeros(2)
        for k, (name, value) in enumerate(batch.items()):
            total = total + (k + 1) * value * len(name)
        return total

    def given(i):
        x = torch.full((2,), float(i))
        kinds = [{"x": x, "yy": 2 * x}, {"x": x}, {"yy": x, "x": 2 * x}]
        return (Encoded(kinds[i // 6 % 3]),)

    step = filmed_loop().capture(plain, mode="graph")
    follow(step, plain, given, calls=36)
    assert step.captures == 3


def test_the_type_of_an_object_counts(filmed_loop):
    def plain(batch):
        return batch["x"] * (2.0 if isinstance(batch, Encoded) else 3.0)

    def given(i):
        items = {"x": torch.full((2,), float(i))}
        return (Encoded(items) if i % 2 else Ordered(items),)

    step = filmed_loop().capture(plain, mode="graph")
    follow(step, plain, given)
    assert step.captures == 2


def test_what_the_class_of_an_object_reads(filmed_loop, monkeypatch):
    def plain(batch):
        return batch.scaled() * batch.factor

    def given(i):
        monkeypatch.setitem(globals(), "SCALE", 1.0 if i < 8 else 3.0)
        monkeypatch.setattr(Encoded, "factor", 1.0 if i < 16 else 5.0)
        return (Encoded({"x": torch.full((2,), float(i))}),)

    step = filmed_loop().capture(plain, mode="graph")
    follow(step, plain, given, calls=24)
    assert step.captures == 3


ASK = "_encodings"
READS = {
    "by its name": lambda batch: batch.x * batch._encodings[0],
    "in a property": lambda batch: batch.x * batch.count,
    "in a subscript": lambda batch: batch.x * batch[0],
    "by a name that is a value": lambda batch: batch.x * getattr(batch, ASK)[0],
    "in its dict": lambda batch: batch.x * vars(batch)[ASK][0],
}


@pytest.mark.parametrize("how", READS)
def test_what_an_object_carries_beside_its_items_is_not_frozen(filmed_loop, how, capsys):
    plain = READS[how]
    step = filmed_loop().capture(plain, mode="graph")
    follow(step, plain, lambda i: (Encoded({"x": torch.ones(2)}, [i]),))
    assert step.replays == 0
    assert "the attribute '_encodings' of an argument of type Encoded" in capsys.readouterr().err
    assert "__getattribute__" not in vars(Encoded)


def test_what_is_derived_from_the_fields_is_not_frozen(filmed_loop, capsys):
    def plain(batch):
        return batch.x + batch.double

    step = filmed_loop().capture(plain, mode="graph")
    follow(step, plain, lambda i: (Noted(torch.full((2,), float(i))),))
    assert step.replays == 0
    assert "the attribute 'double' of an argument of type Noted" in capsys.readouterr().err


def test_an_attribute_that_comes_later(filmed_loop):
    def plain(batch):
        return batch.x * getattr(batch, "late", 1.0)

    def given(i):
        batch = types.SimpleNamespace(of=Noted(torch.full((2,), float(i)))).of
        if i > 8:
            batch.late = float(i)
        return (batch,)

    follow(filmed_loop().capture(plain, mode="graph"), plain, given)


CHANGES = {
    "taken out": lambda batch: batch.pop("y") * batch["x"],
    "put in": lambda batch: batch.setdefault("z", batch["x"] * 2) * 1,
    "replaced": lambda batch: batch.__setitem__("x", batch["x"] + 1) or batch["x"],
    "attribute": lambda batch: setattr(batch, "mark", 1) or batch["x"] * 1,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_step_that_changes_an_object_runs_eagerly(filmed_loop, change, capsys):
    plain = CHANGES[change]
    step = filmed_loop().capture(plain, mode="graph")
    for i in range(8):
        x = torch.full((2,), float(i))
        one, other = Encoded({"x": x, "y": x}), Encoded({"x": x, "y": x})
        assert torch.equal(step(one), plain(other))
        assert list(one) == list(other)
        assert all(torch.equal(one[k], other[k]) for k in one)
        assert vars(one).keys() == vars(other).keys()
    assert step.replays == 0
    assert "it changes an argument of type Encoded" in capsys.readouterr().err


class Checked(collections.UserDict):
    """Refuses to be copied."""

    def __init__(self, *, x):
        super().__init__(x=x)

    def __copy__(self):
        raise RuntimeError("there is one of me")


class Doubling(collections.UserDict):
    """Makes its items when asked."""

    def __getitem__(self, key):
        return 2 * self.data[key]


@pytest.mark.parametrize("kind", [Checked, Doubling])
def test_an_object_that_cannot_be_built_anew(filmed_loop, kind, capsys):
    def plain(batch):
        return batch["x"] + 1

    step = filmed_loop().capture(plain, mode="graph")
    follow(step, plain, lambda i: (kind(x=torch.full((2,), float(i))),))
    assert step.replays == 0
    assert f"an argument of type {kind.__name__} cannot be built anew" in capsys.readouterr().err


def test_an_object_that_holds_itself(filmed_loop):
    def plain(batch):
        return batch["x"] + 1

    def given(i):
        batch = Encoded({"x": torch.full((2,), float(i))})
        batch["self"] = batch
        return (batch,)

    follow(filmed_loop().capture(plain, mode="graph"), plain, given, calls=8)


def test_values_that_never_rest_are_a_reason_and_no_error(filmed_loop):
    def plain(batch):
        return batch.x * batch.weight

    step = filmed_loop().capture(plain, mode="graph")
    for i in range(20):
        batch = Batch(torch.ones(2), torch.ones(2), float(i))
        assert torch.equal(step(batch), plain(batch))
    assert "an argument of type Batch holds beside tensors, now 8.0," in step.reason


RETURNED = {
    "dataclass": (Output, lambda out: (out.loss, out.more["y"])),
    "encoded": (lambda loss, more: Encoded({"loss": loss, **more}), lambda out: (out.loss, out["y"])),
    "bunch": (lambda loss, more: Bunch(loss=loss, **more), lambda out: (out.loss, out["y"])),
    "nested": (lambda loss, more: [Output(loss, Ordered(more))], lambda out: (out[0].loss, out[0].more["y"])),
}


@pytest.mark.parametrize("outputs", ["clone", "static"])
@pytest.mark.parametrize("form", RETURNED)
def test_objects_that_a_step_returns(filmed_loop, form, outputs):
    make, read = RETURNED[form]
    step = filmed_loop().capture(lambda x: make(x.sum(), {"y": 2 * x}), mode="graph", outputs=outputs)
    results, values = [], []
    for i in range(10):
        result = step(torch.full((2,), float(i)))
        results.append(result)
        values.append([t.tolist() for t in read(result)])
    assert values == [[2.0 * i, [2.0 * i] * 2] for i in range(10)]
    assert type(results[-1]) is type(results[0])
    assert step.replays == 7
    if outputs == "clone":
        assert [read(r)[0].item() for r in results] == [2.0 * i for i in range(10)]
    # what is done to one result is not done to the next
    with_note = results[-1][0] if isinstance(results[-1], list) else results[-1]
    if isinstance(with_note, Output):
        with_note.note = "changed"
        again = step(torch.ones(2))
        assert (again[0] if isinstance(again, list) else again).note == "kept"


def test_what_is_returned_keeps_no_graph_of_autograd():
    entry = Entry(None)
    w = torch.ones(1, requires_grad=True)
    node = weakref.ref(w)
    entry.keep(Output((2 * w).sum(), {}), [])
    del w
    gc.collect()
    assert node() is None
    assert entry.around([torch.tensor(3.0), "kept"]).loss.item() == 3.0


def test_an_object_returned_that_is_not_looked_into(filmed_loop, capsys):
    step = filmed_loop().capture(
        lambda x: types.SimpleNamespace(deep=types.SimpleNamespace(y=2 * x)), mode="graph"
    )
    results = [step(torch.full((1,), float(i))) for i in range(8)]
    assert [r.deep.y.item() for r in results] == [2.0 * i for i in range(8)]
    assert "returns an object of type SimpleNamespace" in capsys.readouterr().err


def test_an_argument_that_is_returned(filmed_loop):
    step = filmed_loop().capture(lambda batch: batch, mode="graph")
    for i in range(8):
        out = step(Encoded({"x": torch.full((1,), float(i))}, [i]))
        assert (out["x"].item(), out[0]) == (float(i), i)


@pytest.mark.parametrize("by_key", [False, True])
def test_buckets_pad_what_lies_in_objects(filmed_loop, by_key):
    buckets = Buckets(dim=1, pad=(0, -100), lengths=(8, 16), mask="real")

    def plain(batch, real=None):
        hits = (batch["y"] != -100).sum(1)
        return batch["x"].sum(1) + 100 * hits + (0 if real is None else 1000 * real.sum())

    step = filmed_loop().capture(plain, mode="graph", buckets=buckets)
    for i in range(24):
        length = 3 + i % 11
        x = torch.full((2, length), float(i))
        batch = Encoded({"x": x, "y": x.long()}, [i])
        out = step(batch=batch) if by_key else step(batch)
        assert out.tolist() == [length * i + 1100.0 * length] * 2
        assert batch["x"] is x
    assert step.captures == 2


def test_settings_that_are_objects_count_where_they_are_changed_in_place(filmed_loop):
    chosen, user, kind = {"a"}, collections.UserDict(k=1.0), Ordered(k=1.0)

    def plain(x, chosen, user, kind):
        return x * len(chosen) * user["k"] * kind["k"]

    def given(i):
        if i == 8:
            chosen.add("b")
        user["k"], kind["k"] = 1.0 + (i >= 16), 1.0 + (i >= 24)
        return torch.ones(2), chosen, user, kind

    step = filmed_loop().capture(plain, mode="graph")
    follow(step, plain, given, calls=32)
    assert step.captures == 4


def test_a_list_of_one_tensor_is_not_that_tensor(filmed_loop):
    def plain(x):
        return x[0] * 2

    step = filmed_loop().capture(plain, mode="graph")
    follow(step, plain, lambda i: ([torch.arange(3.0) + i],))
    assert step.replays > 8
    assert torch.equal(step(torch.arange(3.0)), torch.tensor(0.0))
    follow(step, plain, lambda i: (Ordered({0: torch.arange(3.0) + i}),))
    assert torch.equal(step(torch.arange(3.0)), torch.tensor(0.0))


@pytest.mark.parametrize("zero", [0.0, 0j])
def test_zeros_of_either_sign_are_two_arguments(filmed_loop, zero):
    step = filmed_loop().capture(
        lambda x, k: x / torch.full((1,), k, dtype=torch.complex64).real, mode="graph"
    )
    for k in [zero] * 6 + [-zero] * 6 + [zero, -zero]:
        assert step(torch.ones(1), k).item() == math.copysign(math.inf, k.real)


class Taking(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, batch):
        return batch.x * self.w


def test_a_module_that_is_given_an_object_reads_it_in_each_call(filmed_loop):
    loop = filmed_loop()
    model, kept = loop.prepare(Taking()), Noted(torch.zeros(1))

    def plain(x):
        kept.x = x
        return model(kept)

    # it sets an attribute: only the module would be launched as one
    step = loop.capture(plain, mode="graph")
    assert [step(torch.full((1,), float(i))).item() for i in range(10)] == [float(i) for i in range(10)]
    assert "sets kept.x" in step.reason


def test_reads_are_noted_while_it_is_open_and_of_those_objects_alone():
    class Own(Noted):
        def __getattribute__(self, name):
            return super().__getattribute__(name)

    before = vars(Own)["__getattribute__"]
    one, other = Noted(torch.zeros(1)), Noted(torch.ones(1))
    own = Own(torch.ones(1))
    with noting([one, own]) as reads, noting([one]) as inner:
        assert one.row == [7]
        assert other.double.item() == 2.0
        assert own.x.item() == 1.0
        assert type(one) is Noted
    assert "row" in reads[0]
    assert "double" not in reads[0]
    assert inner[0] == reads[0]
    assert "x" in reads[1]
    assert one.double.item() == 0.0
    assert "double" not in reads[0]
    assert "__getattribute__" not in vars(Noted)
    assert vars(Own)["__getattribute__"] is before
    with pytest.raises(TypeError), noting([1]):
        pass


def test_a_structure_is_put_together_as_it_was_taken_apart():
    x, y, z = torch.ones(1), torch.ones(2), torch.ones(3)
    given = [x, Nested(Encoded({"x": y, "n": 3}), [Batch(x, z), "text"]), {"k": Ordered(z=z)}, 5]
    opened = Opened(given)
    assert [t for t in opened.leaves if isinstance(t, torch.Tensor)] == [x, y, x, z, z]
    assert opened.around(opened.leaves)[1] is given[1]
    doubled = opened.around([2 * t if isinstance(t, torch.Tensor) else t for t in opened.leaves])
    assert doubled[1].first.x.tolist() == [2.0, 2.0]
    assert doubled[1].rest[0].y.tolist() == [2.0] * 3
    assert doubled[1].rest[1] == "text"
    assert doubled[2]["k"]["z"].tolist() == [2.0] * 3
    assert given[1].first.x is y
    assert Opened(doubled).key == opened.key
    loose, within = opened.parted()
    assert [v for v in loose if not isinstance(v, torch.Tensor)] == [5]
    assert [v for v in within if not isinstance(v, torch.Tensor)] == [3, 1.0, "a", None, "text"]
