from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def _add(rank: int, world: int) -> Any:
    import torch
    import torch.distributed as dist

    from hotloop.hardware import find_processes

    processes = find_processes("cpu")
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    return total, processes.gather_object(rank), world


def test_values_of_every_rank_come_back(run_ranks: Callable[..., list[Any]]) -> None:
    for total, ranks, world in run_ranks(2, _add):
        assert total.item() == 3.0
        assert ranks == [0, 1]
        assert world == 2


def test_the_failing_rank_is_named_and_the_others_end(run_ranks: Callable[..., list[Any]]) -> None:
    script = """
    import os, time
    def main(rank):
        assert os.environ["MINE"] == f"value {rank}"
        if rank == 1:
            raise KeyError("only here")
        time.sleep(600)
    """
    with pytest.raises(AssertionError, match=r"rank 1 of 2.*\n(.*\n)*.*KeyError: 'only here'"):
        run_ranks(2, script, env={"MINE": ["value 0", "value 1"]})
