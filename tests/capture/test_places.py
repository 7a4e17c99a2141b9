"""Places that hold the same object as before, or do not."""

import operator
import types

from torch import nn

from hotloop.capture.places import Places, forward_names, registrations


def test_each_kind_of_place():
    table, thing, group, row = {"a": 1000.5}, types.SimpleNamespace(b="text"), {"x": 1, "y": None}, [1, 2]
    places = Places()
    places.add_key("a", table)
    places.add(operator.attrgetter("b"), thing)
    places.add_all(group)
    places.add_all(row)
    assert places.watch()()
    for change, back in (
        (lambda: table.update(a=2.5), lambda: table.update(a=1000.5)),
        (lambda: table.pop("a"), lambda: table.update(a=1.5)),
        (lambda: setattr(thing, "b", "other"), lambda: setattr(thing, "b", "text")),
        (lambda: group.update(x=7), lambda: group.update(x=1)),
        (lambda: group.update(z=7), lambda: group.pop("z")),
        (lambda: row.append(3), lambda: row.pop()),
        (lambda: row.__setitem__(1, 9), lambda: row.__setitem__(1, 2)),
    ):
        unchanged = places.watch()
        assert unchanged()
        change()
        assert not unchanged()
        back()


def test_a_place_that_is_not_there_is_never_the_same():
    places = Places()
    places.add_key("missing", {})
    assert not places.watch()()


def test_what_torchs_own_forwards_read():
    assert "eps" in forward_names(nn.LayerNorm)
    assert "in_features" not in forward_names(nn.Linear)
    # through a method that the forward calls
    assert "p" in forward_names(nn.Dropout)

    class Mine(nn.Linear):
        pass

    assert forward_names(Mine) is None


def test_parameters_and_modules_put_in_are_counted():
    before = registrations().count
    model = nn.Linear(2, 2)
    assert registrations().count == before + 2
    model.weight = nn.Parameter(model.weight.detach())
    assert registrations().count == before + 3
    model.inner = nn.Identity()
    assert registrations().count == before + 4
    model.weight = model.weight
    assert registrations().count == before + 5
