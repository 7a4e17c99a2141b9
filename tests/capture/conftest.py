"""A recorder on the CPU that behaves as CUDA graphs do towards the host: the step's Python is not seen by replays."""

import pytest
import torch

import hotloop
from hotloop.loop import capturing
from hotloop.loop import loop as loop_module
from hotloop.state import ResidentState


class Rerun:
    """A recording that runs the function again on the same inputs, and writes into the same outputs."""

    def __init__(self, recorder, work, outputs, tape):
        self.recorder, self.work, self.outputs, self.tape = recorder, work, outputs, tape
        # a graph writes its gradients to the same memory at each replay
        self.gradients = [(p, p.grad) for u in recorder.updates() for p in u.parameters()]

    def replay(self):
        state, window = self.recorder.state, self.recorder.window
        resident = self.recorder.updates()
        marks, window_marks = [u.host_marks() for u in resident], window.marks()
        self.tape.clear()
        state.tape = window.tape = self.tape
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
            for old, new in zip(_tensors(self.outputs), _tensors(result), strict=True):
                old.copy_(new.detach())


def _tensors(structure):
    from hotloop.nested import tensors_of

    return [t.detach() for t in tensors_of(structure)]


class RerunRecorder:
    runs_while_recording = True

    def __init__(self, state, window, updates):
        self.state, self.window, self.updates = state, window, updates

    def warm(self, work):
        return work()

    def record(self, work):
        result = work()
        return Rerun(self, work, result, self.state.tape), result


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
    monkeypatch.setattr(
        loop_module, "find_mode", lambda chosen, device: "graph" if chosen == "auto" else chosen
    )

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
