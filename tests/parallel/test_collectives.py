from __future__ import annotations

from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from hotloop.errors import ProcessError
from hotloop.hardware import Processes
from hotloop.parallel import collectives
from hotloop.parallel.collectives import StructureError

ALONE = Processes()
Pair = namedtuple("Pair", "x y")


@dataclass
class Output:
    logits: torch.Tensor
    hidden: Any = None


@pytest.mark.parametrize(
    "data",
    [
        torch.ones(3),
        [torch.ones(2), torch.zeros(())],
        Pair(torch.ones(1), (torch.ones(2),)),
        UserDict({"a": torch.ones(2)}),
        Output(torch.ones(2), [torch.zeros(1)]),
    ],
    ids=["tensor", "list", "namedtuple", "UserDict", "dataclass"],
)
def test_one_process_gets_its_own_values_back(data: Any) -> None:
    assert collectives.gather(data, ALONE) is data
    assert collectives.gather(data, ALONE, uneven=True) is data
    assert collectives.broadcast(data, ALONE) is data
    assert collectives.pad_across_processes(data, ALONE) is data
    assert type(collectives.reduce(data, ALONE)) is type(data)


def test_objects_of_one_process() -> None:
    assert collectives.gather_object({"a": 1}, ALONE) == [{"a": 1}]
    values = [1, "b"]
    assert collectives.broadcast_object_list(values, ALONE) is values


def test_a_reduction_is_a_new_tensor() -> None:
    tensor = torch.tensor([1.0, 2.0], requires_grad=True)
    reduced = collectives.reduce({"t": tensor}, ALONE, "mean", scale=3.0)["t"]
    assert reduced.tolist() == [3.0, 6.0]
    assert not reduced.requires_grad
    reduced.zero_()
    assert tensor.tolist() == [1.0, 2.0]
    copied = collectives.reduce(tensor, ALONE, "none", scale=3.0)
    assert copied.tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    "function",
    [collectives.gather, collectives.broadcast, collectives.reduce, collectives.pad_across_processes],
)
def test_what_is_no_tensor_is_an_error(function: Any) -> None:
    for wrong in (3, [torch.ones(1), "a"], {"a": None}, Output(torch.ones(1))):
        with pytest.raises(StructureError, match="only tensors can be"):
            function(wrong, ALONE)


def test_an_unknown_reduction_is_an_error() -> None:
    with pytest.raises(ProcessError, match="'median'; choose one of sum, mean"):
        collectives.reduce(torch.ones(1), ALONE, "median")
