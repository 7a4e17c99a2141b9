"""Out of memory: give memory back, and find the batch size that fits."""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable
from typing import Any

import torch

from hotloop.errors import HotloopError

__all__ = [
    "MemoryBudgetError",
    "clear_device_cache",
    "find_executable_batch_size",
    "release_memory",
    "should_reduce_batch_size",
]

# what allocators and libraries say when memory is short: CUDA, HIP and XPU; MPS; cuDNN; the CPU's malloc
_OUT_OF_MEMORY = (
    " out of memory.",
    "MPS backend out of memory",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.",
    "DefaultCPUAllocator: can't allocate memory",
)


class MemoryBudgetError(HotloopError, RuntimeError):
    """Not even the smallest batch fits into memory."""


class _ArgumentError(HotloopError, TypeError):
    """The batch size was given to a decorated function that receives it by itself."""


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Give the accelerator's cached blocks back, after collecting garbage if so asked."""
    if garbage_collection:
        gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    elif hasattr(torch, "xpu") and torch.xpu.is_available():
        torch.xpu.empty_cache()
    elif torch.backends.mps.is_available():
        torch.mps.empty_cache()


def release_memory(*objects: Any) -> list[None]:
    """As many None as there are `objects`, to assign in their place; frees what nothing else holds."""
    count = len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return [None] * count


def should_reduce_batch_size(exception: Exception) -> bool:
    """Whether the exception says that memory ran out."""
    if isinstance(exception, torch.OutOfMemoryError | MemoryError):
        return True
    if not isinstance(exception, RuntimeError) or len(exception.args) != 1:
        return False
    text = str(exception.args[0])
    return any(words in text for words in _OUT_OF_MEMORY)


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Any:
    """Decorator: calls `function(batch_size, ...)` with smaller sizes until memory suffices.

    Args:
        function: takes the batch size as its first argument, which callers leave out.
        starting_batch_size: the first size tried; the size found is kept for later calls.
        reduce_batch_size_fn: gives the next size after a failure; default: nine tenths, rounded down.

    Raises:
        MemoryBudgetError: size 0 was reached.
        TypeError: the caller gave the batch size.
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    wrapped: Callable[..., Any] = function
    size = starting_batch_size

    @functools.wraps(wrapped)
    def attempt(*args: Any, **kwargs: Any) -> Any:
        nonlocal size
        clear_device_cache(garbage_collection=True)
        names = list(inspect.signature(wrapped).parameters)
        if len(names) < len(args) + 1:
            given = ", ".join(f"{name}={value}" for name, value in zip(names[1:], args[1:], strict=False))
            raise _ArgumentError(
                f"Batch size was passed into `{wrapped.__name__}` as the first argument when called. "
                f"The decorator passes it; call `{wrapped.__name__}({given})`"
            )
        while size > 0:
            try:
                return wrapped(size, *args, **kwargs)
            except Exception as error:
                if not should_reduce_batch_size(error):
                    raise
            # outside the handler: the traceback would keep the failed attempt's tensors alive
            clear_device_cache(garbage_collection=True)
            size = int(size * 0.9) if reduce_batch_size_fn is None else reduce_batch_size_fn()
        raise MemoryBudgetError("No executable batch size found, reached zero.")

    return attempt
