"""What float32 arithmetic itself can lose in a model: its float64 twin run again, each operation's result disturbed.

Monte Carlo arithmetic (Parker, 1997, "Monte Carlo Arithmetic: exploiting randomness in floating-point arithmetic"):
each result is multiplied by 1 + u / 2**24 with u uniform in [-1, 1], which is what rounding to float32 does to it.
How far the outputs move is the error that any correct float32 program may show on that input. One run of PyTorch in
float32 is a single draw of it, and a lucky one wherever equal rows happen to be rounded equally.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

__all__ = ["rounding_errors"]

_FLOAT32_HALF_ULP = 2.0**-24
_DRAWS = 6

# Their results are copies of what went in: nothing is rounded.
# fmt: off
_EXACT = frozenset(f"aten.{name}" for name in (
    "cat", "stack", "clone", "copy", "copy_", "where", "gather", "index", "index_select", "masked_fill",
    "relu", "relu_", "clamp", "clamp_min", "clamp_max", "amax", "amin", "max", "min", "maximum", "minimum",
    "flip", "roll", "constant_pad_nd", "_to_copy", "embedding", "neg", "abs", "sign", "zeros", "ones",
    "full", "zeros_like", "ones_like", "empty", "empty_like", "fill_", "zero_", "max_pool1d",
    "max_pool2d_with_indices", "sort", "topk",
))
# fmt: on


class _Rounding(TorchDispatchMode):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def _disturb(self, value: torch.Tensor) -> torch.Tensor:
        if value.dtype != torch.float64:
            return value
        noise = torch.rand(value.shape, generator=self.generator, dtype=torch.float64)
        return value * (1 + (2 * noise - 1) * _FLOAT32_HALF_ULP)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if str(func.overloadpacket) in _EXACT or any(r.alias_info is not None for r in func._schema.returns):
            return result
        return tree_map_only(torch.Tensor, self._disturb, result)


def rounding_errors(
    exact: Callable[[Sequence[torch.Tensor]], list[npt.NDArray[np.float64]]],
    inputs: Sequence[torch.Tensor],
) -> list[npt.NDArray[np.float64]]:
    """The largest absolute deviation of each output element over six disturbed runs.

    Args:
        exact: runs the model in float64 on CPU.
        inputs: its inputs.
    """
    plain = exact(inputs)
    worst = [np.zeros_like(p) for p in plain]
    for seed in range(_DRAWS):
        with _Rounding(seed):
            outputs = exact(inputs)
        for index, (y, p) in enumerate(zip(outputs, plain, strict=True)):
            worst[index] = np.fmax(worst[index], np.abs(y - p))
    return worst
