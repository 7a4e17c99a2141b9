"""Launching: one script in several processes, on torch's elastic agent.

    hotloop launch → check (here) → elastic agent (torch) → keeper → shim → the user's script
                                                  one of each per rank ─┘

The agent finds the nodes, hands out ranks and restarts; the keeper owns signals, output and reaping of its
rank (`hotloop.parallel.keeper`); the shim runs the script and keeps its traceback (`hotloop.parallel.shim`).
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from hotloop.errors import LaunchError
from hotloop.hardware.cores import usable_cores
from hotloop.parallel.failures import Failure, describe_failures, read_failures
from hotloop.parallel.target import check_target
from hotloop.settings import variables_set

__all__ = ["Launch", "launch_processes"]

_STOPPING = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
_DEVICES = ("cpu", "cuda", "xpu", "mps")
# torch's name for whether a failed or hung exchange through NCCL ends its process, and the name before that
_NCCL_ERRORS = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING")


@dataclass(frozen=True)
class Launch:
    """What to start, how often and where.

    Attributes:
        target: path of a script, or name of a module if `module`.
        arguments: the script's own arguments, passed on untouched.
        processes: how many on this node; None: one per accelerator, or one if there is none.
        device: None (whatever is there), "cpu" (hides the accelerators), "cuda", "xpu" or "mps".
        nodes: how many machines take part; each runs the same command.
        node_rank: number of this machine; None lets the machines agree by themselves.
        rendezvous: "host:port" of the machine where they meet; needed with several nodes.
        run_id: name of the run, equal on all nodes; keeps apart runs that meet at the same place.
        restarts: how often all processes start anew after a failure.
        output: "main" shows rank 0 as it is and of the others stderr, prefixed; "all" shows all, prefixed.
        logs: folder for a file per rank and stream, or None.
        grace_s: how long the processes may take to save and end after a signal, before they are killed.
    """

    target: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    processes: int | None = None
    device: str | None = None
    nodes: int = 1
    node_rank: int | None = None
    rendezvous: str | None = None
    run_id: str = "hotloop"
    restarts: int = 0
    output: str = "main"
    logs: str | None = None
    grace_s: float = 30.0


def launch_processes(launch: Launch) -> int:
    """Run the launch to its end; returns the exit status for the shell.

    That is 0 if all processes ended well, the exit status of the one that failed first (128 + n if signal n
    ended it), or 128 + n if signal n was sent to this process. A failure is told on stderr. While it runs,
    signals sent to this process are passed on once to the processes. Call it from the main thread.

    Raises:
        LaunchError: the launch cannot be carried out as asked; nothing was started.
    """
    _check_numbers(launch)
    _check_surroundings(os.environ, launch)
    check_target(launch.target, module=launch.module)
    count = _count_processes(launch)
    folder = Path(tempfile.mkdtemp(prefix="hotloop-launch-"))
    try:
        _write_job(folder, launch)
        with variables_set(_variables(launch, count, os.environ)):
            return _run_agent(folder, launch, count)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check_numbers(launch: Launch) -> None:
    if launch.processes is not None and launch.processes < 1:
        raise LaunchError(f"{launch.processes} processes were asked for (-n); it takes at least 1")
    if launch.nodes < 1:
        raise LaunchError(f"{launch.nodes} nodes were asked for (--nodes); it takes at least 1")
    if launch.nodes == 1 and (launch.rendezvous or launch.node_rank is not None):
        given = "--rendezvous" if launch.rendezvous else "--node-rank"
        raise LaunchError(f"{given} is for several nodes, but --nodes is 1; say how many there are")
    if launch.nodes > 1 and not launch.rendezvous:
        raise LaunchError(
            f"{launch.nodes} nodes need a place to meet: add --rendezvous HOST:PORT, the same on every node, "
            "where HOST is one of them"
        )
    if launch.node_rank is not None:
        if not 0 <= launch.node_rank < launch.nodes:
            raise LaunchError(f"--node-rank {launch.node_rank} is not in 0..{launch.nodes - 1}")
        if ":" not in (launch.rendezvous or ""):
            raise LaunchError(f"--rendezvous {launch.rendezvous} has no port; with --node-rank it needs one")
    if launch.restarts < 0:
        raise LaunchError(f"--restarts {launch.restarts} is negative")
    if not (math.isfinite(launch.grace_s) and launch.grace_s >= 0):
        raise LaunchError(f"--grace {launch.grace_s} is not a number of seconds")
    if launch.output not in ("main", "all"):
        raise LaunchError(f"--output {launch.output} is not known; it is main or all")
    if launch.device is not None and launch.device not in _DEVICES:
        raise LaunchError(f"--device {launch.device} is not known; it is one of {', '.join(_DEVICES)}")
    if launch.logs is not None and Path(launch.logs).exists() and not Path(launch.logs).is_dir():
        raise LaunchError(f"--logs {launch.logs} is a file; it takes a folder")


def _check_surroundings(env: Mapping[str, str], launch: Launch) -> None:
    """Refuse to start processes from within processes that have been started already."""
    here = [f"{name}={env[name]}" for name in ("RANK", "WORLD_SIZE") if name in env]
    if here:
        raise LaunchError(
            f"already launched: this process is one of a run ({', '.join(here)} in the environment). Run the "
            "script with `python` here, or unset these variables if they are left over"
        )
    tasks = int(env.get("SLURM_NTASKS", "1")) if "SLURM_STEP_ID" in env and "SLURM_PROCID" in env else 1
    if tasks > 1 and tasks != launch.nodes:
        raise LaunchError(
            f"srun has already started {tasks} tasks, and each would launch processes of its own. Either let "
            "srun do it all (`srun python script.py`, nothing to launch), or run one launcher per node: "
            "`srun --ntasks-per-node=1 hotloop launch --nodes $SLURM_NNODES --rendezvous HOST:PORT script.py`"
        )


def _count_processes(launch: Launch) -> int:
    """Processes on this node, checked against the accelerators that are there."""
    kind, present = _accelerators()
    device, said = launch.device, "--device"
    if device is None:
        device, said = _device_from_environment(os.environ)
    if device == "cpu":
        return launch.processes or 1
    if device is not None and device != kind:
        raise LaunchError(f"{said} {device}: this machine has {_name(kind, present)}")
    if present == 0:
        return launch.processes or 1
    if launch.processes is not None and launch.processes > present:
        raise LaunchError(
            f"{launch.processes} processes were asked for (-n), but this machine has {_name(kind, present)}, "
            f"one per process: ask for at most {present}, or add --device cpu to leave them aside"
        )
    return launch.processes or present


def _device_from_environment(env: Mapping[str, str]) -> tuple[str | None, str]:
    """The type of device that the processes will be told to use by a variable, and the variable's name."""
    for part in env.get("HOTLOOP_OVERRIDE", "").split(","):
        name, _, value = part.partition("=")
        if name.strip() == "device":
            return value.strip().partition(":")[0], "HOTLOOP_OVERRIDE"
    value = env.get("HOTLOOP_DEVICE", "")
    return value.partition(":")[0] or None, "HOTLOOP_DEVICE"


def _accelerators() -> tuple[str | None, int]:
    """Kind and number of the accelerators that are visible; makes no context on them."""
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return None, 0
    return accelerator.type, torch.accelerator.device_count()


def _name(kind: str | None, count: int) -> str:
    if kind is None:
        return "no accelerator"
    devices = f"{count} {kind} device" + ("" if count == 1 else "s")
    if kind == "cuda":
        import torch

        devices += f" ({torch.cuda.get_device_name(0)})"
    return devices


def _variables(launch: Launch, count: int, env: Mapping[str, str]) -> dict[str, str]:
    """Environment variables that the processes get on top of this one's; says what was decided."""
    found: dict[str, str] = {}
    where = ""
    if launch.device is not None:
        override = [part for part in env.get("HOTLOOP_OVERRIDE", "").split(",") if part.strip()]
        override = [part for part in override if part.partition("=")[0].strip() != "device"]
        found["HOTLOOP_OVERRIDE"] = ",".join([*override, f"device={launch.device}"])
        where = f" on {launch.device}"
    if launch.device == "cpu":
        found["CUDA_VISIBLE_DEVICES"] = ""
    elif count * launch.nodes > 1 and _accelerators()[0] == "cuda" and env.keys().isdisjoint(_NCCL_ERRORS):
        # for exchanges that are recorded into CUDA graphs; a loop that records none takes it back: see find_processes
        found[_NCCL_ERRORS[0]] = "0"
        found["HOTLOOP_NCCL_ERRORS"] = "launcher"
    if count > 1:
        if "OMP_NUM_THREADS" in env:
            threads = f"OMP_NUM_THREADS={env['OMP_NUM_THREADS']} as set"
        else:
            each = max(1, usable_cores() // count)
            found["OMP_NUM_THREADS"] = str(each)
            threads = f"{each} CPU thread{'s' if each > 1 else ''} each (set OMP_NUM_THREADS to change)"
        nodes = f" on each of {launch.nodes} nodes" if launch.nodes > 1 else ""
        _say(f"{count} processes{where}{nodes}, {threads}")
    return found


def _write_job(folder: Path, launch: Launch) -> None:
    """Leave for the keepers what to do; not on their command line, where the agent would expand `$`."""
    if launch.logs is not None:
        Path(launch.logs).mkdir(parents=True, exist_ok=True)
    job = {
        "launcher": os.getpid(),
        "target": launch.target,
        "module": launch.module,
        "arguments": list(launch.arguments),
        "grace_s": launch.grace_s,
        "output": launch.output,
        "logs": os.path.abspath(launch.logs) if launch.logs is not None else None,
    }
    (folder / "job.json").write_text(json.dumps(job))


def _run_agent(folder: Path, launch: Launch, count: int) -> int:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import elastic_launch

    _quiet_agent()
    keeper = str(Path(__file__).with_name("keeper.py"))
    config = _configure(folder, launch, count)
    ranks = count * launch.nodes
    with _signals(folder, SignalException) as passed_on:
        try:
            elastic_launch(config, sys.executable)(keeper, str(folder))
        except ChildFailedError as error:
            if passed_on and all(failure.stopped for failure in _failures(folder)):
                return _tell_stop(folder, ranks, passed_on[-1])
            return _tell_failures(folder, ranks, error)
        except SignalException as error:
            return _tell_stop(folder, ranks, error.sigval)
        except RendezvousError as error:
            raise LaunchError(
                f"the {launch.nodes} nodes did not come together at {launch.rendezvous}: {error}. Check that "
                "the address is reachable from every node and that all were given the same number of nodes"
            ) from error
        finally:
            _end_leftovers(folder)
    return 0


def _configure(folder: Path, launch: Launch, count: int) -> Any:
    """The agent's LaunchConfig."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest
    from torch.distributed.launcher.api import LaunchConfig

    class RestartNotes(DefaultLogsSpecs):
        """The agent asks for log files at each start: the moment to tell why it starts again."""

        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            attempt = int(envs[0].get("TORCHELASTIC_RESTART_COUNT", "0"))
            failures = read_failures(folder / f"attempt{attempt - 1}") if attempt else []
            if failures:
                sys.stderr.write(describe_failures(failures, int(envs[0]["WORLD_SIZE"])))
                _say(f"starting again ({attempt} of {launch.restarts} restarts)")
            return super().reify(envs)

    options: dict[str, Any] = {
        "min_nodes": launch.nodes,
        "max_nodes": launch.nodes,
        "nproc_per_node": count,
        "run_id": launch.run_id,
        "rdzv_backend": "c10d",
        "rdzv_endpoint": launch.rendezvous or "localhost:0",
        "max_restarts": launch.restarts,
        "logs_specs": RestartNotes(log_dir=str(folder / "agent")),
        "signals_to_handle": ",".join(_STOPPING),
        # the keepers keep the grace time; the agent's own comes after, should a keeper be stuck
        "shutdown_timeout": math.ceil(launch.grace_s) + 10,
    }
    if launch.nodes == 1:
        options["local_addr"] = "localhost"
    if launch.node_rank is not None:
        options["rdzv_backend"] = "static"
        options["rdzv_configs"] = {"rank": launch.node_rank}
    known = {field.name for field in dataclasses.fields(LaunchConfig)}
    return LaunchConfig(**{name: value for name, value in options.items() if name in known})


@contextmanager
def _signals(folder: Path, stop: type[Exception]) -> Iterator[list[signal.Signals]]:
    """Before the agent has its handlers a stop must end this process in order, too; USR1/2 are passed on.

    Yields the list of those that have been passed on.
    """
    passed_on: list[signal.Signals] = []

    def on_stop(number: int, frame: FrameType | None) -> None:
        raise stop(f"got signal {number}", signal.Signals(number))

    def on_other(number: int, frame: FrameType | None) -> None:
        passed_on.append(signal.Signals(number))
        for pid in _keepers(folder):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    numbers = {signal.Signals[name]: on_stop for name in _STOPPING}
    numbers |= {signal.SIGUSR1: on_other, signal.SIGUSR2: on_other}
    before = {number: signal.signal(number, handler) for number, handler in numbers.items()}
    try:
        yield passed_on
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _keepers(folder: Path) -> list[int]:
    """Process ids of the keepers of the latest attempt that have not noted their rank's end."""
    attempt = _last_attempt(folder)
    found = []
    for rank_folder in attempt.glob("rank*") if attempt else ():
        with suppress(FileNotFoundError, ValueError):
            pid = int((rank_folder / "keeper.pid").read_text())
            if not (rank_folder / "end.json").exists():
                found.append(pid)
    return found


def _last_attempt(folder: Path) -> Path | None:
    attempts = sorted(folder.glob("attempt*"), key=lambda path: int(path.name.removeprefix("attempt")))
    return attempts[-1] if attempts else None


def _failures(folder: Path) -> list[Failure]:
    attempt = _last_attempt(folder)
    return read_failures(attempt) if attempt else []


def _end_leftovers(folder: Path) -> None:
    """A keeper that outlived the agent's patience is killed; its rank dies with it."""
    for pid in _keepers(folder):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _tell_failures(folder: Path, ranks: int, error: Any) -> int:
    failures = _failures(folder)
    if not failures:
        rank, failure = error.get_first_failure()
        _say(f"rank {rank} of {ranks} failed without a trace (exit code {failure.exitcode})")
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    sys.stderr.write(describe_failures(failures, ranks))
    sys.stderr.flush()
    return failures[0].exit_code


def _tell_stop(folder: Path, ranks: int, number: signal.Signals) -> int:
    """After a signal to the launcher: an error while saving is shown, an orderly end is one line."""
    errors = [failure for failure in _failures(folder) if not failure.stopped]
    if errors:
        sys.stderr.write(describe_failures(errors, ranks))
    _say(f"stopped by {number.name}; no process is left")
    return 128 + number


def _quiet_agent() -> None:
    """Silence the agent's log, which retells each failure; LOGLEVEL brings it back, as for torchrun."""
    if "LOGLEVEL" not in os.environ:
        log = logging.getLogger("torch.distributed.elastic")
        log.addHandler(logging.NullHandler())
        log.propagate = False


def _say(text: str) -> None:
    print(f"hotloop launch: {text}", file=sys.stderr, flush=True)
