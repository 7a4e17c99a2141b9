"""The prefetch on a device that only writes down what it is told, and checks the order of it."""

import contextlib

import pytest
import torch

from hotloop.data.prefetch import find_lane, moved_steps, prefetched_steps
from hotloop.data.step import Step

DEVICE = torch.device("meta")


class Paper:
    """A lane that logs; copies "arrive" on the meta device, and using one before its event is an error."""

    def __init__(self):
        self.log = []
        self.on_side = False
        self.unfinished = {}
        self.events = 0

    @contextlib.contextmanager
    def side(self):
        self.on_side = True
        yield
        self.on_side = False

    def record(self):
        self.events += 1
        for copied in self.unfinished.values():
            copied[1] = copied[1] or self.events
        return self.events

    def wait(self, event):
        assert not self.on_side
        for key in [key for key, copied in self.unfinished.items() if copied[1] == event]:
            del self.unfinished[key]
        self.log.append(("wait", event))

    def keep(self, value):
        assert id(value) not in self.unfinished
        self.log.append(("keep", id(value)))

    def copy(self, tensor):
        assert self.on_side
        copied = tensor.to(DEVICE)
        self.unfinished[id(copied)] = [copied, None]
        self.log.append(("copy", tensor[0].item()))
        return copied


class Markable:
    def __init__(self, x):
        self.x = x

    def to(self, device, non_blocking):
        assert non_blocking
        return Markable(self.x.to(device))

    def record_stream(self, stream):
        pass


class Opaque:
    def __init__(self, x):
        self.x = x

    def to(self, device):
        return Opaque(self.x.to(device))


def steps(batches):
    for number, batch in enumerate(batches):
        yield Step(None, number, 1, 1, None, number + 1, number + 1, number + 1, batch=batch)


def numbered(count):
    return [torch.full((2,), float(i)) for i in range(count)]


@pytest.mark.parametrize("depth", [0, 1, 2, 5])
def test_copies_are_queued_ahead_and_handed_over_in_order(depth):
    lane = Paper()
    for number, step in enumerate(prefetched_steps(steps(numbered(6)), DEVICE, depth, lane)):
        assert step.ordinal == number
        assert step.batch.device == DEVICE
        assert id(step.batch) not in lane.unfinished
        copied = [what[1] for what in lane.log if what[0] == "copy"]
        assert copied == list(range(min(number + 1 + depth, 6)))
        assert lane.log[-1] == ("keep", id(step.batch))
    assert number == 5
    assert not lane.unfinished


def test_every_tensor_of_a_structure_is_marked_as_used():
    lane = Paper()
    batch = {"a": torch.ones(2), "b": [torch.zeros(2), ("text", torch.ones(3))], "c": 4}
    (step,) = prefetched_steps(steps([batch]), DEVICE, 2, lane)
    kept = [what[1] for what in lane.log if what[0] == "keep"]
    assert kept == [id(step.batch["a"]), id(step.batch["b"][0]), id(step.batch["b"][1][1])]
    assert step.batch["b"][1][0] == "text"


def test_batches_that_are_there_pass_through_untouched():
    lane = Paper()
    batches = [[torch.ones(2, device="meta")], "text", None]
    for step, batch in zip(prefetched_steps(steps(batches), DEVICE, 2, lane), batches, strict=True):
        assert step.batch is batch
    assert lane.log == []
    assert lane.events == 0


def test_objects_are_moved_where_their_memory_can_be_kept_safe():
    lane = Paper()
    batches = [{"m": Markable(torch.ones(1)), "o": Opaque(torch.ones(1)), "x": torch.ones(1)}]
    (step,) = prefetched_steps(steps(batches), DEVICE, 1, lane)
    assert step.batch["m"].x.device == step.batch["o"].x.device == step.batch["x"].device == DEVICE
    kept = [what[1] for what in lane.log if what[0] == "keep"]
    assert kept == [id(step.batch["m"]), id(step.batch["x"])]


def test_an_error_comes_in_its_turn():
    def failing():
        yield from steps(numbered(2))
        raise OSError("later")

    seen = []
    with pytest.raises(OSError, match="later"):
        for step in prefetched_steps(failing(), DEVICE, 5, Paper()):
            seen.append(step.ordinal)
    assert seen == [0, 1]


def test_devices_without_streams_are_moved_to_plainly(load):
    assert find_lane(torch.device("cpu")) is None
    assert find_lane(torch.device("mps")) is None
    moved = [step.batch for step in moved_steps(steps([*numbered(2), None]), DEVICE)]
    assert [batch.device if batch is not None else None for batch in moved] == [DEVICE, DEVICE, None]


def test_a_loader_through_a_lane_keeps_its_position_while_it_reads_ahead(monkeypatch):
    from torch.utils.data import DataLoader, TensorDataset

    from hotloop.data import Loader
    from hotloop.hardware import Processes

    monkeypatch.setattr("hotloop.data.loader.find_lane", lambda device, **_: Paper())
    y = torch.arange(20)

    def make():
        source = DataLoader(TensorDataset(y), batch_size=3, shuffle=True)
        return Loader(source, device=DEVICE, processes=Processes(), prefetch=2)

    torch.manual_seed(6)
    loader, order = make(), []
    for _ in loader:
        order.append((loader.indices_of(loader.handed_out), loader.at_last))
    assert [last for _, last in order] == [False] * 6 + [True]
    torch.manual_seed(6)
    loader = make()
    it = iter(loader)
    for _ in range(3):
        next(it)
    state = loader.state_dict()
    assert state["batches"] == 3
    again = make()
    again.load_state_dict(state)
    rest = [again.indices_of(again.handed_out) for _ in again]
    assert rest == [indices for indices, _ in order[3:]]
