"""Arguments and results that are one memory, and tensors that are more than their memory, with ports and without."""

from contextlib import nullcontext

import pytest
import torch
from tests.capture.conftest import PortedRecorder
from torch import nn
from torch.utils._pytree import tree_map

from hotloop.capture import ports as ports_module


@pytest.fixture(params=[True, False], ids=["ports", "copies"])
def either_loop(ported_loop, monkeypatch, request):
    """A loop whose recordings have ports, and one whose have none; what can be one is decided as on a device."""
    monkeypatch.setattr(PortedRecorder, "ports", request.param)
    monkeypatch.setattr(ports_module, "_DEVICES", ("cpu",))
    monkeypatch.setattr("hotloop.capture.entry.can_be_port", ports_module.can_be_port)
    return ported_loop


def test_results_that_are_the_inputs_may_be_given_back_in_each_other_s_place(either_loop):
    step = either_loop().capture(lambda x, y: (y, x), mode="graph", outputs="static")
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    for number in range(8):
        a, b = step(a, b)
        assert (a.tolist(), b.tolist()) == (([3.0, 4.0], [1.0, 2.0]), ([1.0, 2.0], [3.0, 4.0]))[number % 2]
    assert step.replays == 5


def test_a_part_of_a_result_that_is_an_input_may_be_given_back(either_loop):
    step = either_loop().capture(lambda x, y: (x, y + 0), mode="graph", outputs="static")
    part = torch.zeros(2)
    for number in range(8):
        wanted = part.tolist()
        held, found = step(torch.arange(4.0) + number, part)
        assert found.tolist() == wanted
        part = held[1:3]
        assert part.tolist() == [1.0 + number, 2.0 + number]
    assert step.replays == 5


def test_an_argument_that_the_step_writes_is_written(either_loop):
    step = either_loop().capture(lambda x, y: (x.mul_(2), x + y)[1], mode="graph")
    for number in range(8):
        x, y = torch.full((2,), float(number)), torch.ones(2)
        assert step(x, y).tolist() == [2.0 * number + 1] * 2
        assert (x.tolist(), y.tolist()) == ([2.0 * number] * 2, [1.0] * 2)
    assert step.replays == 5


def test_an_argument_that_the_step_writes_is_compared_too(either_loop):
    step = either_loop().capture(lambda x, y: (x.mul_(2), x + y)[1], mode="graph", check_every=2)
    for number in range(1, 10):
        x = torch.full((2,), float(number))
        assert step(x, torch.ones(2)).tolist() == [2.0 * number + 1] * 2
        assert x.tolist() == [2.0 * number] * 2
    assert (step.replays, step.checks, step.reason) == (6, 3, None)


@pytest.mark.parametrize("first", [0, 6], ids=["from the first call", "later"])
def test_a_step_that_writes_what_it_is_given_twice_runs_eagerly_then(either_loop, first):
    step = either_loop().capture(lambda x, y: (x.mul_(2), x + y)[1], mode="graph")
    for number in range(9):
        x, y = torch.ones(3)[1:], torch.ones(2)
        if number >= first:
            y = x if number % 2 else x.view(1, 2)[0]
        assert step(x, y).tolist() == ([4.0] * 2 if number >= first else [3.0] * 2)
        assert x.tolist() == [2.0] * 2
    assert step.replays == (3 if first else 0)


def test_gradients_of_a_recording_that_is_given_up_are_none_to_add_to(either_loop):
    loop = either_loop()
    model = loop.prepare(nn.Linear(2, 1, bias=False))

    @loop.capture(mode="graph")
    def train(x, y):
        loss = model(x.mul_(2)).sum() + 0 * y.sum()
        loss.backward()
        return loss

    for number in range(1, 8):
        x = torch.full((1, 2), float(number))
        train(x, x.view(2))
        assert model.weight.grad.tolist() == [[2.0 * number] * 2]
        model.weight.grad = None
    assert train.replays == 0


def test_numbers_that_are_to_be_conjugated_or_negated_are_read_so(either_loop):
    step = either_loop().capture(lambda x: x * 2, mode="graph")
    for number in range(12):
        x = torch.complex(torch.ones(2), torch.ones(2))
        assert (
            step(x.conj() if number % 4 == 3 else x).tolist() == [2 - 2j if number % 4 == 3 else 2 + 2j] * 2
        )
        x = torch.ones(2)
        assert (
            step(torch._neg_view(x) if number % 4 == 3 else x).tolist()
            == [-2.0 if number % 4 == 3 else 2.0] * 2
        )
    assert step.replays > 0


class Wrapped(torch.Tensor):
    """A tensor that has no memory of its own."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        args = tree_map(lambda value: value.inner if isinstance(value, cls) else value, args)
        return function(*args, **(kwargs or {}))


def test_a_tensor_of_a_type_of_its_own_is_no_port(either_loop):
    step = either_loop().capture(lambda x: x * 2, mode="graph")
    for number in range(10):
        x = torch.full((2,), float(number))
        assert step(Wrapped(x) if number > 4 else x).tolist() == [2.0 * number] * 2
    assert step.replays >= 2


def test_a_sparse_argument_has_the_step_run_eagerly(either_loop, capsys):
    step = either_loop().capture(lambda x: (x * 2).to_dense(), mode="graph")
    for number in range(6):
        assert torch.equal(step((torch.eye(3) * number).to_sparse()), torch.eye(3) * 2 * number)
    assert step.replays == 0
    assert capsys.readouterr().err.count("layout torch.sparse_coo") == 1


def test_an_error_of_the_step_while_it_is_recorded_leaves_gradients_as_they_were(either_loop, monkeypatch):
    loop = either_loop()
    model = nn.Linear(2, 1, bias=False)
    model, _ = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, fused=True))

    @loop.capture(mode="graph")
    def train(x):
        loss = model(x).sum()
        loss.backward()
        return loss

    def fail(self, work, *rest):
        work()
        raise KeyError("a label that is not known")

    for number in range(8):
        with monkeypatch.context() as patch:
            patch.setattr(PortedRecorder, "record", fail if number == 3 else PortedRecorder.record)
            with pytest.raises(KeyError) if number == 3 else nullcontext():
                train(torch.full((1, 2), float(number)))
        if number == 3:
            assert model.weight.grad is None
            continue
        assert model.weight.grad.tolist() == [[number, number]]
        model.weight.grad = None
    assert (train.captures, train.replays, train.reason) == (1, 4, None)


def test_arguments_that_the_step_cannot_take_keep_no_others_from_being_replayed(either_loop):
    loop = either_loop()
    model = loop.prepare(nn.Linear(2, 1))
    step = loop.capture(lambda x: model(x).detach(), mode="graph")
    for _ in range(8):
        x = torch.randn(3, 2)
        torch.testing.assert_close(step(x), model(x).detach())
        with pytest.raises(RuntimeError, match="same dtype"):
            step(x.double())
    assert (step.captures, step.replays, step.reason) == (1, 5, None)


def test_micro_batches_add_to_gradients_as_they_do_eagerly(either_loop):
    loop = either_loop(accumulation=2)
    torch.manual_seed(0)
    model, twin = nn.Linear(3, 1), nn.Linear(3, 1)
    twin.load_state_dict(model.state_dict())
    model, optimizer = loop.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    )
    other = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)

    @loop.capture(mode="graph")
    def train(x):
        loss = model(x).square().mean()
        loop.backward(loss)
        loop.update(optimizer)
        return loss

    for number in range(16):
        x = torch.randn(4, 3)
        loss = twin(x).square().mean()
        (loss / 2).backward()
        torch.testing.assert_close(train(x), loss.detach())
        if number % 2:
            other.step()
            other.zero_grad()
    torch.testing.assert_close(model.weight, twin.weight)
    assert train.captures == 2
    assert train.replays >= 8
