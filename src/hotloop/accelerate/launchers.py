"""A function in several processes of this machine, from a notebook or a test."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import torch

from hotloop.accelerate.state import AcceleratorState, PartialState
from hotloop.accelerate.unsupported import refuse
from hotloop.accelerate.utils.dataclasses import PrecisionType
from hotloop.accelerate.utils.environment import patch_environment
from hotloop.accelerate.utils.other import get_free_port
from hotloop.errors import LaunchError, SettingError

__all__ = ["PrepareForLaunch", "debug_launcher", "notebook_launcher"]


class PrepareForLaunch:
    """`launcher(number, *args)` for process starters: sets the rank's variables and the function runs.

    Args:
        launcher: the function; it gets the arguments without the number.
        distributed_type: kept for its name.
        debug: kept for its name.
    """

    def __init__(
        self, launcher: Callable[..., Any], distributed_type: str = "NO", debug: bool = False
    ) -> None:
        self.launcher = launcher
        self.distributed_type = distributed_type
        self.debug = debug

    def __call__(self, index: int, *args: Any) -> None:
        """Run as process `index` of this machine."""
        local_world = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))
        node = int(os.environ.get("GROUP_RANK", "0"))
        os.environ["LOCAL_RANK"] = str(index)
        os.environ["RANK"] = str(node * local_world + index)
        os.environ["FORK_LAUNCHED"] = "1"
        try:
            self.launcher(*args)
        finally:
            import torch.distributed as dist

            # the group belongs to this child alone, whatever the function did with it
            if dist.is_initialized():
                dist.destroy_process_group()


def notebook_launcher(
    function: Callable[..., Any],
    args: tuple[Any, ...] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str | int = "29500",
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: dict[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
) -> None:
    """Run `function(*args)` in `num_processes` forked processes, or here if that is 1.

    Args:
        function: the training function; make the Accelerator inside it.
        args: its arguments.
        num_processes: on this machine.
        mixed_precision: what `Accelerator()` takes by default inside.
        use_port: where the processes meet; "0" picks a free one.
        master_addr: machine where the processes of several machines meet.
        node_rank: number of this machine.
        num_nodes: machines.
        rdzv_backend: only "static".
        rdzv_endpoint: not supported.
        rdzv_conf: not supported.
        rdzv_id: kept for its name.
        max_restarts: must be 0.
        monitor_interval: kept for its name.
        log_line_prefix_template: kept for its name.

    Raises:
        SettingError: no number of processes, or an unknown precision.
        LaunchError: an Accelerator or the device was used before, or a process failed.
    """
    precision = str(mixed_precision).lower()
    if precision not in PrecisionType:
        raise SettingError(
            f"Unknown mixed_precision mode: {precision}. Choose between {PrecisionType.list()}."
        )
    if num_processes is None:
        raise SettingError("say how many processes to start: num_processes=...")
    if node_rank >= num_nodes:
        raise SettingError("The node_rank must be less than the number of nodes.")
    if rdzv_backend != "static" or rdzv_endpoint or rdzv_conf or max_restarts:
        refuse("an elastic notebook launch", "write the function to a file and use `hotloop launch`")
    if num_processes * num_nodes == 1:
        function(*args)
        return
    if AcceleratorState._shared_state or PartialState._shared_state:
        raise LaunchError(
            "an `Accelerator` or `PartialState` exists in this process: its rank and device would be inherited by "
            "all; restart, and make it only inside the function that is launched"
        )
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        raise LaunchError(
            "CUDA is in use in this process and cannot be used after a fork; restart before launching"
        )
    port = str(use_port) if str(use_port) != "0" else str(get_free_port())
    with patch_environment(
        world_size=num_nodes * num_processes,
        local_world_size=num_processes,
        group_rank=node_rank,
        master_addr=master_addr,
        master_port=port,
        accelerate_mixed_precision=precision,
    ):
        _start(PrepareForLaunch(function), args, num_processes)


def debug_launcher(function: Callable[..., Any], args: tuple[Any, ...] = (), num_processes: int = 2) -> None:
    """Run `function(*args)` in several forked processes on the CPU, as a test of what several ranks do.

    Raises:
        LaunchError: a process failed; the text holds its traceback.
    """
    with patch_environment(
        world_size=num_processes,
        local_world_size=num_processes,
        master_addr="127.0.0.1",
        master_port=get_free_port(),
        accelerate_mixed_precision="no",
        accelerate_use_cpu="yes",
    ):
        _start(PrepareForLaunch(function, debug=True), args, num_processes)


def _start(launcher: PrepareForLaunch, args: tuple[Any, ...], count: int) -> None:
    from torch.multiprocessing.spawn import ProcessException, start_processes

    # a forked child inherits the shared states: they have to be those of a fresh process
    states = (AcceleratorState._shared_state, PartialState._shared_state)
    kept = [dict(state) for state in states]
    for state in states:
        state.clear()
    try:
        start_processes(launcher, args=args, nprocs=count, start_method="fork")
    except ProcessException as error:
        raise LaunchError(f"process {error.error_index} of {count} failed:\n{error}") from error
    finally:
        for state, before in zip(states, kept, strict=True):
            with contextlib.suppress(KeyError):
                state.update(before)
