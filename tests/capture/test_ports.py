"""Copies recorded into the graph, whose outer ends are set before each replay, on stand-ins for graph and driver."""

import ctypes
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from tests.capture.conftest import PortedRecorder
from torch import nn

import hotloop
from hotloop.capture import ports as ports_module
from hotloop.capture.ports import PortError, Ports
from hotloop.errors import NonFiniteError


def run_steps(loop, count, *, outputs="clone", poison=None, optimizers=1, cyclic=3, mode="graph"):
    """(captured step, losses, weights) of `count` steps over inputs that come again."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    parts = [model.parameters()] if optimizers == 1 else [model[0].parameters(), model[2].parameters()]
    made = [torch.optim.SGD(part, lr=0.05, momentum=0.9, fused=True) for part in parts]
    model, *made = loop.prepare(model, *made)
    batches = [(torch.randn(6, 4), torch.randn(6, 1)) for _ in range(cyclic)]

    @loop.capture(mode=mode, outputs=outputs)
    def train(x, y):
        loss = F.mse_loss(model(x), y)
        loop.backward(loss)
        for optimizer in made:
            optimizer.step()
        for optimizer in made:
            optimizer.zero_grad()
        return loss

    losses = []
    for number in range(count):
        x, y = batches[number % cyclic]
        if number == poison:
            x = x * float("nan")
        # memory of its own for each call, given back at once
        losses.append(train(x.clone(), y.clone()).item())
    return train, losses, [p.detach().clone() for p in model.parameters()]


def test_steps_read_their_inputs_where_they_lie(ported_loop, monkeypatch):
    train, losses, weights = run_steps(ported_loop(), 12)
    assert (train.captures, train.replays) == (1, 9)
    assert train._recorder.told == 9 * 3  # two inputs, one row of counters
    monkeypatch.setattr(PortedRecorder, "ports", False)
    plain, wanted, right = run_steps(ported_loop(), 12)
    assert (plain.replays, plain._recorder.told) == (9, 0)
    assert losses == wanted
    assert all(torch.equal(a, b) for a, b in zip(weights, right, strict=True))


def test_no_copy_is_made_beside_the_recording(ported_loop, monkeypatch):
    loop = ported_loop()
    train, _, _ = run_steps(loop, 6)
    (entry,) = train._usual.values()
    copies = []
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, *_, **__: copies.append(self))
    with monkeypatch.context() as patch:
        patch.setattr(entry.recording, "replay", lambda: None)
        train(torch.randn(6, 4), torch.randn(6, 1))
    assert copies == []


@pytest.mark.parametrize("optimizers", [1, 2])
def test_the_update_that_was_bad_is_named_and_the_weights_are_those_before_it(ported_loop, optimizers):
    loop = ported_loop()
    with pytest.raises(NonFiniteError) as caught:
        run_steps(loop, 40, poison=9, optimizers=optimizers)
    with pytest.raises(NonFiniteError) as wanted:
        run_steps(hotloop.Loop(device="cpu", record=False), 40, poison=9, optimizers=optimizers, mode="off")
    assert caught.value.step == wanted.value.step * optimizers == 9 * optimizers
    loop._state.load(0, 0)


def test_skipped_updates_are_counted(ported_loop):
    loop = ported_loop(nonfinite="skip")
    _, _, weights = run_steps(loop, 30, poison=9)
    assert loop.skipped == 1
    plain = hotloop.Loop(device="cpu", record=False, nonfinite="skip")
    _, _, right = run_steps(plain, 30, poison=9, mode="off")
    assert plain.skipped == 1
    for a, b in zip(weights, right, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("optimizers", [1, 2])
def test_no_row_is_written_that_the_host_has_yet_to_read(ported_loop, optimizers):
    loop = ported_loop()
    pace, written, read = loop._state._pace, {}, []
    hear, address = pace._hear, pace.address

    def noted_hear(mark):
        read.append(mark)
        hear(mark)
        assert written.get(pace._addresses[mark % len(pace._addresses)], mark) == mark

    def noted_address(ahead):
        found = address(ahead)
        assert written.get(found, -1) <= max(read, default=-1)
        written[found] = pace._marks + ahead
        return found

    pace._hear, pace.address = noted_hear, noted_address
    run_steps(loop, 30, optimizers=optimizers)
    assert len(read) == 30 * optimizers - len(pace._events)
    assert len(written) == len(pace._addresses)


def test_a_driver_that_refuses_has_the_step_recorded_without_ports(ported_loop, capsys):
    loop = ported_loop()
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=True)
    model, optimizer = loop.prepare(model, optimizer)

    @loop.capture(mode="graph")
    def train(x):
        loss = model(x).square().mean()
        loop.backward(loss)
        loop.update(optimizer)
        return loss

    torch.manual_seed(0)
    twin = nn.Linear(4, 1)
    other = torch.optim.SGD(twin.parameters(), lr=0.05)
    for number in range(12):
        x = torch.full((3, 4), 0.1 * number)
        train._recorder.broken = number >= 7
        loss = twin(x).square().mean()
        loss.backward()
        other.step()
        other.zero_grad()
        torch.testing.assert_close(train(x), loss.detach())
    assert (train.captures, train.replays, train.reason) == (2, 9, None)
    assert loop.updates == 12
    assert capsys.readouterr().err.count("copy nothing in and out") == 1
    torch.testing.assert_close(model.weight, twin.weight)


def test_a_driver_that_refuses_the_first_launch_leaves_no_gradients_to_add_to(ported_loop):
    loop = ported_loop()
    model = nn.Linear(2, 1, bias=False)
    model, _ = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, fused=True))

    @loop.capture(mode="graph")
    def train(x):
        loss = model(x).sum()
        loss.backward()
        return loss

    for number in range(1, 10):
        train._recorder.broken = number == 4
        train(torch.full((1, 2), float(number)))
        assert model.weight.grad.tolist() == [[float(number)] * 2]
        model.weight.grad = None
    assert (train.captures, train.replays, train.reason) == (2, 5, None)


@pytest.mark.parametrize("end", ["src", "dst"])
def test_a_copy_that_is_not_found_has_the_step_recorded_without_ports(ported_loop, monkeypatch, end, capsys):
    make = PortedRecorder.__init__

    def lacking(self, host):
        make(self, host)
        self.lacks = end

    _, wanted, right = run_steps(ported_loop(), 12)
    monkeypatch.setattr(PortedRecorder, "__init__", lacking)
    train, losses, weights = run_steps(ported_loop(), 12)
    assert (losses, train.replays, train._recorder.told) == (wanted, 9, 0)
    assert all(torch.equal(a, b) for a, b in zip(weights, right, strict=True))
    assert "copy nothing in and out" in capsys.readouterr().err


def test_what_is_no_stretch_of_device_memory_is_copied_beside(ported_loop, monkeypatch):
    monkeypatch.setattr("hotloop.capture.entry.can_be_port", lambda outside, inside: outside.dim() == 2)
    loop = ported_loop()
    step = loop.capture(lambda x, scale: (x * scale).sum(), mode="graph")
    for number in range(6):
        found = step(torch.full((2, 2), float(number)), torch.tensor(2.0 + number))
        assert found.item() == 4 * number * (2.0 + number)
    assert step.replays == 3
    assert step._recorder.told == 3


def test_a_recording_s_own_input_may_be_given_back(ported_loop):
    loop = ported_loop()
    step = loop.capture(lambda x, y: (x.mul_(2), x + y)[1], mode="graph")
    x, y = torch.ones(2), torch.ones(2)
    for _ in range(5):
        step(x.clone(), y)
    (entry,) = step._usual.values()
    own, told = entry.inputs[0], step._recorder.told
    own.fill_(3.0)
    assert step(own, y).tolist() == [7.0, 7.0]
    assert step._recorder.told == told + 2
    ends = {place: address for place, address in entry.recording.ends.items() if place == own.data_ptr()}
    assert ends
    assert own.data_ptr() not in ends.values()


def test_replays_are_compared_with_the_plain_step(ported_loop):
    loop = ported_loop()
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=True)
    model, optimizer = loop.prepare(model, optimizer)

    @loop.capture(mode="graph", check_every=2)
    def train(x):
        loss = model(x).square().mean()
        loop.backward(loss)
        loop.update(optimizer)
        return loss

    for number in range(11):
        train(torch.full((3, 4), 0.1 * number))
    assert (train.checks, train.reason, loop.updates) == (4, None, 11)


# ---------------------------------------------------------------------------------------- the driver's side


def test_the_driver_s_structure_has_the_driver_s_layout():
    """Sizes and offsets of CUDA_MEMCPY3D on a 64-bit machine, from cuda.h."""
    copy = ports_module._Copy
    assert ctypes.sizeof(copy) == 200
    offsets = {
        "src_type": 32,
        "src_host": 40,
        "src_device": 48,
        "src_pitch": 72,
        "dst_x": 88,
        "dst_type": 120,
    }
    offsets |= {"dst_host": 128, "dst_device": 136, "width": 176, "height": 184, "depth": 192}
    assert {name: getattr(copy, name).offset for name in offsets} == offsets


class Driver:
    """A driver that knows a graph's nodes, as (type, parameters or None), and remembers what was set."""

    def __init__(self, nodes):
        self.nodes, self.set, self.code = nodes, [], 0

    def cuCtxGetCurrent(self, context):
        context._obj.value = 77
        return 0

    def cuGraphGetNodes(self, graph, found, count):
        assert graph.value == 11
        if found is not None:
            found[:] = range(1, 1 + len(self.nodes))
        count._obj.value = len(self.nodes)
        return 0

    def cuGraphNodeGetType(self, node, kind):
        kind._obj.value = self.nodes[node.value - 1][0]
        return 0

    def cuGraphMemcpyNodeGetParams(self, node, copy):
        for name, value in self.nodes[node.value - 1][1].items():
            setattr(copy._obj, name, value)
        return 0

    def cuGraphExecMemcpyNodeSetParams(self, execution, node, copy, context):
        copy = copy._obj
        self.set.append(
            (execution.value, node.value, copy.address("src"), copy.address("dst"), context.value)
        )
        return self.code


def copy_of(source, target, **other):
    """Parameters of a copy on the device, as the driver tells them."""
    size = source.numel() * source.element_size()
    given = {"src_type": 2, "src_device": source.data_ptr(), "dst_type": 2, "dst_device": target.data_ptr()}
    return 1, given | {"width": size, "height": 1, "depth": 1} | other


@pytest.fixture
def driver(monkeypatch):
    def make(*nodes):
        found = Driver(nodes)
        monkeypatch.setattr(ports_module, "_driver", lambda: found)
        graph = SimpleNamespace(raw_cuda_graph=lambda: 11, raw_cuda_graph_exec=lambda: 22)
        return found, Ports(graph)

    return make


def test_the_end_of_the_right_copy_is_set(driver):
    a, b, c = (torch.zeros(4) for _ in range(3))
    host = {"dst_type": 1, "dst_device": 0, "dst_host": c.data_ptr()}
    found, ports = driver((0, None), copy_of(a, b), copy_of(b, c, **host), copy_of(a[:2], b))
    ports.of(a, b, "src")(1000)
    ports.of(b, c, "dst")(2000)
    ports.of(a[:2], b, "src")(3000)
    assert found.set == [
        (22, 2, 1000, b.data_ptr(), 77),
        (22, 3, b.data_ptr(), 2000, 77),
        (22, 4, 3000, b.data_ptr(), 77),
    ]
    port = ports.of(b, c, "dst")
    port(2000)
    port(2000)
    assert len(found.set) == 4  # where it leads already, it is left
    found.code = 1
    for _ in range(2):
        with pytest.raises(PortError, match="error 1"):
            port(4000)


def test_what_is_not_one_copy_is_no_port(driver):
    a, b = torch.zeros(4), torch.zeros(4)
    _, ports = driver(copy_of(a, b), copy_of(a, b), copy_of(b, a, height=2))
    with pytest.raises(PortError, match="2 recorded copies"):
        ports.of(a, b, "src")
    with pytest.raises(PortError, match="0 recorded copies"):
        ports.of(b, a, "src")
    with pytest.raises(PortError, match="0 recorded copies"):
        ports.of(a[:3], b, "src")


def test_there_are_no_ports_without_a_device():
    assert not ports_module.ports_work(torch.device("cpu"))
    assert not ports_module.can_be_port(torch.zeros(2), torch.zeros(2))
