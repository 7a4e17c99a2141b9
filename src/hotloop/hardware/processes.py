"""Which process of how many this is, and how the processes talk beside the training stream."""

from __future__ import annotations

import atexit
import datetime
import os
import re
import time
import traceback
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from hotloop.errors import ProcessError

__all__ = ["Processes", "before_shut_down", "find_local_rank", "find_processes", "processes_from_environment"]

_KNOWN: dict[tuple[int, int, int], Processes] = {}
_BEFORE_SHUT_DOWN: list[weakref.WeakMethod[Callable[[], None]]] = []


@dataclass
class Processes:
    """This process among those of the run.

    Attributes:
        rank: number of this process, 0 to world - 1.
        world: how many processes there are in the run.
        local_rank: number of this process among those of its node.
        local_world: how many processes this node has.
        backend: name of the torch.distributed backend of the default group; None for a single process.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    backend: str | None = None
    _side: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def is_main(self) -> bool:
        """True in the one process that prints, records and writes checkpoints."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """True in one process of each node."""
        return self.local_rank == 0

    def side_group(self, name: str) -> Any:
        """A gloo group over all ranks, for host-side agreement that never touches the training stream.

        Creating one is collective: every rank must ask for the same names in the same order. One name is
        one group; threads that talk concurrently need groups of their own. None for a single process.
        """
        if self.world == 1:
            return None
        if name not in self._side:
            import torch.distributed as dist

            self._side[name] = dist.new_group(backend="gloo")
        return self._side[name]

    def broadcast_object(self, value: Any, *, group: Any = None, source: int = 0) -> Any:
        """`value` of rank `source`, on every rank; pickled, on `group` (default: the "objects" side group)."""
        if self.world == 1:
            return value
        import torch.distributed as dist

        box = [value]
        dist.broadcast_object_list(box, src=source, group=group or self.side_group("objects"))
        return box[0]

    def gather_object(self, value: Any, *, group: Any = None) -> list[Any]:
        """The `value` of every rank, in rank order, on every rank."""
        if self.world == 1:
            return [value]
        import torch.distributed as dist

        box: list[Any] = [None] * self.world
        dist.all_gather_object(box, value, group=group or self.side_group("objects"))
        return box

    def barrier(self, *, group: Any = None) -> None:
        """Return once every rank has arrived."""
        if self.world > 1:
            import torch.distributed as dist

            dist.barrier(group=group or self.side_group("objects"))


def find_processes(
    device_type: str = "cpu", *, timeout_s: float = 1800.0, recorded: bool = False
) -> Processes:
    """The processes of this run, from torch.distributed if it is up, else from the environment.

    `torchrun`, `hotloop launch` and Slurm's `srun` are understood; with none of them it is one process.
    Starts torch.distributed if there are several and it is not running: NCCL for "cuda", gloo otherwise.

    Args:
        device_type: where the processes compute.
        timeout_s: how long an exchange may take.
        recorded: exchanges will be recorded into CUDA graphs. For that torch wants its handling of NCCL's errors
            switched off, and `hotloop launch` does so; without it, that is undone.

    Raises:
        ProcessError: the environment names a rank without a world, one outside it, or no number at all.
    """
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return _from_group()
    found = processes_from_environment()
    if found.world == 1:
        return found
    found.backend = {"cuda": "cpu:gloo,cuda:nccl", "xpu": "cpu:gloo,xpu:xccl"}.get(device_type, "gloo")
    if not recorded and os.environ.pop("HOTLOOP_NCCL_ERRORS", "") == "launcher":
        # what torch's agent gives to every process: an exchange that hangs ends the run
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "1"
    device_id = torch.device("cuda", torch.cuda.current_device()) if device_type == "cuda" else None
    dist.init_process_group(
        found.backend,
        rank=found.rank,
        world_size=found.world,
        timeout=datetime.timedelta(seconds=timeout_s),
        device_id=device_id,
    )
    atexit.register(_shut_down)
    return _from_group()


def find_local_rank() -> int:
    """Number of this process among those of its node, before torch.distributed is up: it chooses the device.

    Raises:
        ProcessError: a variable that should hold a number holds something else.
    """
    if "LOCAL_RANK" in os.environ:
        return _number("LOCAL_RANK", 0)
    return _number("SLURM_LOCALID", 0) if _under_srun() else 0


def _number(name: str, default: int) -> int:
    """The environment variable `name` as a whole number, `default` if it is not set."""
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise ProcessError(
            f"the environment variable {name} is {text!r}, which is no whole number; start the script with "
            "`hotloop launch`, torchrun or srun, or unset it to run one process"
        ) from None


def _under_srun() -> bool:
    env = os.environ
    several = "SLURM_PROCID" in env and "SLURM_STEP_ID" in env
    return "RANK" not in env and "WORLD_SIZE" not in env and several and _number("SLURM_NTASKS", 1) > 1


def _from_group() -> Processes:
    """The processes of torch.distributed's default group: one object for one group, with its side groups."""
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    key = (id(dist.group.WORLD), rank, world)
    if key not in _KNOWN:
        _KNOWN.clear()
        _KNOWN[key] = Processes(
            rank,
            world,
            _number("LOCAL_RANK", rank),
            _number("LOCAL_WORLD_SIZE", world),
            dist.get_backend() if world > 1 else None,
        )
    return _KNOWN[key]


def processes_from_environment() -> Processes:
    """Rank and world as torchrun's variables give them, else as Slurm's do; starts nothing.

    Raises:
        ProcessError: the variables contradict each other, or are no numbers.
    """
    env = os.environ
    if "RANK" in env or "WORLD_SIZE" in env:
        if "RANK" not in env or "WORLD_SIZE" not in env:
            missing = "RANK" if "RANK" not in env else "WORLD_SIZE"
            raise ProcessError(
                f"the environment has one of RANK and WORLD_SIZE but not {missing}; start the script with "
                "`hotloop launch` or torchrun, or unset both to run one process"
            )
        rank, world = _number("RANK", 0), _number("WORLD_SIZE", 1)
        local_rank, local_world = _number("LOCAL_RANK", rank), _number("LOCAL_WORLD_SIZE", world)
    elif _under_srun():
        rank, world = _number("SLURM_PROCID", 0), _number("SLURM_NTASKS", 1)
        local_rank, local_world = _number("SLURM_LOCALID", 0), _slurm_tasks_here(world)
        env.setdefault("MASTER_ADDR", _first_slurm_host(env.get("SLURM_STEP_NODELIST", "localhost")))
        env.setdefault("MASTER_PORT", str(20000 + _number("SLURM_JOB_ID", 0) % 20000))
    else:
        return Processes()
    if not 0 <= rank < world:
        names = "RANK and WORLD_SIZE" if "RANK" in env else "SLURM_PROCID and SLURM_NTASKS"
        raise ProcessError(f"rank {rank} is not in 0..{world - 1}: {names} contradict each other")
    return Processes(rank, world, local_rank, local_world)


def _slurm_tasks_here(world: int) -> int:
    """How many tasks of the step this node has: SLURM_STEP_TASKS_PER_NODE is a list such as `4(x2),3`."""
    text = os.environ.get("SLURM_STEP_TASKS_PER_NODE") or os.environ.get("SLURM_TASKS_PER_NODE", str(world))
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ProcessError(f"SLURM_STEP_TASKS_PER_NODE is {text!r}, which is no list of task counts")
        counts += [int(match[1])] * int(match[2] or 1)
    node = _number("SLURM_NODEID", 0)
    return counts[node] if node < len(counts) else counts[0]


def _first_slurm_host(nodes: str) -> str:
    """First host of a Slurm node list such as `gpu[003-006,9],login1`."""
    head, bracket, rest = nodes.partition("[")
    if not bracket or "," in head:
        return nodes.split(",")[0]
    return head + rest.split("]")[0].split(",")[0].split("-")[0]


def before_shut_down(method: Callable[[], None]) -> None:
    """Have a bound method called at exit, before the process group is closed, if its object still lives by then."""
    _BEFORE_SHUT_DOWN.append(weakref.WeakMethod(method))


def _shut_down() -> None:
    """Close the process group at exit, so that peers see an orderly end instead of a lost connection.

    NCCL closes only when no CUDA graph is left that holds exchanges of its: those go first.

    A gloo thread that drops the tensors of the last exchange asks for the interpreter's lock. If the interpreter is
    closing down by then, the thread is ended in the middle of C++ code and takes the process with it (SIGABRT,
    after all work is done; plain torch does that too). A moment's patience lets them finish.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        try:
            for reference in _BEFORE_SHUT_DOWN:
                method = reference()
                if method is not None:
                    _try_to_end(method)
        finally:
            dist.destroy_process_group()
        time.sleep(0.05)


def _try_to_end(method: Callable[[], None]) -> None:
    """Call it; its error is told, and keeps nobody else from ending."""
    try:
        method()
    except Exception:
        traceback.print_exc()
