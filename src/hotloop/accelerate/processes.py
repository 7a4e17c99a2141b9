"""Members of `Accelerator` about processes: which one this is, and values of all of them together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from hotloop.accelerate import operations
from hotloop.accelerate.kinds import DistributedType
from hotloop.accelerate.models import extract_model_from_parallel
from hotloop.accelerate.state import AcceleratorState, GradientState, PartialState
from hotloop.nested import map_tensors
from hotloop.parallel import collectives
from hotloop.parallel.collectives import StructureError, require_tensors

__all__ = ["ProcessMembers"]


class ProcessMembers:
    """The part of `Accelerator` that knows of other processes."""

    state: AcceleratorState
    gradient_state: GradientState
    flag_tensor: torch.Tensor | None

    @property
    def device(self) -> torch.device:
        """Where tensors go."""
        return self.state.device

    @property
    def distributed_type(self) -> DistributedType:
        """NO, MULTI_CPU, MULTI_GPU or MULTI_XPU."""
        return self.state.distributed_type

    @property
    def num_processes(self) -> int:
        """How many processes there are."""
        return self.state.num_processes

    @property
    def process_index(self) -> int:
        """The rank of this process."""
        return self.state.process_index

    @property
    def local_process_index(self) -> int:
        """The rank of this process on its node."""
        return self.state.local_process_index

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one process."""
        return self.state.use_distributed

    @property
    def multi_device(self) -> bool:
        """Whether replicas on several processes train together."""
        kinds = (DistributedType.MULTI_GPU, DistributedType.MULTI_XPU, DistributedType.MULTI_CPU)
        return self.use_distributed and self.distributed_type in kinds

    @property
    def is_main_process(self) -> bool:
        """True in one process of the run."""
        return self.state.is_main_process

    @property
    def is_local_main_process(self) -> bool:
        """True in one process of each node."""
        return self.state.is_local_main_process

    @property
    def is_last_process(self) -> bool:
        """True in the process of the highest rank."""
        return self.process_index == self.num_processes - 1

    @property
    def deepspeed_plugin(self) -> None:
        """None: DeepSpeed is not used."""
        return None

    @property
    def is_fsdp2(self) -> bool:
        """False: parameters are not sharded."""
        return False

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """False: there are only replicas."""
        return False

    @property
    def parallelism_config(self) -> Any:
        """As given to the constructor."""
        return self.state.parallelism_config

    @property
    def torch_device_mesh(self) -> None:
        """None: there are only replicas."""
        return None

    @property
    def should_save_model(self) -> bool:
        """True: every rank holds the whole model."""
        return True

    @property
    def tensor_parallel_rank(self) -> int:
        """0: tensors are not divided."""
        return 0

    @property
    def pipeline_parallel_rank(self) -> int:
        """0: there is no pipeline."""
        return 0

    @property
    def context_parallel_rank(self) -> int:
        """0: sequences are not divided."""
        return 0

    @property
    def data_parallel_rank(self) -> int:
        """The rank of this replica."""
        return self.process_index

    @property
    def data_parallel_shard_rank(self) -> int:
        """0: parameters are not sharded."""
        return 0

    def split_between_processes(
        self, inputs: Any, apply_padding: bool = False
    ) -> contextlib.AbstractContextManager[Any]:
        """This process's share of a list, tuple, tensor, dataset, or dict of such."""
        return PartialState().split_between_processes(inputs, apply_padding=apply_padding)

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Decorator: runs the function in the main process only."""
        return PartialState().on_main_process(function)

    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Decorator: runs the function in one process of each node only."""
        return PartialState().on_local_main_process(function)

    def on_last_process(self, function: Callable[..., Any]) -> Any:
        """Decorator: runs the function in the last process only."""
        return PartialState().on_last_process(function)

    def on_process(self, function: Callable[..., Any] | None = None, process_index: int | None = None) -> Any:
        """Decorator: runs the function in the process of that rank only."""
        return PartialState().on_process(function, process_index)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Any:
        """Decorator: runs the function in the process of that rank on each node only."""
        return PartialState().on_local_process(function, local_process_index)

    def main_process_first(self) -> contextlib.AbstractContextManager[None]:
        """The main process runs the block before the others enter it."""
        return self.state.main_process_first()

    def local_main_process_first(self) -> contextlib.AbstractContextManager[None]:
        """The main process of each node runs the block before the others of the node enter it."""
        return self.state.local_main_process_first()

    def wait_for_everyone(self) -> None:
        """Return once every process has arrived."""
        PartialState().wait_for_everyone()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """`print` in one process of each node."""
        self.state.print(*args, **kwargs)

    def set_trigger(self) -> None:
        """Tell all ranks, at their next `check_trigger`, that this one wants something (such as to stop)."""
        self.flag_tensor = torch.ones((), dtype=torch.int32)

    def check_trigger(self) -> bool:
        """Whether any rank has called `set_trigger` since the last time; collective, on the host alone."""
        mine = self.flag_tensor is not None
        self.flag_tensor = None
        return any(PartialState().processes.gather_object(mine))

    def gather(self, tensor: Any) -> Any:
        """The tensors of all ranks along their first dimension."""
        return operations.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """`gather` without what was repeated to complete the last batch; objects that are no tensors are gathered too.

        The last batch may have another size on each rank.
        """
        processes = PartialState().processes
        try:
            require_tensors(input_data)
        except StructureError:
            use_gather_object = True
        last = self.gradient_state.end_of_dataloader
        if use_gather_object:
            data = operations.gather_object(input_data)
        elif last and processes.world > 1:
            data = collectives.gather(input_data, processes, uneven=True)
        else:
            data = operations.gather(input_data)
        remainder = self.gradient_state.remainder if last else -1
        if remainder <= 0:
            return data
        if use_gather_object:
            return data[:remainder] if processes.world > 1 else data
        return map_tensors(data, lambda t: t[:remainder] if t.ndim else t)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Elementwise "sum", "mean" or "max" over the ranks, times `scale`."""
        return operations.reduce(tensor, reduction, scale)

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: Any = 0, pad_first: bool = False
    ) -> Any:
        """Tensors grown along `dim` to the largest size of any rank."""
        return operations.pad_across_processes(tensor, dim=dim, pad_index=pad_index, pad_first=pad_first)

    def unwrap_model(
        self, model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> Any:
        """The user's module: a prepared one is that already."""
        return extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile)
