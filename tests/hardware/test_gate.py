import os
import threading

import pytest

from hotloop.hardware.gate import RecordingGate


def test_nobody_passes_while_it_is_closed_and_everybody_after():
    gate = RecordingGate()
    with gate.passed() as free:
        assert free
    with gate.closed():
        with gate.closed(), gate.passed() as free:
            assert not free
        with gate.passed() as free:
            assert not free
    with gate.passed() as free:
        assert free


def test_an_error_inside_leaves_it_as_it_was():
    gate = RecordingGate()
    with pytest.raises(KeyError), gate.closed():
        raise KeyError
    with pytest.raises(KeyError), gate.passed() as free:
        assert free
        raise KeyError
    # whoever was inside has left: closing does not wait
    with gate.closed(), gate.passed() as free:
        assert not free


def test_closing_waits_for_all_that_are_inside():
    gate = RecordingGate()
    inside, leave, log = threading.Barrier(3), [threading.Event(), threading.Event()], []

    def pass_through(number):
        with gate.passed() as free:
            assert free
            inside.wait(60)
            leave[number].wait(60)
            log.append(number)

    def close():
        with gate.closed():
            log.append("closed")

    threads = [threading.Thread(target=pass_through, args=(n,)) for n in (0, 1)]
    for thread in threads:
        thread.start()
    inside.wait(60)
    closer = threading.Thread(target=close)
    closer.start()
    for number in (1, 0):
        leave[number].set()
        threads[number].join(60)
    closer.join(60)
    assert log == [1, 0, "closed"]


def test_an_interrupt_while_it_waits_leaves_it_open(monkeypatch):
    gate = RecordingGate()

    def interrupt():
        raise KeyboardInterrupt

    with gate.passed() as free:
        assert free
        monkeypatch.setattr(gate._changed, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt), gate.closed():
            raise AssertionError("somebody is inside")
    with gate.passed() as free:
        assert free


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_the_child_of_a_fork_begins_with_an_open_gate():
    from hotloop.hardware.gate import RECORDING_GATE

    with RECORDING_GATE.closed():
        child = os.fork()
        if child == 0:
            with RECORDING_GATE.passed() as free:
                os._exit(0 if free else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
