"""What scripts import from `accelerate.utils`, in one place."""

from hotloop.accelerate.parallelism_config import ParallelismConfig
from hotloop.accelerate.unsupported import unsupported_function
from hotloop.accelerate.utils.constants import *  # noqa: F403
from hotloop.accelerate.utils.constants import __all__ as _constants
from hotloop.accelerate.utils.dataclasses import *  # noqa: F403
from hotloop.accelerate.utils.dataclasses import __all__ as _dataclasses
from hotloop.accelerate.utils.environment import *  # noqa: F403
from hotloop.accelerate.utils.environment import __all__ as _environment
from hotloop.accelerate.utils.imports import *  # noqa: F403
from hotloop.accelerate.utils.imports import __all__ as _imports
from hotloop.accelerate.utils.memory import find_executable_batch_size, release_memory
from hotloop.accelerate.utils.modeling import *  # noqa: F403
from hotloop.accelerate.utils.modeling import __all__ as _modeling
from hotloop.accelerate.utils.operations import *  # noqa: F403
from hotloop.accelerate.utils.operations import __all__ as _operations
from hotloop.accelerate.utils.other import *  # noqa: F403
from hotloop.accelerate.utils.other import __all__ as _other
from hotloop.accelerate.utils.random import set_seed, synchronize_rng_state, synchronize_rng_states
from hotloop.accelerate.utils.tqdm import tqdm
from hotloop.accelerate.utils.versions import compare_versions, is_torch_version

DummyOptim = unsupported_function("DummyOptim", "DeepSpeed is not used; make the optimizer itself")
DummyScheduler = unsupported_function("DummyScheduler", "DeepSpeed is not used; make the scheduler itself")
MegatronLMDummyScheduler = unsupported_function("MegatronLMDummyScheduler", "Megatron-LM is not used")
load_and_quantize_model = unsupported_function(
    "load_and_quantize_model", "load with transformers and bitsandbytes"
)
merge_fsdp_weights = unsupported_function("merge_fsdp_weights", "parameters are not sharded, nor their files")
write_basic_config = unsupported_function(
    "write_basic_config", "there is no configuration file; pass arguments"
)

__all__ = [
    "DummyOptim",
    "DummyScheduler",
    "MegatronLMDummyScheduler",
    "ParallelismConfig",
    "compare_versions",
    "find_executable_batch_size",
    "is_torch_version",
    "load_and_quantize_model",
    "merge_fsdp_weights",
    "release_memory",
    "set_seed",
    "synchronize_rng_state",
    "synchronize_rng_states",
    "tqdm",
    "write_basic_config",
    *_constants,
    *_dataclasses,
    *_environment,
    *_imports,
    *_modeling,
    *_operations,
    *_other,
]
