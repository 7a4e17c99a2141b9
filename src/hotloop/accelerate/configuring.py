"""Members of `Accelerator` about its settings, and the Loop that is made from them."""

from __future__ import annotations

from typing import Any

from hotloop.accelerate.environment import parse_choice_from_env, parse_flag_from_env
from hotloop.accelerate.gradient_state import GradientState
from hotloop.accelerate.kinds import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    FP8BackendType,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
)
from hotloop.accelerate.scale import ScaleView
from hotloop.accelerate.state import AcceleratorState
from hotloop.accelerate.unsupported import refuse
from hotloop.errors import SettingError
from hotloop.loop.loop import Loop
from hotloop.parallel.plan import Plan

__all__ = ["ConfiguringMembers", "choose_plugin", "refuse_plugins"]


class ConfiguringMembers:
    """The part of `Accelerator` that holds what it was configured with."""

    state: AcceleratorState
    gradient_state: GradientState
    dataloader_config: DataLoaderConfiguration
    _nonfinite: str

    def _take_handlers(self, handlers: list[KwargsHandler]) -> None:
        self.ddp_handler: DistributedDataParallelKwargs | None = None
        self.scaler_handler: GradScalerKwargs | None = None
        self.init_handler: InitProcessGroupKwargs | None = None
        self.autocast_handler: AutocastKwargs | None = None
        self.profile_handler: ProfileKwargs | None = None
        names = {
            DistributedDataParallelKwargs: "ddp_handler",
            GradScalerKwargs: "scaler_handler",
            InitProcessGroupKwargs: "init_handler",
            AutocastKwargs: "autocast_handler",
            ProfileKwargs: "profile_handler",
        }
        for handler in handlers:
            name = next((name for kind, name in names.items() if isinstance(handler, kind)), None)
            if name is None:
                raise SettingError(f"Unsupported kwargs handler passed: {handler!r}")
            if getattr(self, name) is not None:
                raise SettingError(f"You can only pass one {type(handler)} in `kwargs_handlers`.")
            setattr(self, name, handler)

    def _make_loop(self) -> Loop:
        loop = Loop(
            precision={"no": "fp32"}.get(self.state.mixed_precision, self.state.mixed_precision),
            accumulation=1,
            nonfinite=self._nonfinite,
            device=self.state.device,
            parallel=self._plan(),
            record=False,
        )
        # scripts decide by themselves which micro-batch is an update and what a loss weighs
        loop._window.plain = True
        loop._plain = not loop.precision.scaled
        if self.scaler_handler is not None and loop.precision.scaled:
            ScaleView(loop).configure(self.scaler_handler)
        return loop

    def _plan(self) -> Plan:
        handler = self.ddp_handler
        if handler is None:
            return Plan()
        return Plan(
            find_unused_parameters=handler.find_unused_parameters,
            static_graph=handler.static_graph,
            bucket_mb=handler.bucket_cap_mb,
            broadcast_buffers=handler.broadcast_buffers,
        )

    @property
    def mixed_precision(self) -> str:
        """ "no", "bf16" or "fp16"."""
        return self.state.mixed_precision

    @property
    def split_batches(self) -> bool:
        """Whether a loader's batch is the global one."""
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether rank 0 reads for all; None: iterable datasets only."""
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Whether the last round is completed so that all ranks get as many batches."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self.dataloader_config.even_batches = value

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether loaders shuffle by seed and epoch."""
        return self.dataloader_config.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """As configured; copies never make the host wait here."""
        return self.dataloader_config.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether loaders' positions are saved and loaded."""
        return self.dataloader_config.use_stateful_dataloader

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch completes an update."""
        return self.gradient_state.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self.gradient_state.sync_gradients = value

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per update."""
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        self.gradient_state.plugin_kwargs["num_steps"] = value

    @property
    def fp8_backend(self) -> FP8BackendType:
        """NO: fp8 is not part of the look-alike."""
        return FP8BackendType.NO


def refuse_plugins(**plugins: Any) -> None:
    """Raise for the first plugin that is given, or asked for by accelerate's environment variables.

    Raises:
        UnsupportedError: there is one.
    """
    for name, plugin in plugins.items():
        if plugin is not None:
            refuse(f"Accelerator({name}=...)", "models are replicated; remove the argument")
    for variable in ("DEEPSPEED", "FSDP", "MEGATRON_LM", "PARALLELISM_CONFIG"):
        if parse_flag_from_env(f"ACCELERATE_USE_{variable}"):
            refuse(f"ACCELERATE_USE_{variable}", "models are replicated; unset the variable")


def choose_plugin(steps: int, plugin: GradientAccumulationPlugin | None) -> GradientAccumulationPlugin:
    """The plugin given, or one made of the number of steps and ACCELERATE_GRADIENT_ACCUMULATION_STEPS.

    Raises:
        SettingError: both are given.
    """
    if plugin is not None:
        if steps != 1:
            raise SettingError("give gradient_accumulation_steps or gradient_accumulation_plugin, not both")
        return plugin
    text = parse_choice_from_env("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", str(steps))
    return GradientAccumulationPlugin(num_steps=int(text))
