"""Which packages are installed and what the hardware can do: the `is_..._available` questions of scripts.

Whether a package is there is looked up once per process: a search through `sys.path` has no place in a loop.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from functools import lru_cache
from typing import Any

import torch

from hotloop.accelerate.environment import parse_flag_from_env
from hotloop.accelerate.versions import compare_versions, is_torch_version

# package questions: name of the question -> (module, distributions that provide it)
_PACKAGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "aim": ("aim", ("aim",)),
    "amdsmi": ("amdsmi", ("amdsmi",)),
    "boto3": ("boto3", ("boto3",)),
    "clearml": ("clearml", ("clearml",)),
    "comet_ml": ("comet_ml", ("comet_ml",)),
    "datasets": ("datasets", ("datasets",)),
    "deepspeed": ("deepspeed", ("deepspeed",)),
    "dvclive": ("dvclive", ("dvclive",)),
    "import_timer": ("import_timer", ("import_timer",)),
    "lomo": ("lomo_optim", ("lomo_optim", "lomo-optim")),
    "matplotlib": ("matplotlib", ("matplotlib",)),
    "mlflow": ("mlflow", ("mlflow", "mlflow-skinny")),
    "msamp": ("msamp", ("ms-amp",)),
    "pandas": ("pandas", ("pandas",)),
    "peft": ("peft", ("peft",)),
    "pynvml": ("pynvml", ("pynvml", "nvidia-ml-py")),
    "pytest": ("pytest", ("pytest",)),
    "sagemaker": ("sagemaker", ("sagemaker",)),
    "schedulefree": ("schedulefree", ("schedulefree",)),
    "swanlab": ("swanlab", ("swanlab",)),
    "timm": ("timm", ("timm",)),
    "torchdata": ("torchdata", ("torchdata",)),
    "torchvision": ("torchvision", ("torchvision",)),
    "tqdm": ("tqdm", ("tqdm",)),
    "trackio": ("trackio", ("trackio",)),
    "transformers": ("transformers", ("transformers",)),
    "triton": ("triton", ("triton", "pytorch-triton", "triton-xpu")),
    "wandb": ("wandb", ("wandb",)),
    "transformer_engine": ("transformer_engine", ("transformer-engine",)),
}

# devices of vendors that hotloop does not drive: the answer to whether they can be used is no
_OTHER_DEVICES = ("hpu", "mlu", "musa", "neuron", "npu", "sdaa", "torch_xla")

__all__ = [
    "is_4bit_bnb_available",
    "is_8bit_bnb_available",
    "is_bf16_available",
    "is_bitsandbytes_multi_backend_available",
    "is_bnb_available",
    "is_cuda_available",
    "is_fp8_available",
    "is_fp16_available",
    "is_habana_gaudi1",
    "is_megatron_lm_available",
    "is_mps_available",
    "is_numpy_available",
    "is_pippy_available",
    "is_rich_available",
    "is_rocm_available",
    "is_tensorboard_available",
    "is_torch_distributed_available",
    "is_torchao_available",
    "is_torchdata_stateful_dataloader_available",
    "is_transformer_engine_mxfp8_available",
    "is_weights_only_available",
    "is_xccl_available",
    "is_xpu_available",
    *(f"is_{name}_available" for name in _PACKAGES),
    *(f"is_{name}_available" for name in _OTHER_DEVICES),
]


@lru_cache
def _is_package_available(module: str, *distributions: str) -> bool:
    """Whether `module` can be imported and belongs to an installed distribution (not to a stray folder)."""
    if importlib.util.find_spec(module) is None:
        return False
    for name in distributions or (module,):
        try:
            importlib.metadata.metadata(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return True
    return False


def _package_question(name: str, module: str, distributions: tuple[str, ...]) -> Any:
    def question() -> bool:
        return _is_package_available(module, *distributions)

    question.__name__ = question.__qualname__ = f"is_{name}_available"
    question.__doc__ = f"Whether the package {distributions[0]} is installed."
    return question


def _no(name: str) -> Any:
    def question(*args: Any, **kwargs: Any) -> bool:
        return False

    question.__name__ = question.__qualname__ = name
    question.__doc__ = "False: hotloop does not drive this kind of device."
    return question


for _name, (_module, _distributions) in _PACKAGES.items():
    globals()[f"is_{_name}_available"] = _package_question(_name, _module, _distributions)
for _name in _OTHER_DEVICES:
    globals()[f"is_{_name}_available"] = _no(f"is_{_name}_available")
is_habana_gaudi1 = _no("is_habana_gaudi1")


def _has_version(module: str, lowest: str) -> bool:
    return _is_package_available(module) and compare_versions(module, ">=", lowest)


def is_torch_distributed_available() -> bool:
    """Whether torch was built with torch.distributed."""
    return torch.distributed.is_available()


def is_cuda_available() -> bool:
    """Whether there is a CUDA or ROCm device, asked so that it does not start the driver in this process."""
    return torch.cuda.is_available()


def is_rocm_available() -> bool:
    """Whether the CUDA device is one of AMD's."""
    return torch.version.hip is not None and torch.cuda.is_available()


def is_xpu_available(check_device: bool = False) -> bool:
    """Whether there is an Intel XPU."""
    return hasattr(torch, "xpu") and torch.xpu.is_available()


def is_mps_available(min_version: str = "1.12") -> bool:
    """Whether there is Apple's MPS device."""
    return torch.backends.mps.is_available() and torch.backends.mps.is_built()


def is_xccl_available() -> bool:
    """Whether torch.distributed has Intel's XCCL."""
    return torch.distributed.is_available() and torch.distributed.is_xccl_available()


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Whether this machine's device trains in bf16."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported()
    if is_xpu_available():
        return torch.xpu.is_bf16_supported()
    return True


def is_fp16_available() -> bool:
    """Whether the run's device trains in fp16: accelerators do, few CPUs do."""
    from hotloop.accelerate.state import PartialState
    from hotloop.hardware.precisions import supported_precisions

    device = PartialState._shared_state.get("device")
    if device is None:
        found = torch.accelerator.current_accelerator(check_available=True)
        device = torch.device("cpu") if found is None else found
    return "fp16" in supported_precisions(device)


def is_fp8_available() -> bool:
    """Whether a package that trains in fp8 is installed."""
    return (
        is_torchao_available()
        or _is_package_available("transformer_engine", "transformer-engine")
        or _is_package_available("msamp", "ms-amp")
    )


def is_torchao_available() -> bool:
    """Whether torchao >= 0.6.1 is installed."""
    return _has_version("torchao", "0.6.1")


def is_transformer_engine_mxfp8_available() -> bool:
    """False: hotloop does not use transformer-engine."""
    return False


def is_bnb_available(min_version: str | None = None) -> bool:
    """Whether bitsandbytes (of at least `min_version`) is installed."""
    return _has_version("bitsandbytes", min_version or "0")


def is_4bit_bnb_available() -> bool:
    """Whether bitsandbytes is new enough for 4-bit weights."""
    return is_bnb_available("0.39.0")


def is_8bit_bnb_available() -> bool:
    """Whether bitsandbytes is new enough for 8-bit weights."""
    return is_bnb_available("0.37.2")


def is_bitsandbytes_multi_backend_available() -> bool:
    """Whether bitsandbytes runs on more than CUDA."""
    if not is_bnb_available():
        return False
    module: Any = importlib.import_module("bitsandbytes")
    return "multi_backend" in getattr(module, "features", ())


def is_megatron_lm_available() -> bool:
    """False: hotloop does not run Megatron-LM."""
    return False


def is_pippy_available() -> bool:
    """False: pipelines are not part of the look-alike."""
    return False


def is_rich_available() -> bool:
    """Whether rich is installed and asked for by ACCELERATE_ENABLE_RICH."""
    return _is_package_available("rich") and parse_flag_from_env("ACCELERATE_ENABLE_RICH", False)


def is_tensorboard_available() -> bool:
    """Whether tensorboard or tensorboardX is installed."""
    return _is_package_available("tensorboard") or _is_package_available("tensorboardX")


def is_torchdata_stateful_dataloader_available() -> bool:
    """Whether torchdata >= 0.8.0 is installed; `use_stateful_dataloader` works here without it."""
    return _has_version("torchdata", "0.8.0")


def is_weights_only_available() -> bool:
    """Whether torch.load can refuse to run code."""
    return is_torch_version(">=", "2.4.0")


def is_numpy_available(min_version: str = "1.25.0") -> bool:
    """Whether numpy is at least `min_version`."""
    return compare_versions("numpy", ">=", min_version)


def __getattr__(name: str) -> Any:
    # the questions about packages are made from a table; this tells type checkers that they exist
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
