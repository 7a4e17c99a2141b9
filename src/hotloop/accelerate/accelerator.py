"""`Accelerator`: the object that scripts written for accelerate drive their training with, on a `hotloop.Loop`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from hotloop.accelerate.configuring import choose_plugin, refuse_plugins
from hotloop.accelerate.data_loader import prepare_data_loader, skip_first_batches
from hotloop.accelerate.filenames import PROFILE_PATTERN_NAME
from hotloop.accelerate.kinds import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DynamoBackend,
    GradientAccumulationPlugin,
    KwargsHandler,
    PrecisionType,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from hotloop.accelerate.memory import release_memory
from hotloop.accelerate.models import compile_regions
from hotloop.accelerate.optimizer import AcceleratedOptimizer
from hotloop.accelerate.saving import SavingMembers
from hotloop.accelerate.scale import ScaleView
from hotloop.accelerate.scheduler import AcceleratedScheduler
from hotloop.accelerate.state import AcceleratorState, GradientState
from hotloop.accelerate.trackers import TrackingMembers
from hotloop.accelerate.tracking import filter_trackers
from hotloop.accelerate.unsupported import refuse
from hotloop.accelerate.weighting import SampleWeighting
from hotloop.accelerate.windows import WindowMembers
from hotloop.errors import SettingError
from hotloop.loop.modules import Binding, bind_module, binding_of
from hotloop.loop.updates import updates_of

__all__ = [
    "Accelerator",
    "DataLoaderConfiguration",
    "GradientAccumulationPlugin",
    "ProjectConfiguration",
]


class Accelerator(WindowMembers, TrackingMembers, SavingMembers):
    """Prepares objects for this machine and these processes, and does each part of a step.

    Arguments are those of accelerate's class of the same name; what hotloop does not carry out raises and says what
    to use instead. See docs/accelerate-differences.md for what differs on purpose.

    Args:
        device_placement: batches go to the device.
        split_batches: a loader's batch is the global one.
        mixed_precision: "no", "bf16" or "fp16".
        gradient_accumulation_steps: micro-batches per update, with `accumulate`.
        cpu: use the CPU.
        dataloader_config: how loaders divide and deliver batches.
        deepspeed_plugin: not supported.
        fsdp_plugin: not supported.
        torch_tp_plugin: not supported.
        megatron_lm_plugin: not supported.
        rng_types: generators made equal on all ranks at the start of each epoch; default: that of the sampler.
        log_with: trackers, by name or as objects.
        project_dir: where checkpoints and logs go.
        project_config: the same and more.
        gradient_accumulation_plugin: instead of `gradient_accumulation_steps`.
        step_scheduler_with_optimizer: prepared schedulers follow updates.
        kwargs_handlers: arguments of torch's own parts.
        dynamo_backend: compile prepared models with this backend of torch.compile.
        dynamo_plugin: the same and more.
        deepspeed_plugins: not supported.
        parallelism_config: replicas only.
        nonfinite: hotloop's guard: "ignore" (accelerate's behaviour), "stop" or "skip".

    Attributes:
        loop: the Loop that does the work.
        state: processes, device and precision.
        gradient_state: where in the accumulation window and in its loaders the run is.

    Raises:
        SettingError: contradictory or unknown arguments.
        PrecisionError: the device does not compute in that precision.
        UnsupportedError: an argument that hotloop does not carry out.
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool = False,
        mixed_precision: PrecisionType | str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        rng_types: list[Any] | None = None,
        log_with: Any = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: list[KwargsHandler] | None = None,
        dynamo_backend: DynamoBackend | str | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugins: Any = None,
        parallelism_config: Any = None,
        nonfinite: str = "ignore",
    ) -> None:
        refuse_plugins(
            deepspeed_plugin=deepspeed_plugin or deepspeed_plugins,
            fsdp_plugin=fsdp_plugin,
            torch_tp_plugin=torch_tp_plugin,
            megatron_lm_plugin=megatron_lm_plugin,
        )
        folder = None if project_dir is None else os.fspath(project_dir)
        self.project_configuration = project_config or ProjectConfiguration(project_dir=folder)
        if folder is not None and self.project_configuration.project_dir is None:
            self.project_configuration.set_directories(folder)
        precision = None if mixed_precision is None else str(mixed_precision)
        if precision is not None and precision not in PrecisionType:
            raise SettingError(
                f"Unknown mixed_precision mode: {precision}. Choose between {PrecisionType.list()}"
            )
        if dynamo_plugin is not None and dynamo_backend is not None:
            raise SettingError("give dynamo_plugin or dynamo_backend, not both")
        if dynamo_plugin is None:
            dynamo_plugin = TorchDynamoPlugin(backend=dynamo_backend)
        self._take_handlers(kwargs_handlers or [])
        group_options = {} if self.init_handler is None else self.init_handler.to_kwargs()
        self.state = AcceleratorState(
            mixed_precision=precision,
            cpu=cpu,
            dynamo_plugin=dynamo_plugin,
            parallelism_config=parallelism_config,
            _from_accelerator=True,
            **group_options,
        )
        if self.state.mixed_precision == "fp8":
            refuse("mixed_precision='fp8'", "use 'bf16', or hotloop.Loop(precision='fp8')")
        self._nonfinite = nonfinite
        self.loop = self._make_loop()
        self.log_with = filter_trackers(log_with, self.logging_dir)
        self.trackers: list[Any] = []
        self._say_missing_trackers(log_with)
        self.gradient_state = GradientState(
            choose_plugin(gradient_accumulation_steps, gradient_accumulation_plugin)
        )
        self.device_placement = device_placement
        self.dataloader_config = dataloader_config or DataLoaderConfiguration(split_batches=split_batches)
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.rng_types = ["generator"] if rng_types is None else list(rng_types)
        self.native_amp = self.state.mixed_precision in ("bf16", "fp16")
        self.scaler = ScaleView(self.loop) if self.loop.precision.scaled else None
        self.step = 0
        self.flag_tensor: torch.Tensor | None = None
        self._weighting = SampleWeighting(self.loop.processes, self.device)
        self._models: list[Any] = []
        self._optimizers: list[AcceleratedOptimizer] = []
        self._schedulers: list[AcceleratedScheduler] = []
        self._dataloaders: list[Any] = []
        self._custom_objects: list[Any] = []
        self._make_hooks()

    # ------------------------------------------------------------------------------------------- preparing

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Ready models, optimizers, loaders and schedulers; other objects come back as they are.

        Models come back as the same objects. One argument comes back alone, several as a tuple.

        Raises:
            SettingError: `device_placement` has another length than `args`.
        """
        distributed = self.distributed_type  # raises if the shared state was reset
        del distributed
        places: list[bool | None] = [None] * len(args) if device_placement is None else list(device_placement)
        if len(places) != len(args):
            raise SettingError(
                f"`device_placement` should be a list with {len(args)} elements, not {len(places)}"
            )
        made = list(args)
        for kind, act in (
            (torch.nn.Module, self.prepare_model),
            (torch.optim.Optimizer, self.prepare_optimizer),
            (DataLoader, self.prepare_data_loader),
        ):
            for i, (thing, place) in enumerate(zip(args, places, strict=True)):
                if isinstance(thing, kind):
                    made[i] = act(thing, device_placement=place)
        for i, thing in enumerate(args):
            if isinstance(thing, LRScheduler | AcceleratedScheduler):
                made[i] = self.prepare_scheduler(thing)
        return tuple(made) if len(made) > 1 else made[0] if made else ()

    def prepare_model(
        self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """The same module on the device, its calls in the run's precision, its gradients shared by all ranks.

        Args:
            model: prepared once; later calls return it as it is.
            device_placement: False leaves a module where it is if it is on the device, else it is moved all the same.
            evaluation_mode: do not share gradients.
        """
        if any(model is known for known in self._models):
            return model
        self._models.append(model)
        if evaluation_mode:
            model.to(self.device)
            dtype = self.loop.precision.autocast
            if dtype is not None and binding_of(model) is None:
                bind_module(model, Binding(model, self.loop._window, self.device, dtype, None, None))
        else:
            self.loop.prepare(model)
        binding = binding_of(model)
        if binding is not None:
            if self.autocast_handler is not None and not self.autocast_handler.enabled:
                binding.dtype = None
            self._configure_replica(binding.replica)
        plugin: TorchDynamoPlugin = self.state.dynamo_plugin
        if plugin.backend != DynamoBackend.NO and not plugin.disable:
            kwargs = {k: v for k, v in plugin.to_kwargs().items() if k != "disable"}
            compile_regions(model, **kwargs) if plugin.use_regional_compilation else model.compile(**kwargs)
        model._is_accelerate_prepared = True
        return model

    def _configure_replica(self, replica: Any) -> None:
        handler = self.ddp_handler
        if replica is None or handler is None:
            return
        if handler.dim:
            refuse(
                "DistributedDataParallelKwargs(dim=...)", "torch uses it for several devices per process only"
            )
        if handler.comm_hook != DDPCommunicationHookType.NO:
            handler.register_comm_hook(replica)

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> AcceleratedOptimizer:
        """The optimizer behind a stand-in that acts on updates only."""
        if isinstance(optimizer, AcceleratedOptimizer):
            if not any(optimizer is known for known in self._optimizers):
                self._optimizers.append(optimizer)
            return optimizer
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.device != self.device and parameter.device.type != "meta":
                    # the module comes later: it moves its parameters in place too, so these stay the same objects
                    parameter.data = parameter.data.to(self.device)
        if optimizer.state:
            optimizer.load_state_dict(optimizer.state_dict())  # state follows its parameters
        self.loop.prepare(optimizer)
        prepared = AcceleratedOptimizer(
            optimizer, scaler=self.scaler, before_step=lambda: self._weighting.correct(optimizer)
        )
        prepared._is_accelerate_prepared = True  # type: ignore[attr-defined]
        self._optimizers.append(prepared)
        return prepared

    def prepare_data_loader(
        self,
        data_loader: Any,
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> Any:
        """A loader of this rank's share, with batches on the device."""
        if getattr(data_loader, "_is_accelerate_prepared", False):
            if not any(data_loader is known for known in self._dataloaders):
                self._dataloaders.append(data_loader)
            return data_loader
        prepared = prepare_data_loader(
            data_loader,
            self.device,
            num_processes=self.num_processes,
            process_index=self.process_index,
            split_batches=self.split_batches,
            put_on_device=self.device_placement if device_placement is None else device_placement,
            rng_types=list(self.rng_types),
            dispatch_batches=self.dispatch_batches,
            even_batches=self.even_batches,
            slice_fn_for_dispatch=slice_fn_for_dispatch,
            use_seedable_sampler=self.use_seedable_sampler,
            data_seed=self.dataloader_config.data_seed,
            non_blocking=self.non_blocking,
            use_stateful_dataloader=self.use_stateful_dataloader,
        )
        prepared._is_accelerate_prepared = True
        self._dataloaders.append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """The scheduler behind a stand-in that advances with updates."""
        if isinstance(scheduler, AcceleratedScheduler):
            if not any(scheduler is known for known in self._schedulers):
                self._schedulers.append(scheduler)
            return scheduler
        wanted = getattr(scheduler, "optimizer", None)
        mine = [opt for opt in self._optimizers if wanted is opt or wanted is opt.optimizer]
        # one step an update can be decided on the device, where an fp16 overflow is known without waiting
        resident = (
            self.loop.precision.scaled
            and self.step_scheduler_with_optimizer
            and len(mine) == 1
            and wanted is mine[0].optimizer
            and (self.split_batches or self.num_processes == 1)
        )
        if resident:
            self.loop.prepare(scheduler)
        prepared = AcceleratedScheduler(
            scheduler,
            mine or self._optimizers,
            step_with_optimizer=self.step_scheduler_with_optimizer,
            split_batches=self.split_batches,
            resident=resident,
        )
        prepared._is_accelerate_prepared = True  # type: ignore[attr-defined]
        self._schedulers.append(prepared)
        return prepared

    # ------------------------------------------------------------------------------------------- one step

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Backpropagate the loss of a micro-batch, divided by the number of micro-batches per update."""
        if "learning_rate" in kwargs:
            refuse("backward(learning_rate=...)", "LOMO optimizers are not supported")
        steps = self.gradient_state.num_steps
        if steps > 1:
            loss = loss / steps
        if self.gradient_state.plugin_kwargs.get("weighting") == "samples":
            loss = self._weighting.weigh(loss, steps, self.gradient_state.training_dataloader)
        self.loop.backward(loss, **kwargs)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Make `p.grad` true under fp16, for one optimizer, several, or all that are prepared."""
        if not self.loop.precision.scaled or not self.sync_gradients:
            return
        chosen = self._optimizers if optimizer is None else optimizer
        for one in chosen if isinstance(chosen, list | tuple) else [chosen]:
            while isinstance(one, AcceleratedOptimizer):
                one = one.optimizer
            updates = updates_of(one)
            if updates is not None:
                updates.make_true()

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """Clip the joint norm of the gradients; returns the norm before, 0-d, on the device.

        On a micro-batch without an update nothing is clipped.
        """
        listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if not self.sync_gradients:
            return torch.nn.utils.get_total_norm([p.grad for p in listed if p.grad is not None], norm_type)
        self._weighting.make_true(listed)
        wanted = {id(p) for p in listed}
        if any(
            id(p) in wanted for opt in self._optimizers for group in opt.param_groups for p in group["params"]
        ):
            return self.loop.clip_grad_norm_(listed, float(max_norm), float(norm_type))
        return torch.nn.utils.clip_grad_norm_(listed, max_norm, norm_type=norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip every element of the gradients to [-clip_value, clip_value]."""
        listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if self.sync_gradients:
            self._weighting.make_true(listed)
            self.unscale_gradients()
            torch.nn.utils.clip_grad_value_(listed, clip_value)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether an optimizer's last update was refused (an fp16 overflow); waits for the device then."""
        return any(optimizer.step_was_skipped for optimizer in self._optimizers)

    @contextlib.contextmanager
    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> Iterator[None]:
        """Operations inside run in the run's precision; a handler with `enabled=False` turns that off."""
        handler = autocast_handler or self.autocast_handler or AutocastKwargs()
        if not handler.enabled or self.loop.precision.autocast is None:
            with torch.autocast(self.device.type, enabled=False):
                yield
            return
        with torch.autocast(
            self.device.type, self.loop.precision.autocast, cache_enabled=handler.cache_enabled
        ):
            yield

    @contextlib.contextmanager
    def profile(self, profile_handler: ProfileKwargs | None = None) -> Iterator[Any]:
        """Profile the block with torch's profiler; a trace per process goes to the handler's folder."""
        handler = profile_handler or self.profile_handler or ProfileKwargs()
        with handler.build() as profiler:
            yield profiler
        if handler.output_trace_dir is not None:
            os.makedirs(handler.output_trace_dir, exist_ok=True)
            name = PROFILE_PATTERN_NAME.format(suffix=self.process_index)
            profiler.export_chrome_trace(os.path.join(handler.output_trace_dir, name))
            self.wait_for_everyone()

    # ------------------------------------------------------------------------------------------- the rest

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """A loader like `dataloader` without its first batches."""
        return skip_first_batches(dataloader, num_batches=num_batches)

    def free_memory(self, *objects: Any) -> list[None]:
        """Forget everything prepared; returns as many None as there are `objects`, to assign in their place."""
        self._models.clear()
        self._optimizers.clear()
        self._schedulers.clear()
        self._dataloaders.clear()
        self.step = 0
        count = len(objects)
        del objects
        self.loop.end_training()
        self.loop = self._make_loop()
        if self.scaler is not None:
            self.scaler = ScaleView(self.loop)
        release_memory()
        return [None] * count

    clear = free_memory

    def verify_device_map(self, model: Any) -> bool:
        """Whether some module was spread over several devices by a device map."""
        return any(len(set(getattr(m, "hf_device_map", {}).values())) > 1 for m in model.modules())

    @contextlib.contextmanager
    def maybe_context_parallel(
        self,
        buffers: list[torch.Tensor] | None = None,
        buffer_seq_dims: list[int] | None = None,
        no_restore_buffers: set[torch.Tensor] | None = None,
    ) -> Iterator[None]:
        """Does nothing: sequences are not divided among ranks."""
        yield

    def lomo_backward(self, loss: torch.Tensor, learning_rate: float) -> None:
        """Not supported."""
        refuse("lomo_backward", "LOMO optimizers are not supported; use backward and a prepared optimizer")

    def deepspeed_ulysses_dl_adapter(self, dl: Any, model: Any) -> Any:
        """Not supported."""
        refuse("deepspeed_ulysses_dl_adapter", "DeepSpeed is not used")

    def __deepcopy__(self, memo: dict[int, Any]) -> Accelerator:
        return self

    def __getstate__(self) -> dict[str, Any]:
        # the loop holds streams, files and threads of this process; another one makes its own
        gone = ("loop", "scaler", "_weighting", "trackers", "flag_tensor")
        return {name: value for name, value in self.__dict__.items() if name not in gone}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.trackers, self.flag_tensor = [], None
        self.loop = self._make_loop()
        self.scaler = ScaleView(self.loop) if self.loop.precision.scaled else None
        self._weighting = SampleWeighting(self.loop.processes, self.device)
