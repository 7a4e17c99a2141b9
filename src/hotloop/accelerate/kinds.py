"""The small types of the look-alike: enumerations, configurations, keyword handlers and plugins."""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from hotloop.accelerate.unsupported import unsupported_class
from hotloop.errors import SettingError

__all__ = [
    "AORecipeKwargs",
    "AutocastKwargs",
    "BaseEnum",
    "BnbQuantizationConfig",
    "ComputeEnvironment",
    "CustomDtype",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DeepSpeedPlugin",
    "DeepSpeedSequenceParallelConfig",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "DynamoBackend",
    "FP8BackendType",
    "FP8RecipeKwargs",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "KwargsHandler",
    "LoggerType",
    "MSAMPRecipeKwargs",
    "MegatronLMPlugin",
    "PrecisionType",
    "ProfileKwargs",
    "ProjectConfiguration",
    "RNGType",
    "SageMakerDistributedType",
    "TERecipeKwargs",
    "TensorInformation",
    "TorchContextParallelConfig",
    "TorchDynamoPlugin",
    "TorchTensorParallelConfig",
    "TorchTensorParallelPlugin",
]


class _AnswersIn(enum.EnumMeta):
    """`"bf16" in PrecisionType` asks whether there is a member of that value, on every Python version."""

    def __contains__(cls, item: object) -> bool:
        return isinstance(item, cls) or item in _values(cls)


def _values(kind: Any) -> list[Any]:
    return [member.value for member in kind.__members__.values()]


class BaseEnum(enum.Enum, metaclass=_AnswersIn):
    """An enumeration whose members print as their values."""

    def __str__(self) -> str:
        return str(self.value)

    @classmethod
    def list(cls) -> list[str]:
        """All values, as text."""
        return [str(member) for member in cls]


class DistributedType(str, enum.Enum):  # noqa: UP042 - prints as accelerate's does
    """How the processes of the run work together. Here: NO, MULTI_CPU, MULTI_GPU or MULTI_XPU."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_XPU = "MULTI_XPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    MEGATRON_LM = "MEGATRON_LM"


class SageMakerDistributedType(str, enum.Enum):  # noqa: UP042
    """How processes work together on SageMaker (named only; not supported)."""

    NO = "NO"
    DATA_PARALLEL = "DATA_PARALLEL"
    MODEL_PARALLEL = "MODEL_PARALLEL"


class FP8BackendType(str, enum.Enum):  # noqa: UP042
    """Which package trains in fp8. Here: NO."""

    NO = "NO"
    TE = "TE"
    MSAMP = "MSAMP"
    AO = "AO"


class ComputeEnvironment(str, enum.Enum):  # noqa: UP042
    """Where the run is."""

    LOCAL_MACHINE = "LOCAL_MACHINE"
    AMAZON_SAGEMAKER = "AMAZON_SAGEMAKER"


class DynamoBackend(str, BaseEnum):
    """Backend of torch.compile; its lower-case value is torch's own name."""

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    AOT_TS_NVFUSER = "AOT_TS_NVFUSER"
    NVPRIMS_NVFUSER = "NVPRIMS_NVFUSER"
    CUDAGRAPHS = "CUDAGRAPHS"
    OFI = "OFI"
    FX2TRT = "FX2TRT"
    ONNXRT = "ONNXRT"
    TENSORRT = "TENSORRT"
    AOT_TORCHXLA_TRACE_ONCE = "AOT_TORCHXLA_TRACE_ONCE"
    TORCHXLA_TRACE_ONCE = "TORCHXLA_TRACE_ONCE"
    TVM = "TVM"
    HPU_BACKEND = "HPU_BACKEND"
    NEURON = "NEURON"


class LoggerType(BaseEnum):
    """Trackers that `log_with` can name."""

    ALL = "all"
    AIM = "aim"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"
    COMETML = "comet_ml"
    MLFLOW = "mlflow"
    CLEARML = "clearml"
    DVCLIVE = "dvclive"
    SWANLAB = "swanlab"
    JSON = "json"


class PrecisionType(str, BaseEnum):
    """Values of `mixed_precision`."""

    NO = "no"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"


class RNGType(BaseEnum):
    """Random generators that can be made equal on all ranks."""

    TORCH = "torch"
    CUDA = "cuda"
    XPU = "xpu"
    NPU = "npu"
    MLU = "mlu"
    SDAA = "sdaa"
    MUSA = "musa"
    HPU = "hpu"
    NEURON = "neuron"
    XLA = "xla"
    GENERATOR = "generator"


class CustomDtype(enum.Enum):
    """Number formats that torch has no dtype for."""

    FP8 = "fp8"
    INT4 = "int4"
    INT2 = "int2"


class DDPCommunicationHookType(BaseEnum):
    """How DDP compresses gradients on the wire."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


class KwargsHandler:
    """Base of the dataclasses given as `kwargs_handlers`."""

    def to_dict(self) -> dict[str, Any]:
        """All fields."""
        return copy.deepcopy(self.__dict__)

    def to_kwargs(self) -> dict[str, Any]:
        """The fields that differ from the class's defaults."""
        defaults = type(self)().to_dict()
        return {name: value for name, value in self.to_dict().items() if value != defaults[name]}


@dataclass
class AutocastKwargs(KwargsHandler):
    """Arguments of torch.autocast."""

    enabled: bool = True
    cache_enabled: bool | None = None


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """Arguments of torch's DistributedDataParallel, and its communication hook."""

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_wrapper: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_state_option: dict[str, Any] = field(default_factory=dict)

    def to_dict(
        self, ignore_keys: tuple[str, ...] = ("comm_hook", "comm_wrapper", "comm_state_option")
    ) -> dict[str, Any]:
        """The fields that DistributedDataParallel itself takes."""
        return {name: value for name, value in super().to_dict().items() if name not in ignore_keys}

    def register_comm_hook(self, model: Any) -> None:
        """Register torch's hook of that name on the DistributedDataParallel `model`, wrapped if so asked."""
        if self.comm_hook == DDPCommunicationHookType.NO:
            return
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        kinds = DDPCommunicationHookType
        hook: Any = {
            kinds.FP16: default_hooks.fp16_compress_hook,
            kinds.BF16: default_hooks.bf16_compress_hook,
            kinds.POWER_SGD: powerSGD_hook.powerSGD_hook,
            kinds.BATCHED_POWER_SGD: powerSGD_hook.batched_powerSGD_hook,
        }[self.comm_hook]
        wrapper = {
            kinds.FP16: default_hooks.fp16_compress_wrapper,
            kinds.BF16: default_hooks.bf16_compress_wrapper,
        }.get(self.comm_wrapper)
        if wrapper is not None:
            hook = wrapper(hook)
        powered = self.comm_hook in (kinds.POWER_SGD, kinds.BATCHED_POWER_SGD)
        state = powerSGD_hook.PowerSGDState(None, **self.comm_state_option) if powered else None
        model.register_comm_hook(state=state, hook=hook)


@dataclass
class GradScalerKwargs(KwargsHandler):
    """How fp16's loss scale starts and moves."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """Arguments of torch.distributed.init_process_group; `timeout` defaults to torch's 10 or 30 minutes."""

    backend: str | None = "nccl"
    init_method: str | None = None
    timeout: timedelta | None = None

    def __post_init__(self) -> None:
        if self.timeout is None:
            self.timeout = timedelta(seconds=600 if self.backend == "nccl" else 1800)


@dataclass
class ProfileKwargs(KwargsHandler):
    """Arguments of torch.profiler.profile; `output_trace_dir` gets one trace per process."""

    activities: list[str] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None

    def _get_profiler_activity(self, activity: str) -> Any:
        known = {kind.name.lower(): kind for kind in torch.profiler.ProfilerActivity.__members__.values()}
        if activity not in known:
            raise SettingError(f"Invalid profiler activity: {activity!r}; choose among {sorted(known)}")
        return known[activity]

    def build(self) -> Any:
        """A torch.profiler.profile with these arguments."""
        from torch import profiler

        activities = (
            None if self.activities is None else [self._get_profiler_activity(a) for a in self.activities]
        )
        return profiler.profile(
            activities=activities,
            schedule=profiler.schedule(**self.schedule_option) if self.schedule_option else None,
            on_trace_ready=self.on_trace_ready,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
        )


@dataclass
class TensorInformation:
    """Shape and dtype of a tensor that is elsewhere."""

    shape: torch.Size
    dtype: torch.dtype


@dataclass
class DataLoaderConfiguration:
    """How prepared loaders divide and deliver batches.

    Attributes:
        split_batches: the loader's batch is the global one and is divided among ranks; otherwise each rank
            gets batches of the loader's size.
        dispatch_batches: rank 0 reads and sends the others their parts; None: for iterable datasets only.
        even_batches: complete the last round with samples from the start, so that all ranks get as many.
        use_seedable_sampler: shuffle by seed and epoch, reproducibly.
        data_seed: that seed; None: torch's initial seed.
        non_blocking: kept for its name; copies from pinned memory never block here.
        use_stateful_dataloader: save and load the position inside the epoch too.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False


@dataclass
class ProjectConfiguration:
    """Where a run writes. `logging_dir` defaults to `project_dir`; checkpoints can be numbered and few."""

    project_dir: str | None = None
    logging_dir: str | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def set_directories(self, project_dir: str | None = None) -> None:
        """Set the project's folder, and the log folder if it has none."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir

    def __post_init__(self) -> None:
        self.set_directories(self.project_dir)


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """How micro-batches add up to an update.

    Attributes:
        num_steps: micro-batches per update.
        adjust_scheduler: schedulers count micro-batches without an update too.
        sync_with_dataloader: the end of a loader is always an update.
        sync_each_batch: exchange gradients at every micro-batch (less memory, more traffic).
        weighting: "steps" divides each micro-batch's loss by `num_steps`, whatever it holds, as scripts
            written for accelerate expect. "samples" also corrects each *applied* update for windows that
            are shorter or uneven, so that it is the gradient of all their samples; `p.grad` stays as with
            "steps" until `clip_grad_norm_` or `step`.
    """

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False
    weighting: str = "steps"

    def __post_init__(self) -> None:
        if self.weighting not in ("steps", "samples"):
            raise SettingError(f"weighting must be 'steps' or 'samples', not {self.weighting!r}")


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """Arguments of torch.compile, applied to prepared models."""

    backend: DynamoBackend | str | None = None
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: Any = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def __post_init__(self) -> None:
        backend = self.backend if self.backend is not None else "no"
        self.backend = DynamoBackend(str(backend).upper())
        self.mode = self.mode or "default"
        self.fullgraph = bool(self.fullgraph)
        self.use_regional_compilation = bool(self.use_regional_compilation)

    def to_dict(self) -> dict[str, Any]:
        """All fields, `backend` by torch's name."""
        fields = copy.deepcopy(self.__dict__)
        fields["backend"] = str(fields["backend"]).lower()
        return fields

    def to_kwargs(self) -> dict[str, Any]:
        """What torch.compile is called with."""
        kwargs = super().to_kwargs()
        kwargs.pop("use_regional_compilation", None)
        return kwargs


_FP8 = (
    "fp8 training is not part of the look-alike; use mixed_precision='bf16', or hotloop.Loop(precision='fp8')"
)
AORecipeKwargs = unsupported_class("AORecipeKwargs", _FP8)
TERecipeKwargs = unsupported_class("TERecipeKwargs", _FP8)
MSAMPRecipeKwargs = unsupported_class("MSAMPRecipeKwargs", _FP8)
FP8RecipeKwargs = unsupported_class("FP8RecipeKwargs", _FP8)
_SHARD = (
    "data parallelism by replicas is what is built; remove the plugin, or keep accelerate for this script"
)
DeepSpeedPlugin = unsupported_class("DeepSpeedPlugin", f"DeepSpeed is not used. {_SHARD}")
FullyShardedDataParallelPlugin = unsupported_class(
    "FullyShardedDataParallelPlugin",
    f"sharded parameters come with hotloop.Loop(parallel=...) later. {_SHARD}",
)
MegatronLMPlugin = unsupported_class("MegatronLMPlugin", f"Megatron-LM is not used. {_SHARD}")
TorchTensorParallelPlugin = unsupported_class("TorchTensorParallelPlugin", _SHARD)
TorchTensorParallelConfig = unsupported_class("TorchTensorParallelConfig", _SHARD)
TorchContextParallelConfig = unsupported_class("TorchContextParallelConfig", _SHARD)
DeepSpeedSequenceParallelConfig = unsupported_class("DeepSpeedSequenceParallelConfig", _SHARD)
BnbQuantizationConfig = unsupported_class(
    "BnbQuantizationConfig", "quantised loading is left to transformers and bitsandbytes themselves"
)
