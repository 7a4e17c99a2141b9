"""A recorder on the CPU that behaves as CUDA graphs do towards the host: the step's Python is not seen by replays."""

import copy
import ctypes
import functools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hotloop
from hotloop.capture.ports import PortError
from hotloop.loop import capturing
from hotloop.loop import loop as loop_module
from hotloop.nested import tensors_of
from hotloop.state import ResidentState


class Rerun:
    """A recording that runs the function again on the same inputs, and writes into the same outputs."""

    def __init__(self, recorder, work, before, outputs, tape):
        self.recorder, self.work, self.outputs, self.tape = recorder, work, outputs, tape
        # a graph adds to the gradients that were there when it was recorded, whatever Python has there now
        self.before = before
        # a graph writes its gradients to the same memory at each replay
        self.gradients = [(p, p.grad) for u in recorder.updates() for p in u.parameters()]

    def replay(self):
        if self.tape is None:
            # a part of a step, that no effects of the loop and no gradients of parameters belong to
            self._write(self.work())
            return
        state, window = self.recorder.state, self.recorder.window
        resident = self.recorder.updates()
        marks, window_marks = [u.host_marks() for u in resident], window.marks()
        # the effects of the recording stay those that it was made with
        self.tape.clear()
        state.tape = window.tape = self.tape
        for p, grad in self.before:
            p.grad = grad
        try:
            result = self.work()
        finally:
            state.tape = window.tape = None
            state.close_losses()
            window.put_marks(window_marks)
            for updates, mark in zip(resident, marks, strict=True):
                updates.put_host_marks(mark)
        with torch.no_grad():
            for p, grad in self.gradients:
                if grad is not None and p.grad is not grad:
                    grad.copy_(p.grad)
        self._write(result)

    def _write(self, result):
        with torch.no_grad():
            for old, new in zip(_tensors(self.outputs), _tensors(result), strict=True):
                old.copy_(new.detach())


def _tensors(structure):
    return [t.detach() for t in tensors_of(structure)]


class RerunRecorder:
    """Attributes: bytes_each, what a recording holds; clock_ms, the device's clock; spent_ms, what a replay takes."""

    runs_while_recording = True
    ports = False

    def __init__(self, state, window, updates):
        self.state, self.window, self.updates = state, window, updates
        self.generators = []
        self.pool = []
        self.bytes_each = 100
        self.clock_ms = 0.0
        self.spent_ms = 1.0

    def warm(self, work):
        return work()

    def record(self, work, generators=(), feeds=None):
        self.generators = list(generators)
        before = [(p, p.grad) for u in self.updates() for p in u.parameters()]
        result = work()
        recording = Rerun(self, work, before, result, self.state.tape)
        self.pool.append(recording)
        return recording, result

    def apart(self):
        other = copy.copy(self)
        other.pool = []
        return other

    def pool_bytes(self):
        return self.bytes_each * len(self.pool)

    def drop_pool(self, recordings):
        self.pool = []

    def mark_time(self):
        self.clock_ms += self.spent_ms
        return self.clock_ms

    def elapsed_ms(self, start, end):
        return end - start


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    monkeypatch.setenv("HOTLOOP_PROGRESS", "0")
    torch.set_num_threads(1)


@pytest.fixture
def graph_loop(monkeypatch):
    """A loop on the CPU whose captured steps are recorded by `RerunRecorder`."""
    made = []

    def recorder(self):
        if self._recorder is None:
            self._recorder = RerunRecorder(self._state, self._window, lambda: self._preparer.updates)
        return self._recorder

    monkeypatch.setattr(capturing.LoopHost, "recorder", recorder)
    monkeypatch.setattr(capturing, "find_mode", lambda chosen, device: chosen)

    def make(**settings):
        settings.setdefault("record", False)
        with monkeypatch.context() as patch:
            patch.setattr(
                loop_module,
                "make_state",
                lambda device, nonfinite, *, scaled: ResidentState(device, nonfinite, run_ahead=4),
            )
            loop = hotloop.Loop(device="cpu", **settings)
        made.append(loop)
        return loop

    yield make
    for loop in made:
        loop._session.end("finished")


class Ported(Rerun):
    """A recording that reads its inputs, and writes counters, at addresses that it was told last."""

    def __init__(self, recorder, work, before, outputs, tape, feeds):
        super().__init__(recorder, work, before, outputs, tape)
        self.feeds = feeds
        self.effects, self.landings = list(tape), list(tape.landings)
        self.ends = {}

    def port(self, source, target, end):
        if self.recorder.lacks == end:
            raise PortError("no such copy")
        places = [place for _, place in self.feeds] + [landing.spare for landing in self.landings]
        (inner,) = [p.data_ptr() for p in places if p.data_ptr() == target.data_ptr()]

        def port(address):
            if self.recorder.broken:
                raise PortError("error 1 of the driver")
            self.recorder.told += 1
            self.ends[inner] = address

        return port

    def replay(self):
        for _, place in self.feeds:
            ctypes.memmove(
                place.data_ptr(), self.ends[place.data_ptr()], place.numel() * place.element_size()
            )
        # a graph makes neither its copies nor its effects anew
        self.tape.lands = False
        super().replay()
        self.tape[:] = self.effects
        for landing in self.landings:
            size = landing.counts.numel() * landing.counts.element_size()
            ctypes.memmove(self.ends[landing.spare.data_ptr()], landing.counts.data_ptr(), size)


class PortedRecorder(RerunRecorder):
    """Attributes: told, how often an end was set; broken, setting fails; lacks, ends of copies that are not found."""

    runs_while_recording = False
    ports = True

    def __init__(self, host):
        super().__init__(host._state, host._window, lambda: host._preparer.updates)
        self.host = host
        self.told, self.broken, self.lacks = 0, False, ""

    def record(self, work, generators=(), feeds=None):
        # recording computes nothing: what the stand-in does meanwhile is undone
        tensors = [t for m in self.host.modules() for t in m.state_dict(keep_vars=True).values()]
        tensors += self.host.state_tensors().values()
        before = [(p, p.grad) for u in self.updates() for p in u.parameters()]
        tensors += [gradient for _, gradient in before if gradient is not None]
        kept = [t.detach().clone() for t in tensors]
        result = work()
        with torch.no_grad():
            for tensor, value in zip(tensors, kept, strict=True):
                tensor.copy_(value)
        make = Rerun if feeds is None else functools.partial(Ported, feeds=feeds)
        recording = make(self, work, before, result, self.state.tape)
        self.pool.append(recording)
        return recording, result


@pytest.fixture
def ported_loop(graph_loop, monkeypatch):
    """A loop on the CPU whose recordings have ports."""

    def recorder(self):
        if self._recorder is None:
            self._recorder = PortedRecorder(self)
        return self._recorder

    monkeypatch.setattr(capturing.LoopHost, "recorder", recorder)
    monkeypatch.setattr("hotloop.capture.entry.can_be_port", lambda outside, inside: outside.numel() > 0)
    return graph_loop


class Operations(TorchDispatchMode):
    """Notes each operation with its arguments, and what the tensors that it writes held before."""

    def __init__(self):
        super().__init__()
        self.noted, self.before = [], {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        # batch norm writes its statistics without saying so
        if func._schema.is_mutable or "batch_norm" in func.name():
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, torch.Tensor) and id(leaf) not in self.before:
                    self.before[id(leaf)] = leaf, leaf.detach().clone()
        result = func(*args, **kwargs)
        args = tuple(list(a) if isinstance(a, list) else a for a in args)
        self.noted.append((func, args, kwargs, result))
        return result


class Film:
    """A recording that does the operations of one run again: what Python decided then, it repeats, as a graph does."""

    def __init__(self, noted):
        self.noted = noted

    def replay(self):
        with torch.no_grad():
            for func, args, kwargs, result in self.noted:
                if func.is_view or func is torch.ops.aten.detach.default:
                    continue
                again = func(*args, **kwargs)
                for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.detach().copy_(new)


class FilmRecorder(RerunRecorder):
    runs_while_recording = False

    def __init__(self):
        super().__init__(None, None, None)

    def record(self, work, generators=(), feeds=None):
        operations, streams = Operations(), [torch.default_generator, *generators]
        states = [stream.get_state() for stream in streams]
        try:
            with operations:
                result = work()
        finally:
            # recording computes nothing; of several views of one memory the first held what was there
            with torch.no_grad():
                for tensor, value in reversed(operations.before.values()):
                    tensor.detach().copy_(value)
            for stream, state in zip(streams, states, strict=True):
                stream.set_state(state)
        self.pool.append(film := Film(operations.noted))
        return film, result


@pytest.fixture
def filmed_loop(graph_loop, monkeypatch):
    """A loop on the CPU whose recordings are `Film`s."""

    def recorder(self):
        if self._recorder is None:
            self._recorder = FilmRecorder()
        return self._recorder

    monkeypatch.setattr(capturing.LoopHost, "recorder", recorder)
    return graph_loop
