"""Which process this is and how gradients are accumulated, as the objects that scripts know them by.

Instances of one class share one state, as scripts expect: `PartialState()` anywhere gives the same answers.
They are views: the processes come from `hotloop.hardware`, and the counters belong to the Accelerator's loop.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import torch

from hotloop.accelerate.environment import parse_choice_from_env, parse_flag_from_env
from hotloop.accelerate.gradient_state import GradientState, attach
from hotloop.accelerate.installed import is_torch_xla_available
from hotloop.accelerate.interop import forget_state, share_state
from hotloop.accelerate.kinds import (
    DistributedType,
    DynamoBackend,
    TorchDynamoPlugin,
)
from hotloop.accelerate.shares import split_share
from hotloop.errors import HotloopError, ProcessError, SettingError
from hotloop.hardware import Processes, find_processes

__all__ = [
    "AcceleratorState",
    "GradientState",
    "PartialState",
    "StateError",
    "do_nothing",
    "is_initialized",
    "is_torch_xla_available",
]


class StateError(HotloopError, AttributeError):
    """A shared state was reset and not made again."""


def is_initialized() -> bool:
    """Whether an Accelerator has been made."""
    return bool(AcceleratorState._shared_state)


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """What a function restricted to another process becomes."""


class PartialState:
    """This process among those of the run, and its device; the processes are started on the first use.

    Args:
        cpu: use the CPU even where there is an accelerator.
        **kwargs: arguments of torch.distributed.init_process_group (backend, timeout, init_method).

    Attributes:
        device: where tensors go.
        distributed_type: NO, MULTI_CPU, MULTI_GPU or MULTI_XPU.
        num_processes, process_index, local_process_index: world size, rank, rank on this node.
        backend: of torch.distributed, None for one process.
        debug: collectives check the shapes of all ranks first (ACCELERATE_DEBUG_MODE).
        processes: the same as a `hotloop.hardware.Processes`.
    """

    _shared_state: ClassVar[dict[str, Any]] = {}
    _winds_up: ClassVar[bool] = False
    _known_attrs: ClassVar[list[str]] = [
        "_cpu",
        "_mixed_precision",
        "_shared_state",
        "backend",
        "debug",
        "device",
        "distributed_type",
        "fork_launched",
        "local_process_index",
        "num_processes",
        "process_index",
        "processes",
    ]

    device: torch.device
    distributed_type: DistributedType
    num_processes: int
    process_index: int
    local_process_index: int
    backend: str | None
    debug: bool
    processes: Processes

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        self.__dict__ = self._shared_state
        if not self.initialized:
            self._start(cpu or parse_flag_from_env("ACCELERATE_USE_CPU"), kwargs)
        self.fork_launched = parse_flag_from_env("FORK_LAUNCHED", False)

    def _start(self, cpu: bool, group_options: dict[str, Any]) -> None:
        device = _choose_device(cpu)
        group_options.pop("_use_sagemaker_dp", None)
        processes = _start_processes(device.type, group_options)
        self._cpu = cpu
        self.debug = parse_flag_from_env("ACCELERATE_DEBUG_MODE")
        self.processes = processes
        self.backend = processes.backend
        self.num_processes = processes.world
        self.process_index = processes.rank
        self.local_process_index = processes.local_rank
        self.device = device
        kind = {"cuda": "MULTI_GPU", "xpu": "MULTI_XPU"}.get(device.type, "MULTI_CPU")
        self.distributed_type = DistributedType(kind) if processes.world > 1 else DistributedType.NO
        share_state(self._shared_state, None)
        if processes.world > 1 and not PartialState._winds_up:
            PartialState._winds_up = True
            atexit.register(_wind_up)

    def __repr__(self) -> str:
        backend = f"  Backend: {self.backend}" if self.backend else ""
        return (
            f"Distributed environment: {self.distributed_type}{backend}\n"
            f"Num processes: {self.num_processes}\n"
            f"Process index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\n"
            f"Device: {self.device}\n"
        )

    @staticmethod
    def _reset_state() -> None:
        """Forget everything; the next instance looks again. Meant for tests."""
        PartialState._shared_state.clear()
        forget_state()

    @property
    def initialized(self) -> bool:
        """Whether the shared state is there."""
        return bool(self._shared_state)

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one process."""
        return self.distributed_type != DistributedType.NO and self.num_processes > 1

    @property
    def is_main_process(self) -> bool:
        """True in one process of the run."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """True in one process of each node."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """True in the process of the highest rank."""
        return self.process_index == self.num_processes - 1

    @property
    def default_device(self) -> torch.device:
        """The device that is used when nothing else is asked for."""
        return _choose_device(False)

    def wait_for_everyone(self) -> None:
        """Return once every process has arrived."""
        self.processes.barrier()

    @contextlib.contextmanager
    def _ahead_of_others(self, is_first: bool) -> Iterator[None]:
        # the rank that goes first releases the others even when its block raises: they would wait for ever
        if not is_first:
            self.wait_for_everyone()
        try:
            yield
        finally:
            if is_first:
                self.wait_for_everyone()

    def main_process_first(self) -> contextlib.AbstractContextManager[None]:
        """The main process runs the block before the others enter it."""
        return self._ahead_of_others(self.is_main_process)

    def local_main_process_first(self) -> contextlib.AbstractContextManager[None]:
        """The main process of each node runs the block before the others of the node enter it."""
        return self._ahead_of_others(self.is_local_main_process)

    @contextlib.contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """This process's share of `inputs`: the first ranks get one more where it does not divide.

        Args:
            inputs: list, tuple, tensor, datasets.Dataset, or a dict of such, all of the same length.
            apply_padding: repeat the last element until all shares are as long.

        Raises:
            SettingError: the values of a dict differ in length.
        """
        yield split_share(inputs, self.num_processes, self.process_index, self.device, apply_padding)

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Decorator: runs the function in the main process only."""
        if not self.initialized:
            raise ProcessError("make a PartialState() or an Accelerator() before this decorator is used")
        if function is None:
            return self.on_main_process
        return function if self.is_main_process or not self.use_distributed else do_nothing

    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Decorator: runs the function in one process of each node only."""
        if function is None:
            return self.on_local_main_process
        return function if self.is_local_main_process or not self.use_distributed else do_nothing

    def on_last_process(self, function: Callable[..., Any]) -> Any:
        """Decorator: runs the function in the last process only."""
        return function if self.is_last_process or not self.use_distributed else do_nothing

    def on_process(self, function: Callable[..., Any] | None = None, process_index: int | None = None) -> Any:
        """Decorator: runs the function in the process of that rank only."""
        if function is None:
            return partial(self.on_process, process_index=process_index)
        return function if self.process_index == process_index or not self.use_distributed else do_nothing

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Any:
        """Decorator: runs the function in the process of that rank on each node only."""
        if function is None:
            return partial(self.on_local_process, local_process_index=local_process_index)
        mine = self.local_process_index == local_process_index
        return function if mine or not self.use_distributed else do_nothing

    def print(self, *args: Any, **kwargs: Any) -> None:
        """`print` in one process of each node."""
        if self.is_local_main_process:
            print(*args, **kwargs)

    def set_device(self) -> None:
        """Nothing left to do: the device is chosen when the state is made."""

    def destroy_process_group(self, group: Any = None) -> None:
        """Close torch.distributed (or one group of it), if it is up."""
        if self.fork_launched and group is None:
            return
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group(group)

    def __reduce__(self) -> Any:
        return attach, (PartialState,)

    def __getattr__(self, name: str) -> Any:
        raise _missing("PartialState", name, self._known_attrs)


class AcceleratorState:
    """What `PartialState` knows, and the precision; made by `Accelerator`, shared by all.

    Args:
        mixed_precision: "no", "bf16" or "fp16"; None: ACCELERATE_MIXED_PRECISION, else "no".
        cpu: use the CPU.

    Raises:
        SettingError: no Accelerator has been made, or the state exists with another precision or device.
    """

    _shared_state: ClassVar[dict[str, Any]] = {}
    _known_attrs: ClassVar[list[str]] = [
        *PartialState._known_attrs,
        "deepspeed_plugin",
        "dynamo_plugin",
        "fsdp_plugin",
        "megatron_lm_plugin",
    ]

    device: torch.device
    distributed_type: DistributedType
    num_processes: int
    process_index: int
    local_process_index: int
    processes: Processes

    def __init__(
        self,
        mixed_precision: str | None = None,
        cpu: bool = False,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        parallelism_config: Any = None,
        _from_accelerator: bool = False,
        **kwargs: Any,
    ) -> None:
        self.__dict__ = self._shared_state
        cpu = cpu or parse_flag_from_env("ACCELERATE_USE_CPU")
        ready = self.initialized
        if not PartialState._shared_state:
            PartialState(cpu, **kwargs)
        if ready:
            self._refuse_change(mixed_precision, cpu)
            self.__dict__.update(PartialState._shared_state)
            return
        if not _from_accelerator:
            raise SettingError(
                "the shared state has not been made: write `accelerator = Accelerator()` before anything "
                "that needs it (PartialState() alone is enough to ask for ranks and devices)"
            )
        self.__dict__.update(PartialState._shared_state)
        if mixed_precision is None:
            mixed_precision = parse_choice_from_env("ACCELERATE_MIXED_PRECISION", "no")
        self._mixed_precision = mixed_precision.lower()
        self.dynamo_plugin = dynamo_plugin if dynamo_plugin is not None else TorchDynamoPlugin()
        self.deepspeed_plugins = None
        self.fsdp_plugin = None
        self.megatron_lm_plugin = None
        self.torch_tp_plugin = None
        self.parallelism_config = parallelism_config
        self.device_mesh = None
        share_state(PartialState._shared_state, self._mixed_precision)
        if (
            self.dynamo_plugin.backend != DynamoBackend.NO
            and self._mixed_precision == "no"
            and self.device.type == "cuda"
        ):
            torch.backends.cuda.matmul.allow_tf32 = True

    @property
    def initialized(self) -> bool:
        """Whether an Accelerator has made the shared state."""
        return "_mixed_precision" in self._shared_state

    def _refuse_change(self, mixed_precision: str | None, cpu: bool) -> None:
        text = (
            "AcceleratorState has already been initialized and cannot be changed, restart your runtime "
            "completely and pass `{}` to `Accelerator()`."
        )
        if cpu and self.device.type != "cpu":
            raise SettingError(text.format("cpu=True"))
        if mixed_precision is not None and mixed_precision != self._mixed_precision:
            raise SettingError(text.format(f"mixed_precision={mixed_precision!r}"))

    def __repr__(self) -> str:
        return f"{PartialState()!r}\nMixed precision type: {self.mixed_precision}\n"

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        """Forget the precision (and the processes too, if so asked). Meant for tests."""
        AcceleratorState._shared_state.clear()
        forget_state()
        if reset_partial_state:
            PartialState._reset_state()

    @property
    def mixed_precision(self) -> str:
        """The value of `mixed_precision`: "no", "bf16" or "fp16"."""
        return str(self._mixed_precision)

    @property
    def deepspeed_plugin(self) -> None:
        """None: DeepSpeed is not used."""
        return None

    @property
    def is_fsdp2(self) -> bool:
        """False: parameters are not sharded."""
        return False

    @property
    def fork_launched(self) -> bool:
        """Whether a notebook launcher forked this process."""
        return bool(PartialState().fork_launched)

    @fork_launched.setter
    def fork_launched(self, value: bool) -> None:
        PartialState().fork_launched = value

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one process."""
        return PartialState().use_distributed

    @property
    def is_main_process(self) -> bool:
        """True in one process of the run."""
        return PartialState().is_main_process

    @property
    def is_local_main_process(self) -> bool:
        """True in one process of each node."""
        return PartialState().is_local_main_process

    @property
    def is_last_process(self) -> bool:
        """True in the process of the highest rank."""
        return PartialState().is_last_process

    def wait_for_everyone(self) -> None:
        """Return once every process has arrived."""
        PartialState().wait_for_everyone()

    def split_between_processes(
        self, inputs: Any, apply_padding: bool = False
    ) -> contextlib.AbstractContextManager[Any]:
        """As `PartialState.split_between_processes`."""
        return PartialState().split_between_processes(inputs, apply_padding=apply_padding)

    def main_process_first(self) -> contextlib.AbstractContextManager[None]:
        """The main process runs the block before the others enter it."""
        return PartialState().main_process_first()

    def local_main_process_first(self) -> contextlib.AbstractContextManager[None]:
        """The main process of each node runs the block before the others of the node enter it."""
        return PartialState().local_main_process_first()

    def destroy_process_group(self, group: Any = None) -> None:
        """Close torch.distributed (or one group of it), if it is up."""
        PartialState().destroy_process_group(group)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """`print` in one process of each node."""
        PartialState().print(*args, **kwargs)

    def __reduce__(self) -> Any:
        return attach, (AcceleratorState,)

    def __getattr__(self, name: str) -> Any:
        raise _missing("AcceleratorState", name, self._known_attrs)


def _wind_up() -> None:
    """Let gloo's threads drop the tensors of the last exchange while there is an interpreter to drop them in.

    A thread that asks for the interpreter's lock when it is being closed down is ended in the middle of C++
    code, which takes the whole process down with it (SIGABRT, after all the work is done).
    """
    time.sleep(0.05)


def _missing(kind: str, name: str, known: list[str]) -> AttributeError:
    if name in known:
        return StateError(
            f"`{kind}` object has no attribute `{name}`. This happens if `{kind}._reset_state()` was called "
            "and no `Accelerator` or `PartialState` was made again afterwards; make one."
        )
    return AttributeError(f"{kind!r} object has no attribute {name!r}")


def _choose_device(cpu: bool) -> torch.device:
    """The device of this process: asked for by name, the CPU, or the accelerator of its local rank."""
    named = os.environ.get("ACCELERATE_TORCH_DEVICE")
    if named is not None:
        return torch.device(named)
    if cpu or not torch.accelerator.is_available():
        return torch.device("cpu")
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    if kind.type == "mps":
        return torch.device("mps")
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "-1")))
    if local_rank < 0:
        return torch.device(kind.type)
    device = torch.device(kind.type, local_rank % torch.accelerator.device_count())
    torch.accelerator.set_device_index(device.index)
    return device


def _start_processes(device_type: str, options: dict[str, Any]) -> Processes:
    """The run's processes, joined by torch.distributed with the user's options if it is not up yet."""
    import torch.distributed as dist

    options = {key: value for key, value in options.items() if value is not None}
    timeout = options.pop("timeout", None)
    if options.get("backend") == "nccl" and device_type != "cuda":
        options.pop("backend")  # the handler's own default, not a wish
    if options and dist.is_available() and not dist.is_initialized() and "RANK" in os.environ:
        dist.init_process_group(**options, **({} if timeout is None else {"timeout": timeout}))
    if timeout is not None:
        return find_processes(device_type, timeout_s=timeout.total_seconds())
    return find_processes(device_type)
