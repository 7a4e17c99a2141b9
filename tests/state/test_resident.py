"""The step's state as an accelerator has it, here on the CPU: flags, counters, and the host's bounded lead."""

import ctypes

import pytest
import torch

from hotloop.state import LossScale, Pace, ResidentState, ScheduleTable, Verdict

CPU = torch.device("cpu")
BAD, GOOD = torch.tensor(float("nan")), torch.tensor(1.0)


def update(state, verdict, loss=GOOD, gradient=1.0, factor=1.0):
    """One update; returns the gradients as they are after it."""
    gradients = [torch.full((3,), gradient), torch.full((2,), gradient)]
    state.note_loss(loss)
    state.judge(verdict, gradients, factor)
    state.close_losses()
    state.keep_pace(state.count(verdict), verdict)
    return gradients


def test_stop_is_sticky_and_names_the_first():
    state = ResidentState(CPU, "stop", run_ahead=3)
    verdict = state.new_verdict()
    for i in range(4):
        update(state, verdict, BAD if i == 1 else GOOD)
        assert verdict.refuse.item() == float(i >= 1)
    assert state.new_verdict() is verdict  # one that stops, stops all optimizers
    assert state.first_bad() == 1


def test_skip_forgets_with_the_next_update():
    state = ResidentState(CPU, "skip", run_ahead=3)
    one, other = state.new_verdict(), state.new_verdict()
    assert one is not other
    for i in range(5):
        update(state, one, gradient=float("inf") if i in (1, 2) else 1.0)
        update(state, other)
        assert one.refuse.item() == float(i in (1, 2))
        assert other.refuse.item() == 0.0
    assert state.read() == (2, 2)
    assert (one.heard, other.heard) == (2, 0)


def test_ignore_refuses_nothing():
    state = ResidentState(CPU, "ignore")
    verdict = state.new_verdict()
    gradients = update(state, verdict, BAD, factor=0.5)
    assert verdict.refuse.item() == 0.0
    assert all((g == 0.5).all() for g in gradients)


@pytest.mark.parametrize("factor", [1.0, 0.25, torch.tensor(0.25, dtype=torch.float64)])
def test_gradients_are_multiplied_by_the_factor_once(factor):
    state = ResidentState(CPU, "stop")
    gradients = update(state, state.new_verdict(), factor=factor)
    assert all((g == float(factor)).all() for g in gradients)


def test_the_host_hears_of_each_update_in_turn_and_late_by_the_depth():
    state = ResidentState(CPU, "skip", run_ahead=4)
    verdict = state.new_verdict()
    heard = []
    for i in range(10):
        update(state, verdict, BAD if i % 2 else GOOD)
        heard.append((state.seen().updates, state.seen().refused))
    # nothing at all of the first four; then of update i - 4 when update i is issued
    assert heard == [(0, 0)] * 4 + [(i, i // 2) for i in range(1, 7)]
    assert state.read() == (5, 5)


def test_counters_of_a_checkpoint_are_taken_up_and_a_stop_lifted():
    state = ResidentState(CPU, "skip")
    state.load(7, 7)
    assert state.read() == (7, 7)
    update(state, state.new_verdict(), BAD)
    assert state.read() == (8, 8)

    state = ResidentState(CPU, "stop", run_ahead=2)
    verdict = state.new_verdict()
    update(state, verdict, BAD)
    state.load(0, 0)
    assert verdict.refuse.item() == 0.0
    assert state.first_bad() is None
    update(state, verdict)
    assert verdict.refuse.item() == 0.0
    assert not state.seen().bad


def test_wishes_of_ranks_stay_until_heard():
    state = ResidentState(CPU, "stop", run_ahead=2)
    verdict = state.new_verdict()

    def step(stop, save):
        state.judge(verdict, [torch.ones(1)], 1.0)
        wishes = torch.tensor([stop, save], dtype=torch.float64)
        state.keep_pace(state.count(verdict, wishes), verdict)
        return state.seen().stop, state.seen().saves

    said = [step(*wish) for wish in [(0, 0), (1, 1), (0, 0), (0, 0), (0, 1), (0, 0), (0, 0)]]
    assert said == [(False, 0), (False, 0), (False, 0), (True, 1), (True, 1), (True, 1), (True, 2)]


def test_pace_counts_refusals_from_the_first_row():
    pace = Pace(CPU, 3)
    verdict = Verdict(CPU)
    for value in (0.0, 0.0, 1.0, 1.0):
        pace.mark(torch.tensor(value), verdict)
    assert [known[1][0] for known in pace.drain()] == [0.0, 1.0, 1.0]
    assert pace.since_nonzero == 2
    pace.restart([3.0, 0.0, 0.0, 0.0])
    assert pace.known == (0, [3.0, 0.0, 0.0, 0.0])
    assert list(pace.drain()) == []


class Event:
    """Stands for the end of an update's work on the device."""

    def __init__(self, pace):
        self.pace, self.asked, self.waited, self.work = pace, 0, 0, None

    def record(self):
        pass

    def query(self):
        self.asked += 1
        return self.work is None

    def synchronize(self):
        self.waited += 1
        self.work()


def write(address, value):
    ctypes.c_float.from_address(address).value = value


@pytest.mark.parametrize("whole", [False, True])
def test_a_row_that_a_recording_writes_tells_that_it_has_come(whole):
    pace = Pace(CPU, 2)
    events = pace._events = [Event(pace), Event(pace)]
    written = []
    for value in (0.0, 0.0, 1.0, 1.0):
        address = pace.address(0)
        assert address not in written
        written.append(address)
        write(address, value)
        pace.mark(None, None, tells=not whole)
    assert pace.known == (2, [0.0] * 4)
    # of a row of several numbers one may have come before the others
    assert sum(event.asked for event in events) == (2 if whole else 0)
    assert [known[1][0] for known in pace.drain()] == [1.0, 1.0]


def test_a_row_that_has_not_come_is_waited_for():
    pace = Pace(CPU, 2)
    first, second = pace._events = [Event(pace), Event(pace)]
    address = pace.address(0)
    first.work = lambda: write(address, 1.0)
    pace.mark(None, None, tells=True)
    write(pace.address(0), 1.0)
    pace.mark(None, None, tells=True)
    assert (first.waited, pace.known[0]) == (0, 0)
    write(pace.address(0), 1.0)
    pace.mark(None, None, tells=True)
    assert (first.waited, second.asked) == (1, 0)
    assert pace.known == (1, [1.0, 0.0, 0.0, 0.0])


def test_rows_written_for_several_updates_ahead_keep_apart():
    pace = Pace(CPU, 2)
    for step in range(12):
        rows = [pace.address(ahead) for ahead in range(3)]
        for number, row in enumerate(rows):
            write(row, float(3 * step + number))
        for _ in rows:
            pace.mark(None, None, tells=True)
            if pace.known[0]:
                assert pace.known[1][0] == pace.known[0] - 1
    assert pace.known[0] == 34


def scaled(nonfinite="stop", initial=8.0):
    return ResidentState(CPU, nonfinite, scale=LossScale(CPU, initial=initial, interval=3))


def test_an_overflow_lowers_the_scale_and_is_no_fault():
    state = scaled()
    verdict = state.new_verdict()
    for gradient, value in [(float("inf"), 4.0), (1.0, 4.0), (1.0, 4.0), (1.0, 8.0), (float("inf"), 4.0)]:
        gradients = update(state, verdict, gradient=gradient)
        assert verdict.refuse.item() == float(gradient == float("inf"))
        assert verdict.bad.item() == 0.0
        assert state.scale.value.item() == value
    del gradients
    assert state.read() == (2, 0)


def test_at_the_floor_an_overflow_is_a_fault_and_a_bad_loss_always_is():
    state = scaled("skip", initial=2.0)
    verdict = state.new_verdict()
    for wanted in (0.0, 1.0):
        update(state, verdict, gradient=float("inf"))
        assert (verdict.refuse.item(), verdict.bad.item()) == (1.0, wanted)
    update(state, verdict, BAD)
    assert (verdict.refuse.item(), verdict.bad.item()) == (1.0, 1.0)
    assert state.read() == (3, 2)


def test_gradients_of_several_optimizers_are_unscaled_by_the_scale_they_were_made_with():
    state = scaled("skip")
    one, other = state.new_verdict(), state.new_verdict()
    loss = state.scale.apply(torch.tensor(1.0))
    assert loss.item() == 8.0
    first, second = [torch.tensor([float("inf")])], [torch.tensor([8.0])]
    state.judge(one, first, 1.0)
    state.judge(other, second, 1.0)
    assert second[0].item() == 1.0
    assert (one.refuse.item(), other.refuse.item()) == (1.0, 0.0)
    # one of the two overflowed: the next loss is scaled by half as much
    assert state.scale.apply(torch.tensor(1.0)).item() == 4.0
    assert state.scale.state_dict() == {"scale": 4.0, "quiet": 0}


def test_scale_state_goes_and_comes_back():
    scale = LossScale(CPU, initial=16.0, interval=5)
    for overflow in (0.0, 0.0):
        scale.update(torch.tensor(overflow))
    other = LossScale(CPU, interval=5)
    other.load_state_dict(scale.state_dict())
    for _ in range(3):
        other.update(torch.tensor(0.0))
    assert other.value.item() == 32.0


def test_table_rows_advance_only_with_applied_updates():
    table = ScheduleTable(CPU, 2)
    table.extend([[float(i), 10.0 * i] for i in range(6)])
    table.put_in_force()
    views = [table.current[0], table.current[1]]
    seen = []
    for refuse in (None, torch.tensor(0.0), torch.tensor(1.0), torch.tensor(1.0), torch.tensor(0.0)):
        table.advance(refuse)
        seen.append(([v.item() for v in views], table.position()))
    assert seen == [([1, 10], 1), ([2, 20], 2), ([2, 20], 2), ([2, 20], 2), ([3, 30], 3)]


def test_table_grows_past_its_first_capacity():
    table = ScheduleTable(CPU, 1)
    count = 70_000
    for start in range(0, count, 10_000):
        table.extend([[float(start + i)] for i in range(10_000)])
    assert table.filled == count
    table._position.fill_(count - 2.0)
    table.advance(None)
    assert table.current.tolist() == [count - 1.0]
