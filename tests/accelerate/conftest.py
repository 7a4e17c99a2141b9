from __future__ import annotations

from collections.abc import Iterator

import pytest

from hotloop.accelerate.state import AcceleratorState, GradientState, PartialState


@pytest.fixture(autouse=True)
def fresh_states(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test finds the shared states as a new process would, on the CPU."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    for kind in (AcceleratorState, PartialState, GradientState):
        kind._reset_state()
    yield
    for kind in (AcceleratorState, PartialState, GradientState):
        kind._reset_state()
