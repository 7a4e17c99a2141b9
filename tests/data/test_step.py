import pytest

from hotloop.data.step import Ahead


def failing():
    yield 1
    yield 2
    raise OSError("third")


def test_reading_ahead_changes_nothing_but_the_time():
    ahead = Ahead(iter(range(5)))
    assert next(ahead) == 0
    ahead.fill(3)
    assert (ahead.held, ahead.read) == (3, 4)
    assert not ahead.ended()
    assert ahead.take_all() == [1, 2, 3, 4]
    assert list(ahead) == [1, 2, 3, 4]
    assert ahead.ended()
    assert list(ahead) == []
    assert ahead.read == 5


def test_errors_come_in_their_turn():
    ahead = Ahead(failing())
    ahead.fill(10)
    assert (ahead.held, ahead.read) == (2, 2)
    assert [next(ahead), next(ahead)] == [1, 2]
    assert not ahead.ended()
    with pytest.raises(OSError, match="third"):
        next(ahead)


def test_an_empty_source_has_ended():
    assert Ahead(iter(())).ended()


def test_the_end_that_was_read_ahead_holds_no_frames():
    ahead = Ahead(iter([1]))
    ahead.fill(3)
    (item, _), (_, end) = ahead._buffer
    assert item == 1
    assert isinstance(end, StopIteration)
    assert end.__traceback__ is None
    assert end.__context__ is None
