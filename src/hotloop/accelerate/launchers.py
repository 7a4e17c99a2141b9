"""A function in several processes of this machine, from a notebook or a test."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from typing import Any

import torch

from hotloop.accelerate.environment import get_free_port, patch_environment
from hotloop.accelerate.kinds import PrecisionType
from hotloop.accelerate.state import AcceleratorState, PartialState
from hotloop.errors import LaunchError, SettingError

__all__ = ["PrepareForLaunch", "debug_launcher", "notebook_launcher"]


_STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


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
        _forget_handlers()
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
        rdzv_backend: how they meet: "static", or one of torch's others such as "c10d".
        rdzv_endpoint: where they meet, instead of `master_addr:use_port`.
        rdzv_conf: further settings of that backend.
        rdzv_id: name of the run.
        max_restarts: how often all processes start anew after a failure.
        monitor_interval: seconds between two looks at the processes.
        log_line_prefix_template: what stands before each line of output.

    Raises:
        SettingError: no number of processes, or an unknown precision.
        LaunchError: an Accelerator or the device was used before in this process.
        ChildFailedError: torch's, with the error of the process that failed first.
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
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    configs = dict(rdzv_conf or {})
    endpoint = rdzv_endpoint
    if rdzv_backend == "static":
        configs["rank"] = node_rank
        port = str(use_port) if str(use_port) != "0" else str(get_free_port())
        endpoint = endpoint or f"{master_addr}:{port}"
    config = LaunchConfig(
        min_nodes=num_nodes,
        max_nodes=num_nodes,
        nproc_per_node=num_processes,
        run_id=rdzv_id,
        rdzv_backend=rdzv_backend,
        rdzv_endpoint=endpoint or "localhost:0",
        rdzv_configs=configs,
        max_restarts=max_restarts,
        monitor_interval=monitor_interval,
        # the function may be one of a notebook's cells, which a fresh interpreter could not import
        start_method="fork",
        log_line_prefix_template=log_line_prefix_template,
    )

    def entrypoint(*arguments: Any) -> Any:
        _forget_handlers()
        return function(*arguments)

    before = {number: signal.getsignal(number) for number in _STOPPING}
    try:
        with patch_environment(accelerate_mixed_precision=precision, fork_launched=1):
            elastic_launch(config, entrypoint=entrypoint)(*args)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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


def _forget_handlers() -> None:
    """In a forked child: stop at once when told to, also inside a collective that no Python handler interrupts."""
    for number in _STOPPING:
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, default)


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
