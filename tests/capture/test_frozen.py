"""Numbers of the states that everything frozen was in."""

import pytest

from hotloop.capture.frozen import Frozen
from hotloop.errors import CaptureError


def make():
    value = 0.0

    def step(x):
        return x * value

    def put(new):
        nonlocal value
        value = new

    return Frozen(step, "step", list, list, list, []), put


def test_states_are_numbered_and_known_again():
    frozen, put = make()
    assert frozen.look() == 0
    assert frozen.look() == 0
    assert frozen.changed is None
    put(1.0)
    assert frozen.look() == 1
    assert frozen.changed == "value: 0.0 -> 1.0"
    put(0.0)
    assert frozen.look() == 0
    put(float("1.0"))
    assert frozen.look() == 1


def test_a_value_that_never_rests_is_an_error():
    frozen, put = make()
    frozen.look()
    with pytest.raises(CaptureError, match=r"value: .* changed in each of the last 4 calls"):
        for i in range(1, 9):
            put(float(i))
            frozen.look()


def test_a_value_that_rests_in_between_is_none():
    frozen, put = make()
    for i in range(20):
        put(float(i))
        assert frozen.look() == i
        assert frozen.look() == i
