"""Names of device kernels read as what they are: element-wise, matrix work, communication, number format."""

from __future__ import annotations

import re

__all__ = ["COMMUNICATION", "ELEMENTWISE", "FULL_PRECISION", "MATRIX", "TENSOR_CORES", "family"]

COMMUNICATION = (
    r"(?i)nccl|rccl|msccl|deep_?ep|\bnvshmem|allreduce|all_reduce|allgather|all_gather|reduce_?scatter|"
    r"cross_device_reduce|all2all|alltoall|one_?shot_?all|two_?shot_?all"
)
ELEMENTWISE = (
    r"elementwise_kernel|vectorized_elementwise|unrolled_elementwise|index_elementwise|elementwise_with_index"
    r"|CatArrayBatched|fill_kernel|direct_copy_kernel"
)
MATRIX = (
    r"(?i)gemm|gemv|conv|cudnn|cutlass|xmma|winograd|scudnn|wgrad|dgrad|fprop|^Cijk_|nvjet|implicit|matmul|cublas"
    r"|_mm_|flash|fmha|attention|splitk"
)
TENSOR_CORES = (
    r"(?i)tensor_?op|tf32|h884|s884|h1688|s1688|s16816|h16816|16816|884gemm|1688gemm|hmma|imma|bf16|f16(?!_?f32f32_f32)|half"
    r"|fp8|e4m3|e5m2|i8|nvjet|wgmma|tcgen|(?<!x)mma_|_mma|tensor\d"
)
FULL_PRECISION = (
    r"sgemm|scudnn|simt|ffma|gemmSN|gemmk1|gemv[NT2x]|fft2d|winograd|_engine<float|"
    r"implicit_convolve_sgemm|(?:conv|gemm|wgrad|dgrad|fprop)\w*<float|f32f32_f32f32|_sgemm_"
)
_FAMILIES: tuple[tuple[str, str], ...] = (
    ("communication", COMMUNICATION),
    ("copy", r"^Mem(?:cpy|set)|^Copy(?:Host|Device)|^FillBuffer"),
    ("attention", r"(?i)flash|fmha|attention|softmax_warp"),
    ("convolution", r"(?i)conv|cudnn|scudnn|winograd|wgrad|dgrad|fprop|implicit_gemm"),
    ("matrix multiply", r"(?i)gemm|gemv|cutlass|xmma|^Cijk_|nvjet|cublas|splitk|matmul"),
    ("element-wise", ELEMENTWISE),
    ("reduction", r"(?i)reduce|softmax|norm|sum_|mean_"),
    ("optimizer", r"(?i)multi_tensor_apply|adam|sgd|lamb"),
    ("triton", r"^triton_"),
)


def family(name: str) -> str:
    """The family a kernel belongs to, by its name; "other" if it tells nothing."""
    for what, pattern in _FAMILIES:
        if re.search(pattern, name):
            return what
    return "other"
