"""A loop whose state is kept as on an accelerator, on the CPU: the device path without a device."""

import pytest
import torch

import hotloop
from hotloop.loop import loop as loop_module
from hotloop.state import LossScale, ResidentState


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    monkeypatch.setenv("HOTLOOP_PROGRESS", "0")
    torch.set_num_threads(1)


@pytest.fixture
def make_loop(monkeypatch):
    """make_loop(kind, **settings): kind "host" or "resident"."""
    made = []

    def make(kind="host", *, scaled=False, **settings):
        settings.setdefault("record", False)
        with monkeypatch.context() as patch:
            if kind == "resident":
                patch.setattr(loop_module, "make_state", _resident(scaled))
            loop = hotloop.Loop(device="cpu", **settings)
        if scaled:
            loop._plain = False
        made.append(loop)
        return loop

    yield make
    for loop in made:
        loop._session.end("finished")


def _resident(scale):
    def make(device, nonfinite, *, scaled):
        return ResidentState(device, nonfinite, run_ahead=4, scale=LossScale(device) if scale else None)

    return make
