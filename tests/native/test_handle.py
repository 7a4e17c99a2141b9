"""The Python callable: what it takes, what it refuses and says, instances, state."""

from __future__ import annotations

import array
import gc
import sys
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hotloop import native

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("native")


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1)).eval()


@pytest.fixture(scope="module")
def compiled(model: nn.Module, folder: Path) -> native.CompiledModel:
    return native.build(model, torch.randn(1, 32), out=folder / "mlp.so", quiet=True)


def test_arrays_tensors_and_buffers_give_the_same(model: nn.Module, compiled: native.CompiledModel) -> None:
    x = torch.randn(1, 32)
    wanted = model(x).detach().numpy()
    given = [
        x,
        x.numpy(),
        x[0],
        x.numpy().reshape(32),
        memoryview(x.numpy()),
        array.array("f", x[0].tolist()),
    ]
    for item in given:
        y = compiled(item)
        assert isinstance(y, np.ndarray)
        assert y.shape == (1, 1)
        np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-6)
    out, tensor = np.zeros((1, 1), np.float32), torch.zeros(1, 1)
    compiled.into(x, out)
    compiled.into(x.numpy(), tensor)
    assert out[0, 0] == tensor.item() == compiled.scalar(x) == compiled(x)[0, 0]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (np.zeros((1, 32)), "got one of float64"),
        (np.zeros((1, 64), np.float32)[:, ::2], "not C-contiguous"),
        (np.zeros((1, 31), np.float32), r"shape \(1, 32\), got shape \(1, 31\)"),
        (np.zeros((2, 32), np.float32), r"got shape \(2, 32\)"),
        (np.zeros((1, 32), ">f4"), "got one of >f4"),
        (torch.zeros(1, 32, dtype=torch.float64), "got a tensor of float64"),
        (torch.zeros(32, 2)[:, :1], "tensor that is not contiguous"),
        (torch.zeros(1, 33), r"got shape \(1, 33\)"),
        (torch.zeros(1, 32, device="meta"), "tensor"),
        ("text", "object of type str"),
        (None, "object of type NoneType"),
        (array.array("d", [0.0] * 32), "elements of format d"),
    ],
)
def test_a_wrong_input_is_refused_by_name(compiled: native.CompiledModel, given: object, says: str) -> None:
    with pytest.raises(
        native.InputError, match=r"^input '\w+': expected a C-contiguous float32 array or CPU"
    ):
        compiled(given)
    with pytest.raises(native.InputError, match=says):
        compiled(given)


def test_wrong_counts_and_outputs_are_refused(compiled: native.CompiledModel) -> None:
    x = np.zeros((1, 32), np.float32)
    with pytest.raises(native.InputError, match="expected 1 inputs, got 2"):
        compiled(x, x)
    with pytest.raises(native.InputError, match="by position"):
        compiled(x, out=x)  # type: ignore[call-arg]
    with pytest.raises(native.InputError, match="inputs, then outputs"):
        compiled.into(x)
    y = np.zeros((1, 1), np.float32)
    y.flags.writeable = False
    with pytest.raises(native.InputError, match=r"output 'output_0': .* read-only"):
        compiled.into(x, y)


def test_nothing_leaks(compiled: native.CompiledModel) -> None:
    x, y = np.zeros((1, 32), np.float32), np.zeros((1, 1), np.float32)
    tensor = torch.zeros(1, 32)
    gc.collect()
    before = sys.getrefcount(x), sys.getrefcount(y), sys.getrefcount(tensor)
    for _ in range(1000):
        compiled(x)
        compiled(tensor)
        compiled.into(x, y)
        with pytest.raises(native.InputError):
            compiled(y)
    assert (sys.getrefcount(x), sys.getrefcount(y), sys.getrefcount(tensor)) == before


@pytest.mark.parametrize(
    "hold",
    [
        lambda y: y,
        lambda y: y[0],
        lambda y: y.T,
        memoryview,
        torch.from_numpy,
        torch.from_dlpack,
        np.from_dlpack,
        lambda y: y.flat,
    ],
)
def test_a_result_that_is_held_is_not_written_again(
    model: nn.Module, compiled: native.CompiledModel, hold: Callable[[np.ndarray], Any]
) -> None:
    inputs = [torch.randn(1, 32) for _ in range(9)]
    wanted = [model(x).item() for x in inputs]
    # held for one call, for two, for all: a result's memory serves again only when nobody has it
    for length in (1, 2, 9):
        held: deque[Any] = deque(maxlen=length)
        for index, x in enumerate(inputs):
            held.append(hold(compiled(x.numpy())))
            seen = [float(np.asarray(item).reshape(-1)[0]) for item in held]
            np.testing.assert_allclose(seen, wanted[index + 1 - len(held) : index + 1], rtol=1e-5, atol=1e-6)


def _reshape(y: np.ndarray) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        y.shape = (1,)


def _retype(y: np.ndarray) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        y.dtype = np.dtype(np.int32)


def _regrow(y: np.ndarray) -> None:
    y.resize((3, 3), refcheck=False)


@pytest.mark.parametrize("change", [_reshape, _retype, _regrow, lambda y: y.setflags(write=False)])
def test_a_result_that_was_changed_is_not_given_again(
    model: nn.Module, compiled: native.CompiledModel, change: Callable[[np.ndarray], None]
) -> None:
    x = torch.randn(1, 32)
    for _ in range(10):
        y = compiled(x)
        assert (y.shape, y.dtype, y.flags.writeable) == ((1, 1), np.float32, True)
        assert y[0, 0] == pytest.approx(model(x).item(), rel=1e-5, abs=1e-6)
        change(y)
    weak = weakref.ref(compiled(x))
    for _ in range(10):
        assert compiled(2 * x) is not weak()


def test_large_and_several_results(folder: Path) -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x + 1, x[0, :3] * 2

    compiled = native.build(Two(), torch.zeros(40, 500), out=folder / "two.so", quiet=True)
    inputs = [torch.randn(40, 500) for _ in range(7)]
    for x, (large, small) in zip(inputs, [compiled(x) for x in inputs], strict=True):
        np.testing.assert_array_equal(large, (x + 1).numpy())
        np.testing.assert_array_equal(small, (x[0, :3] * 2).numpy())


def test_the_library_tells_what_it_is(compiled: native.CompiledModel, folder: Path) -> None:
    again = native.load(folder / "mlp.so")
    description, report = again.facts["description"], again.facts["report"]
    assert description["inputs"] == [{"name": "input", "shape": [1, 32], "dtype": "float32"}]
    assert description["outputs"] == [{"name": "output_0", "shape": [1, 1], "dtype": "float32"}]
    assert report["bound"] == 1e-5
    assert 0 < report["worst_relative_error"] < 1e-5
    assert report == compiled.facts["report"]


def test_files_that_are_no_libraries(tmp_path: Path) -> None:
    with pytest.raises(native.LibraryError, match="no file"):
        native.load(tmp_path / "absent.so")
    (tmp_path / "text.so").write_text("no library")
    with pytest.raises(native.LibraryError, match="no library that hotloop"):
        native.load(tmp_path / "text.so")


def test_a_library_for_another_processor(
    folder: Path, compiled: native.CompiledModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    del compiled
    monkeypatch.setattr("hotloop.native.library.missing_instructions", lambda _target: ["avx9"])
    with pytest.raises(native.LibraryError, match="this processor lacks avx9"):
        native.load(folder / "mlp.so")


def test_building_to_the_same_path_gives_the_new_model(folder: Path) -> None:
    x = torch.ones(1, 4)
    for value in (1.0, 2.0):
        layer = nn.Linear(4, 1)
        nn.init.constant_(layer.weight, value)
        nn.init.zeros_(layer.bias)
        assert native.build(layer, x, out=folder / "same.so", quiet=True).scalar(x) == 4 * value


class Step(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 16, 2, batch_first=True)
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def test_instances_state_and_reset(folder: Path) -> None:
    torch.manual_seed(0)
    model, x = Step().eval(), torch.randn(1, 9, 6)
    machine = native.build(model, x, streaming=True, out=folder / "step.so", quiet=True)
    other = machine.instance()
    events = [x[:, t].numpy() for t in range(9)]
    for event in events[:5]:
        machine(event)
    machine.prep()
    saved = machine.state_save()
    machine.warm(3)
    rest = [machine.scalar(event) for event in events[5:]]
    assert rest[-1] == pytest.approx(model(x).item(), rel=1e-5, abs=1e-6)
    # another instance has seen nothing of it, and takes the state over
    other.state_load(saved)
    assert [other.scalar(event) for event in events[5:]] == rest
    # prep before the event or not: the same numbers
    machine.reset()
    first = machine.scalar(events[0])
    other.reset()
    other.prep()
    other.prep()
    assert other.scalar(events[0]) == first
    with pytest.raises(native.InputError, match="state_save"):
        machine.state_load(saved[:-1])


def test_denormals_are_off_inside_and_restored_after(folder: Path) -> None:
    layer = nn.Linear(8, 8, bias=False)
    compiled = native.build(layer, torch.randn(1, 8), out=folder / "tiny.so", quiet=True)
    tiny = np.full((1, 8), 1e-41, np.float32)
    assert not compiled(tiny).any()
    assert (tiny * np.float32(0.5)).all(), "the caller's denormals must survive the call"
