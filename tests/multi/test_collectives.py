from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.multi
RunRanks = Callable[..., list[Any]]


def _gather(rank: int, world: int) -> Any:
    from collections import UserDict, namedtuple

    import torch

    from hotloop.errors import ProcessError
    from hotloop.hardware import find_processes
    from hotloop.parallel import collectives

    processes = find_processes("cpu")
    Pair = namedtuple("Pair", "x y")
    found: dict[str, Any] = {}
    data = Pair(torch.arange(2) + 10 * rank, UserDict({"s": torch.tensor(float(rank))}))
    gathered = collectives.gather(data, processes)
    found["structure"] = (type(gathered).__name__, type(gathered.y).__name__, gathered.x, gathered.y["s"])
    found["transposed"] = collectives.gather(torch.arange(6).view(2, 3).t() + rank, processes)
    dtypes = (torch.bool, torch.bfloat16, torch.float16, torch.int8, torch.complex64, torch.float64)
    found["dtypes"] = [collectives.gather(torch.full((1, 2), rank).to(d), processes).tolist() for d in dtypes]
    found["empty"] = tuple(collectives.gather(torch.zeros(0, 3), processes).shape)
    found["uneven"] = collectives.gather(
        [torch.arange(rank + 1), torch.full((2 - rank, 2), rank)], processes, uneven=True
    )
    found["none here"] = collectives.gather(torch.ones(rank, 2), processes, uneven=True)
    try:
        collectives.gather(torch.ones(rank + 1), processes)
    except ProcessError as error:
        found["error"] = str(error)
    try:
        collectives.gather(torch.ones(2, rank + 1), processes, uneven=True)
    except ProcessError as error:
        found["other dimensions"] = str(error)
    found["objects"] = collectives.gather_object({"rank": rank}, processes)
    return found


def test_gather(run_ranks: RunRanks) -> None:
    for found in run_ranks(2, _gather):
        kind, inner, x, s = found["structure"]
        assert (kind, inner) == ("Pair", "UserDict")
        assert x.tolist() == [0, 1, 10, 11]
        assert s.tolist() == [0.0, 1.0]
        expected = torch.arange(6).view(2, 3).t()
        assert torch.equal(found["transposed"], torch.cat([expected, expected + 1]))
        assert found["dtypes"] == [[[0, 0], [1, 1]]] * 6
        assert found["empty"] == (0, 3)
        assert [t.tolist() for t in found["uneven"]] == [[0, 0, 1], [[0, 0], [0, 0], [1, 1]]]
        assert found["none here"].tolist() == [[1.0, 1.0]]
        assert "rank 0: [1] float32; rank 1: [2] float32" in found["error"]
        assert "do not fit together" in found["other dimensions"]
        assert found["objects"] == [{"rank": 0}, {"rank": 1}]


def _others(rank: int, world: int) -> Any:
    import torch

    from hotloop.errors import ProcessError
    from hotloop.hardware import find_processes
    from hotloop.parallel import collectives

    processes = find_processes("cpu")
    found: dict[str, Any] = {}
    values = torch.tensor([1.0, 4.0]) * (rank + 1)
    for how in ("sum", "mean", "max", "min", "none"):
        found[how] = collectives.reduce(values, processes, how).tolist()
    found["scaled"] = collectives.reduce([values], processes, "sum", scale=0.5)[0].tolist()
    found["integers"] = collectives.reduce(torch.tensor([1, 2]) + rank, processes, "mean").tolist()
    grid = (torch.arange(6).view(2, 3) * (rank + 1)).t()
    returned = collectives.broadcast({"grid": grid}, processes, source=1)
    found["broadcast"] = (returned["grid"] is grid, grid)
    found["list"] = collectives.broadcast_object_list([rank, "a" * rank], processes, source=1)
    ragged = [torch.ones(rank + 1, 2), torch.ones(2, rank + 2), torch.tensor(rank)]
    found["padded"] = collectives.pad_across_processes(ragged, processes, dim=1, pad_index=-1)
    found["first"] = collectives.pad_across_processes(torch.ones(rank + 1), processes, dim=-1, pad_first=True)
    try:
        collectives.pad_across_processes(torch.ones((1,) * (rank + 1)), processes)
    except ProcessError as error:
        found["error"] = str(error)
    return found


def test_reduce_broadcast_and_pad(run_ranks: RunRanks) -> None:
    for rank, found in enumerate(run_ranks(2, _others)):
        assert found["sum"] == [3.0, 12.0]
        assert found["mean"] == found["scaled"] == [1.5, 6.0]
        assert found["max"] == [2.0, 8.0]
        assert found["min"] == [1.0, 4.0]
        assert found["none"] == [1.0 + rank, 4.0 + 4 * rank]
        assert found["integers"] == [1.5, 2.5]
        same, grid = found["broadcast"]
        assert same
        assert torch.equal(grid, (torch.arange(6).view(2, 3) * 2).t())
        assert found["list"] == [1, "a"]
        untouched, wide, scalar = found["padded"]
        assert untouched.shape == (rank + 1, 2)
        assert wide.tolist() == ([[1, 1, -1], [1, 1, -1]] if rank == 0 else [[1, 1, 1], [1, 1, 1]])
        assert scalar.item() == rank
        assert found["first"].tolist() == ([0, 1] if rank == 0 else [1, 1])
        assert "pad_across_processes was called with tensors that do not fit" in found["error"]
