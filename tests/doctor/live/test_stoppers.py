from __future__ import annotations

from pathlib import Path

import torch

from hotloop.doctor.live.stoppers import find_stoppers, optimizer_stopper

SOURCE = """history = []
for epoch in range(3):
    print("epoch")
    for x in loader:
        loss = model(x)
        loss.backward()
        optimizer.step()
        history.append(loss)
        scaler.update()
        total = 0


def train(x):
    seen.add(1)
    optimizer.step()
    return x
"""


def test_the_innermost_loop_around_the_step_is_the_step(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(SOURCE)
    found = find_stoppers((str(file), 7), [(str(file), 6, "a value is read")])
    assert [(stopper.line, stopper.text) for stopper in found] == [
        (6, "loss.backward()"),
        (8, "history.append(loss)"),
    ]
    assert found[0].why == "waits for the device: a value is read"
    assert found[1].why.startswith("calls history.append()")


def test_a_function_without_a_loop_is_the_step(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(SOURCE)
    assert [stopper.line for stopper in find_stoppers((str(file), 15), [])] == [14]


def test_nothing_is_said_where_nothing_is_known(tmp_path: Path) -> None:
    assert find_stoppers(None, []) == []
    assert find_stoppers((str(tmp_path / "gone.py"), 3), []) == []


def test_optimizers_whose_state_is_on_the_host() -> None:
    weight = [torch.nn.Parameter(torch.ones(2))]
    assert optimizer_stopper(torch.optim.AdamW(weight)) is None
    assert optimizer_stopper(torch.optim.SGD(weight, lr=0.1, fused=True)) is None
    plain = optimizer_stopper(torch.optim.SGD(weight, lr=0.1))
    assert plain is not None
    assert plain.why.endswith("fused=True puts it on the device")
    stopper = optimizer_stopper(torch.optim.LBFGS(weight))
    assert stopper is not None
    assert "LBFGS" in str(stopper)
