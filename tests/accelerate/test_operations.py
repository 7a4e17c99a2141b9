from __future__ import annotations

import pickle
from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from hotloop.accelerate.state import AcceleratorState, PartialState
from hotloop.accelerate.utils import TensorInformation
from hotloop.accelerate.utils import operations as mine
from hotloop.errors import SettingError

theirs = pytest.importorskip("accelerate.utils.operations")
Pair = namedtuple("Pair", "x y")


def _nested() -> dict[str, Any]:
    return {
        "list": [torch.arange(6).view(3, 2), (torch.zeros(3), 5)],
        "pair": Pair(torch.ones(3, 1), "text"),
        "dict": UserDict({"a": torch.arange(3), "b": None}),
    }


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (value.dtype, value.tolist())
    if isinstance(value, dict | UserDict):
        return (type(value).__name__, {key: _plain(item) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return (type(value).__name__, [_plain(item) for item in value])
    if isinstance(value, TensorInformation | theirs.TensorInformation):
        return (value.shape, value.dtype)
    return value


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("send_to_device", ("cpu",)),
        ("get_data_structure", ()),
        ("get_shape", ()),
        ("find_batch_size", ()),
        ("ignorant_find_batch_size", ()),
        ("find_device", ()),
        ("listify", ()),
        ("slice_tensors", (slice(1, 3),)),
        ("convert_to_fp32", ()),
    ],
)
def test_nested_values_are_treated_as_accelerate_treats_them(name: str, arguments: tuple[Any, ...]) -> None:
    expected = getattr(theirs, name)(_nested(), *arguments)
    assert _plain(getattr(mine, name)(_nested(), *arguments)) == _plain(expected)


def test_concatenation_and_application() -> None:
    data = [{"x": torch.ones(2) * i, "y": [torch.zeros(1, 2) + i]} for i in range(3)]
    assert _plain(mine.concatenate(data)) == _plain(theirs.concatenate(data))
    with pytest.raises(TypeError, match="Can only concatenate tensors"):
        mine.concatenate(["a", "b"])
    with pytest.raises(TypeError, match="Unsupported type"):
        mine.recursively_apply(lambda t: t, [1, torch.ones(1)], error_on_other_type=True)
    assert mine.recursively_apply(lambda t, n: t + n, Pair(torch.ones(1), 2), 3) == Pair(
        torch.tensor([4.0]), 2
    )
    with pytest.raises(SettingError, match="empty"):
        mine.find_batch_size([])
    made = mine.initialize_tensors(mine.get_data_structure({"a": torch.ones(2, 3, dtype=torch.int8)}))
    assert (made["a"].shape, made["a"].dtype) == ((2, 3), torch.int8)


def test_skipped_keys_stay_where_they_are() -> None:
    class Movable:
        moved = False

        def to(self, device: Any) -> Movable:
            self.moved = True
            return self

    batch = {"a": Movable(), "b": Movable(), "c": {"b": Movable()}}
    mine.send_to_device(batch, "cpu", skip_keys="b")
    assert (batch["a"].moved, batch["b"].moved, batch["c"]["b"].moved) == (True, False, False)


def test_one_process_gathers_what_it_has() -> None:
    data = _nested()
    assert mine.gather(data) is data
    assert mine.gather_object([1, 2]) == [1, 2]
    assert mine.broadcast(torch.ones(1)).item() == 1
    assert mine.broadcast_object_list([1]) == [1]
    assert mine.reduce(torch.tensor([2.0]), "sum").tolist() == [2.0]
    assert mine.pad_across_processes(torch.ones(2)).tolist() == [1, 1]
    with pytest.warns(mine.CannotPadNestedTensorWarning):
        mine.pad_across_processes(
            torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
        )


def test_batches_are_padded_to_a_multiple() -> None:
    padded = mine.pad_input_tensors({"x": torch.ones(5, 2)}, 5, 4)["x"]
    assert padded.shape == (8, 2)
    assert padded.sum() == 10


def test_outputs_in_half_precision_become_fp32() -> None:
    @dataclass
    class Output:
        logits: torch.Tensor

    forward = mine.convert_outputs_to_fp32(lambda x: (x.half(), Output(x.bfloat16()), 3))
    half, output, number = forward(torch.ones(1))
    assert (half.dtype, output.logits.dtype, number) == (torch.float32, torch.float32, 3)
    with pytest.raises(TypeError, match="unwrap_model"):
        pickle.dumps(mine.ConvertOutputsToFp32(len))


def test_the_state_says_what_is_missing() -> None:
    with pytest.raises(ValueError, match=r"accelerator = Accelerator\(\)"):
        AcceleratorState()
    state = PartialState()
    assert "Num processes: 1" in repr(state)
    PartialState._reset_state()
    with pytest.raises(
        AttributeError, match=r"`PartialState` object has no attribute `device`.*_reset_state"
    ):
        _ = state.device
    with pytest.raises(AttributeError, match="no attribute 'tea'"):
        _ = PartialState().tea


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("length", [3, 4, 7])
def test_shares_are_those_of_accelerate(length: int, padding: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module = pytest.importorskip("accelerate.state")
    for rank in range(3):
        state = PartialState()
        monkeypatch.setitem(state.__dict__, "num_processes", 3)
        monkeypatch.setitem(state.__dict__, "process_index", rank)
        other = module.PartialState.__new__(module.PartialState)
        other.__dict__ = {"num_processes": 3, "process_index": rank, "device": torch.device("cpu")}
        for values in (list(range(length)), {"a": list(range(length)), "b": "x" * length}):
            with (
                other.split_between_processes(
                    {**values} if isinstance(values, dict) else values, apply_padding=padding
                ) as expected,
                state.split_between_processes(values, apply_padding=padding) as share,
            ):
                if isinstance(values, dict):
                    assert share["a"] == expected["a"]
                    assert values["a"] == list(range(length))  # the caller's dict stays whole
                else:
                    assert share == expected
        with state.split_between_processes(torch.arange(length), apply_padding=padding) as share:
            expected_list = list(range(length))
            with other.split_between_processes(expected_list, apply_padding=padding) as expected:
                assert share.tolist() == expected
