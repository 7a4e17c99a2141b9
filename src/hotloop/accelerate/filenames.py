"""File names of a checkpoint and the distributed types that go through torch.distributed."""

from __future__ import annotations

import operator

__all__ = [
    "CUDA_DISTRIBUTED_TYPES",
    "MODEL_NAME",
    "OPTIMIZER_NAME",
    "PROFILE_PATTERN_NAME",
    "RNG_STATE_NAME",
    "SAFE_MODEL_NAME",
    "SAFE_WEIGHTS_INDEX_NAME",
    "SAFE_WEIGHTS_NAME",
    "SAFE_WEIGHTS_PATTERN_NAME",
    "SAMPLER_NAME",
    "SCALER_NAME",
    "SCHEDULER_NAME",
    "STR_OPERATION_TO_FUNC",
    "TORCH_DISTRIBUTED_OPERATION_TYPES",
    "WEIGHTS_INDEX_NAME",
    "WEIGHTS_NAME",
    "WEIGHTS_PATTERN_NAME",
]

MODEL_NAME = "pytorch_model"
SAFE_MODEL_NAME = "model"
OPTIMIZER_NAME = "optimizer"
SCHEDULER_NAME = "scheduler"
SAMPLER_NAME = "sampler"
SCALER_NAME = "scaler.pt"
RNG_STATE_NAME = "random_states"
PROFILE_PATTERN_NAME = "profile_{suffix}.json"

WEIGHTS_NAME = MODEL_NAME + ".bin"
WEIGHTS_PATTERN_NAME = MODEL_NAME + "{suffix}.bin"
WEIGHTS_INDEX_NAME = WEIGHTS_NAME + ".index.json"
SAFE_WEIGHTS_NAME = SAFE_MODEL_NAME + ".safetensors"
SAFE_WEIGHTS_PATTERN_NAME = SAFE_MODEL_NAME + "{suffix}.safetensors"
SAFE_WEIGHTS_INDEX_NAME = SAFE_WEIGHTS_NAME + ".index.json"

CUDA_DISTRIBUTED_TYPES = ["MULTI_GPU", "DEEPSPEED", "FSDP", "MEGATRON_LM", "TP"]
TORCH_DISTRIBUTED_OPERATION_TYPES = [
    *CUDA_DISTRIBUTED_TYPES,
    *(f"MULTI_{kind}" for kind in ("CPU", "XPU", "NPU", "MLU", "SDAA", "MUSA", "HPU", "NEURON")),
]

STR_OPERATION_TO_FUNC = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
