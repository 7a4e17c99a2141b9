"""What scripts import from `accelerate.utils`, in one place."""

from __future__ import annotations

from typing import Any

from hotloop.accelerate.environment import *  # noqa: F403
from hotloop.accelerate.environment import __all__ as _environment
from hotloop.accelerate.filenames import *  # noqa: F403
from hotloop.accelerate.filenames import __all__ as _constants
from hotloop.accelerate.installed import *  # noqa: F403
from hotloop.accelerate.installed import __all__ as _imports
from hotloop.accelerate.kinds import *  # noqa: F403
from hotloop.accelerate.kinds import __all__ as _dataclasses
from hotloop.accelerate.memory import find_executable_batch_size, release_memory
from hotloop.accelerate.operations import *  # noqa: F403
from hotloop.accelerate.operations import __all__ as _operations
from hotloop.accelerate.parallelism_config import ParallelismConfig
from hotloop.accelerate.seeding import set_seed, synchronize_rng_state, synchronize_rng_states
from hotloop.accelerate.unsupported import unsupported_class, unsupported_function
from hotloop.accelerate.utils.other import *  # noqa: F403
from hotloop.accelerate.utils.other import __all__ as _other
from hotloop.accelerate.utils.tqdm import tqdm
from hotloop.accelerate.versions import compare_versions, is_torch_version
from hotloop.accelerate.weights import *  # noqa: F403
from hotloop.accelerate.weights import __all__ as _modeling

# names of parts that are not built: importing one works, using it says so
_NOT_BUILT = {
    "DeepSpeed is not used": (
        "DeepSpeedEngineWrapper DeepSpeedOptimizerWrapper DeepSpeedSchedulerWrapper DummyOptim DummyScheduler "
        "HfDeepSpeedConfig compile_regions_deepspeed get_active_deepspeed_plugin map_pytorch_optim_to_deepspeed "
        "prepare_deepspeed_cmd_env"
    ),
    "Megatron-LM is not used": (
        "AbstractTrainStep BertTrainStep GPTTrainStep MegatronLMDummyDataLoader MegatronLMDummyScheduler T5TrainStep "
        "add_model_config_to_megatron_parser avg_losses_across_data_parallel_group megatron_lm_initialize"
    ),
    "parameters are not sharded": (
        "compile_regions_fsdp2 disable_fsdp_ram_efficient_loading enable_fsdp_ram_efficient_loading "
        "ensure_weights_retied fsdp2_apply_ac fsdp2_canonicalize_names fsdp2_load_full_state_dict fsdp2_prepare_model "
        "fsdp2_switch_optimizer_parameters get_fsdp2_grad_scaler load_fsdp_model load_fsdp_optimizer "
        "merge_fsdp_weights save_fsdp_model save_fsdp_optimizer get_model_tp_size"
    ),
    "weights are not offloaded, and models not spread over devices": (
        "OffloadedWeightsLoader PrefixedDataset extract_submodules_state_dict get_max_layer_size "
        "load_offloaded_weight load_offloaded_weights offload_state_dict offload_weight save_offload_index "
        "check_tied_parameters_in_config check_tied_parameters_on_same_device retie_parameters align_module_device"
    ),
    "fp8 training and quantised loading are not part of the look-alike": (
        "apply_fp8_autowrap contextual_fp8_autocast convert_model convert_model_to_fp8_ao "
        "filter_first_and_last_linear_layers has_4bit_bnb_layers has_ao_layers has_transformer_engine_layers "
        "load_and_quantize_model torchao_required"
    ),
    "use `hotloop launch`": (
        "install_xla prepare_multi_gpu_env prepare_sagemager_args_inputs prepare_simple_launcher_cmd_env prepare_tpu "
        "set_numa_affinity write_basic_config"
    ),
}


def __getattr__(name: str) -> Any:
    for reason, names in _NOT_BUILT.items():
        if name in names.split():
            return (
                unsupported_class(name, reason) if name[0].isupper() else unsupported_function(name, reason)
            )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "ParallelismConfig",
    "compare_versions",
    "find_executable_batch_size",
    "is_torch_version",
    "release_memory",
    "set_seed",
    "synchronize_rng_state",
    "synchronize_rng_states",
    "tqdm",
    *_constants,
    *_dataclasses,
    *_environment,
    *_imports,
    *_modeling,
    *_operations,
    *(name for name in _other if name not in _environment),
]
