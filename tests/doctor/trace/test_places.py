# ruff: noqa: E501
from __future__ import annotations

from pathlib import Path

import pytest

from hotloop.doctor import read
from hotloop.doctor.trace.places import find_place, ignored_rules

SOURCE = """import torch


def step(model, x):
    y = model(x)
    loss = y.sum()
    print(
        loss.item())  # {comment}
    return loss


def twice(a, b):
    a.item()
    return b.item()
"""


@pytest.fixture
def place_of(machine, tmp_path: Path):
    def find(function: str, line: int, comment: str = ""):
        file = tmp_path / "train.py"
        file.write_text(SOURCE.replace("{comment}", comment))
        m = machine()
        with (
            m.span(f"{file}(20): <module>", "python_function"),
            m.span(f"{file}({line}): {function}", "python_function"),
            m.span("torch/_tensor.py(9): wrapper", "python_function"),
            m.span("<built-in method item of Tensor object at 0x7f>", "python_function"),
        ):
            m.item()
        timeline = read(m.write(tmp_path / "a.json")).timeline
        from hotloop.doctor.trace import places

        places._source.cache_clear()
        return find_place(timeline, int(timeline.call_rows[1]))

    return find


def test_the_one_call_of_the_function_gives_the_exact_line(place_of, tmp_path: Path) -> None:
    place = place_of("step", 4)
    assert (place.function, place.line, place.exact) == ("step", 8, True)
    assert place.op == "aten::item"
    assert place.method == "item"
    assert str(place) == f"{tmp_path}/train.py:8 in step"


def test_two_calls_are_both_named(place_of) -> None:
    place = place_of("twice", 12)
    assert not place.exact
    assert place.candidates == [13, 14]
    assert "line 13 or 14" in str(place)


BRANCH = """def step(loss, log):
    if log is None:
        return
    if loss > 3:
        print(
            loss)
"""


@pytest.mark.parametrize(("frames", "op", "line"), [
    (["torch/_tensor.py(9): __repr__", "torch/_tensor_str.py(5): _str", "<built-in method item of Tensor object>"], "aten::item", 5),
    ([], "aten::is_nonzero", 4),
])  # fmt: skip
def test_branches_and_printing_lead_to_their_line(
    frames: list[str], op: str, line: int, machine, tmp_path: Path
) -> None:
    from contextlib import ExitStack

    from hotloop.doctor.trace import places

    file = tmp_path / "loop.py"
    file.write_text(BRANCH)
    m = machine()
    with ExitStack() as stack:
        for name in [f"{file}(1): step", *frames]:
            stack.enter_context(m.span(name, "python_function"))
        stack.enter_context(m.span(op))
        m.item()
    places._source.cache_clear()
    timeline = read(m.write(tmp_path / "a.json")).timeline
    place = find_place(timeline, int(timeline.call_rows[0]))
    assert (place.line, place.exact) == (line, True)


def test_without_the_source_the_def_line_is_said_to_be_that(machine, tmp_path: Path) -> None:
    m = machine()
    with m.span("gone/train.py(7): step", "python_function"):
        m.item()
    timeline = read(m.write(tmp_path / "a.json")).timeline
    place = find_place(timeline, int(timeline.call_rows[0]))
    assert str(place) == "gone/train.py, in step (defined in line 7)"


def test_a_comment_silences_a_rule_on_its_line(place_of) -> None:
    assert ignored_rules(place_of("step", 4, "hotloop: ignore[host-sync, fusion]")) == {"host-sync", "fusion"}
    assert ignored_rules(place_of("step", 4)) == set()
    assert ignored_rules(None) == set()


def test_exact_lines_of_old_traces(machine, tmp_path: Path) -> None:
    m = machine()
    stack = "torch/nn/modules/module.py(1051): _call_impl;work/train.py(31): main;work/train.py(50): <module>"
    with m.span("aten::item", **{"Call stack": stack}):
        m.launch(3)
    timeline = read(m.write(tmp_path / "a.json")).timeline
    assert str(find_place(timeline, int(timeline.call_rows[0]))) == "work/train.py:31 in main"


@pytest.mark.parametrize(("file", "library"), [
    ("torch/nn/modules/module.py", True), ("/usr/lib/python3.11/contextlib.py", True), ("contextlib.py", True),
    ("/x/site-packages/foo/a.py", True), ("train.py", False), ("/home/me/hotloop/train.py", False),
    ("/data/torch/train.py", False), ("vllm/engine.py", False),
])  # fmt: skip
def test_the_programs_own_files_are_told_from_libraries(
    file: str, library: bool, machine, tmp_path: Path
) -> None:
    m = machine()
    with m.span("mine.py(1): main", "python_function"), m.span(f"{file}(7): f", "python_function"):
        m.item()
    timeline = read(m.write(tmp_path / "a.json")).timeline
    place = find_place(timeline, int(timeline.call_rows[0]))
    assert place.file == ("mine.py" if library else file)


LOOP = """import torch

model = torch.nn.Linear(2, 2).cuda()
first = model(torch.ones(2, 2)).sum().item()


def train():
    warm = torch.ones(1).item()
    for step in range(9):
        loss = torch.ones(1)
        loss.item()
        model.step()


for epoch in range(3):
    value = torch.ones(2).sum().item()
train()
"""


@pytest.mark.parametrize(
    ("frame", "line", "expected"), [("train", 12, 11), ("<module>", 16, 16), ("<module>", 17, 16)]
)
def test_a_frame_that_was_running_when_recording_began(
    frame: str, line: int, expected: int, machine, tmp_path: Path
) -> None:
    """It is told by the line it was in; of its calls those in a loop are meant."""
    file = tmp_path / "loop.py"
    file.write_text(LOOP)
    m = machine()
    with (
        m.span(f"{file}({line}): {frame}", "python_function"),
        m.span("<built-in method item of Tensor object at 0x7f>", "python_function"),
    ):
        m.item()
    timeline = read(m.write(tmp_path / "a.json")).timeline
    place = find_place(timeline, int(timeline.call_rows[1]))
    assert (place.function, place.line, place.exact) == (frame, expected, True)
