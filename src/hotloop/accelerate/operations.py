"""Operations on nested tensors, alone and across processes, by the names that scripts import."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from hotloop.accelerate.kinds import TensorInformation
from hotloop.accelerate.state import PartialState
from hotloop.accelerate.unsupported import unsupported_class
from hotloop.errors import ProcessError, SettingError
from hotloop.nested import map_tensors, tensors_of
from hotloop.parallel import collectives
from hotloop.parallel.collectives import StructureError

__all__ = [
    "CannotPadNestedTensorWarning",
    "ConvertOutputsToFp32",
    "DistributedOperationException",
    "GatheredParameters",
    "broadcast",
    "broadcast_object_list",
    "concatenate",
    "convert_outputs_to_fp32",
    "convert_to_fp32",
    "copy_tensor_to_devices",
    "find_batch_size",
    "find_device",
    "gather",
    "gather_object",
    "get_data_structure",
    "get_shape",
    "honor_type",
    "ignorant_find_batch_size",
    "initialize_tensors",
    "is_namedtuple",
    "is_tensor_information",
    "is_torch_tensor",
    "listify",
    "pad_across_processes",
    "pad_input_tensors",
    "recursively_apply",
    "reduce",
    "send_to_device",
    "slice_tensors",
]


class DistributedOperationException(ProcessError):  # noqa: N818 - the name scripts catch
    """A collective was called with tensors whose shapes do not fit together over the ranks."""


class CannotPadNestedTensorWarning(UserWarning):
    """A torch nested tensor was given to `pad_across_processes`, which leaves it as it is."""


def is_torch_tensor(tensor: Any) -> bool:
    """Whether it is a tensor."""
    return isinstance(tensor, torch.Tensor)


def is_tensor_information(tensor_info: Any) -> bool:
    """Whether it is a `TensorInformation`."""
    return isinstance(tensor_info, TensorInformation)


def is_namedtuple(data: Any) -> bool:
    """Whether it looks like a named tuple."""
    return isinstance(data, tuple) and hasattr(data, "_asdict") and hasattr(data, "_fields")


def honor_type(obj: Any, generator: Iterator[Any]) -> Any:
    """The generated values in a list, tuple or named tuple of the type of `obj`."""
    return type(obj)(*generator) if is_namedtuple(obj) else type(obj)(generator)


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """`data` with `func(leaf, *args, **kwargs)` in place of each leaf for which `test_type` holds.

    Containers are walked before `test_type` is asked, as scripts expect; dataclasses count as leaves here.

    Raises:
        StructureError: `error_on_other_type`, and there is another kind of leaf.
    """
    if isinstance(data, tuple | list):
        parts = (
            recursively_apply(
                func, part, *args, test_type=test_type, error_on_other_type=error_on_other_type, **kwargs
            )
            for part in data
        )
        return honor_type(data, parts)
    if isinstance(data, Mapping):
        made = {
            key: recursively_apply(
                func, part, *args, test_type=test_type, error_on_other_type=error_on_other_type, **kwargs
            )
            for key, part in data.items()
        }
        return type(data)(made)  # type: ignore[call-arg]
    if test_type(data):
        return func(data, *args, **kwargs)
    if error_on_other_type:
        name = getattr(func, "__name__", repr(func))
        raise StructureError(
            f"Unsupported type {type(data)} given to `{name}`: only nested lists, tuples and mappings of "
            f"objects that pass `{test_type.__name__}` can be used"
        )
    return data


def send_to_device(
    tensor: Any,
    device: Any,
    non_blocking: bool = False,
    skip_keys: str | list[str] | None = None,
) -> Any:
    """Everything in `tensor` that has a method `to`, on `device`; values of `skip_keys` in mappings stay."""
    skipped = [skip_keys] if isinstance(skip_keys, str) else list(skip_keys or ())
    if hasattr(tensor, "to"):
        try:
            return tensor.to(device, non_blocking=non_blocking)
        except TypeError:  # a `to` of the user's own that knows only the device
            return tensor.to(device)
    if isinstance(tensor, tuple | list):
        return honor_type(tensor, (send_to_device(part, device, non_blocking, skipped) for part in tensor))
    if isinstance(tensor, Mapping):
        moved = {
            key: part if key in skipped else send_to_device(part, device, non_blocking, skipped)
            for key, part in tensor.items()
        }
        return type(tensor)(moved)  # type: ignore[call-arg]
    return tensor


def get_data_structure(data: Any) -> Any:
    """`data` with a `TensorInformation` in place of each tensor."""
    return recursively_apply(lambda t: TensorInformation(shape=t.shape, dtype=t.dtype), data)


def get_shape(data: Any) -> Any:
    """`data` with a list of sizes in place of each tensor."""
    return recursively_apply(lambda t: list(t.shape), data)


def initialize_tensors(data_structure: Any) -> Any:
    """Uninitialised tensors in place of each `TensorInformation`."""
    return recursively_apply(
        lambda info: torch.empty(*info.shape, dtype=info.dtype),
        data_structure,
        test_type=is_tensor_information,
    )


def find_batch_size(data: Any) -> int:
    """The first dimension of the first tensor in `data`.

    Raises:
        SettingError: a container on the way is empty.
        StructureError: there is something else than a tensor in its place.
    """
    if isinstance(data, tuple | list | Mapping):
        if len(data) == 0:
            raise SettingError(f"Cannot find the batch size from empty {type(data)}.")
        first = next(iter(data.values())) if isinstance(data, Mapping) else data[0]
        return find_batch_size(first)
    if not isinstance(data, torch.Tensor):
        raise StructureError(f"Can only find the batch size of tensors but got {type(data)}.")
    return int(data.shape[0])


def ignorant_find_batch_size(data: Any) -> int | None:
    """As `find_batch_size`; None instead of an error."""
    try:
        return find_batch_size(data)
    except (ValueError, TypeError):
        return None


def find_device(data: Any) -> torch.device | None:
    """The device of the first tensor in `data`, None if there is none.

    Raises:
        StructureError: `data` is neither a tensor nor a container.
    """
    if isinstance(data, torch.Tensor):
        return data.device
    if not isinstance(data, tuple | list | Mapping):
        return None
    for part in data.values() if isinstance(data, Mapping) else data:
        device = find_device(part)
        if device is not None:
            return device
    return None


def listify(data: Any) -> Any:
    """`data` with plain numbers and lists in place of tensors; waits for their device."""

    def convert(tensor: torch.Tensor) -> Any:
        tensor = tensor.detach().cpu()
        return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).tolist()

    return recursively_apply(convert, data)


def slice_tensors(
    data: Any, tensor_slice: slice, process_index: int | None = None, num_processes: int | None = None
) -> Any:
    """`tensor[tensor_slice]` of each tensor."""
    return recursively_apply(lambda t: t[tensor_slice], data)


def concatenate(data: Any, dim: int = 0) -> Any:
    """Several values of one structure, their tensors concatenated; other leaves only if there is one value.

    Raises:
        StructureError: several values with leaves that are no tensors.
    """
    first = data[0]
    if isinstance(first, tuple | list):
        return honor_type(first, (concatenate([d[i] for d in data], dim=dim) for i in range(len(first))))
    if isinstance(first, Mapping):
        return type(first)({key: concatenate([d[key] for d in data], dim=dim) for key in first})  # type: ignore[call-arg]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(data), dim=dim)
    if isinstance(data, tuple | list) and len(data) == 1:
        return first
    raise StructureError(f"Can only concatenate tensors but got {type(first)}")


@contextmanager
def _named_errors(operation: str) -> Iterator[None]:
    try:
        yield
    except ProcessError as error:
        raise DistributedOperationException(f"Cannot apply `{operation}`: {error}") from error


def _check() -> bool | None:
    """True in debug mode, else the collectives' own default."""
    return True if PartialState().debug else None


def _check_device(data: Any, operation: str) -> None:
    state = PartialState()
    if not (state.debug and state.num_processes > 1):
        return
    device = find_device(data)
    if device is not None and device.type != state.device.type:
        raise DistributedOperationException(
            f"`{operation}` got a tensor on {device.type} while this run's processes talk on "
            f"{state.device.type}; move it to {state.device} first"
        )


def gather(tensor: Any) -> Any:
    """The tensors of all ranks along their first dimension (0-d ones as [world]); on one process as they are.

    Raises:
        DistributedOperationException: the ranks' shapes differ.
    """
    processes = PartialState().processes
    if processes.world == 1:
        return tensor
    _check_device(tensor, "gather")
    with _named_errors("gather"):
        return collectives.gather(tensor, processes, check=_check())


def gather_object(object: Any) -> Any:
    """The objects of all ranks: the lists that the ranks give, one after the other."""
    processes = PartialState().processes
    if processes.world == 1:
        return object
    return [item for items in collectives.gather_object(object, processes) for item in items]


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Every rank's tensors overwritten by those of `from_process`; returns them.

    Raises:
        DistributedOperationException: the ranks' shapes differ.
    """
    processes = PartialState().processes
    if processes.world == 1:
        return tensor
    _check_device(tensor, "broadcast")
    with _named_errors("broadcast"):
        return collectives.broadcast(tensor, processes, source=from_process, check=_check())


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """The list overwritten by that of `from_process`; returns it."""
    return collectives.broadcast_object_list(object_list, PartialState().processes, source=from_process)


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Elementwise "sum", "mean" or "max" over the ranks times `scale`, as new tensors; "none" copies.

    Raises:
        DistributedOperationException: the ranks' shapes differ.
    """
    processes = PartialState().processes
    _check_device(tensor, "reduce")
    with _named_errors("reduce"):
        if processes.world == 1:
            return collectives.reduce(tensor, processes, "none")
        return collectives.reduce(tensor, processes, reduction, scale=scale, check=_check())


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: Any = 0, pad_first: bool = False) -> Any:
    """Tensors grown along `dim` to the largest size of any rank, filled with `pad_index`.

    Raises:
        DistributedOperationException: the ranks hold tensors of another number of dimensions.
    """
    if any(t.is_nested for t in tensors_of(tensor)):
        import warnings

        warnings.warn(
            "a nested tensor has no common shape to pad to; it is left as it is",
            CannotPadNestedTensorWarning,
            stacklevel=2,
        )
        return tensor
    with _named_errors("pad_across_processes"):
        return collectives.pad_across_processes(
            tensor, PartialState().processes, dim=dim, pad_index=pad_index, pad_first=pad_first
        )


def copy_tensor_to_devices(tensor: torch.Tensor | None = None) -> torch.Tensor:
    """The one tensor that one rank gives (the others give None), on every rank's device.

    Raises:
        DistributedOperationException: no rank gave one.
    """
    state = PartialState()
    infos = state.processes.gather_object(
        None if tensor is None else TensorInformation(tensor.shape, tensor.dtype)
    )
    source = next((rank for rank, info in enumerate(infos) if info is not None), None)
    if source is None:
        raise DistributedOperationException("copy_tensor_to_devices: every rank gave None")
    if state.process_index == source:
        assert tensor is not None
        made = tensor.detach().to(state.device)
    else:
        made = torch.empty(infos[source].shape, dtype=infos[source].dtype, device=state.device)
    result: torch.Tensor = collectives.broadcast(made, state.processes, source=source, check=False)
    return result


def pad_input_tensors(tensor: Any, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """Tensors of `batch_size` rows grown with zeros to the next multiple of `num_processes` rows."""
    rows = -(-batch_size // num_processes) * num_processes

    def grow(one: torch.Tensor) -> torch.Tensor:
        if rows == one.shape[0]:
            return one
        made = one.new_zeros((rows, *one.shape[1:]))
        made[: one.shape[0]] = one
        return made

    return recursively_apply(grow, tensor, error_on_other_type=True)


def convert_to_fp32(tensor: Any) -> Any:
    """Half-precision tensors as fp32, the rest as it is; dataclasses and model outputs included."""

    def convert(one: torch.Tensor) -> torch.Tensor:
        return one.float() if one.dtype in (torch.float16, torch.bfloat16) else one

    return map_tensors(tensor, convert)


class ConvertOutputsToFp32:
    """A forward function whose outputs are fp32; picklable, with the function as `__wrapped__`."""

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        self.model_forward = model_forward
        functools.update_wrapper(self, model_forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function's outputs, half-precision tensors as fp32."""
        return convert_to_fp32(self.model_forward(*args, **kwargs))

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "a forward function under mixed precision cannot be pickled; pickle the model that "
            "`accelerator.unwrap_model(model, keep_fp32_wrapper=False)` gives"
        )


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """`model_forward` with fp32 outputs."""
    converter = ConvertOutputsToFp32(model_forward)

    @functools.wraps(model_forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return converter(*args, **kwargs)

    return forward


GatheredParameters = unsupported_class(
    "GatheredParameters", "parameters are not sharded, so there is nothing to gather"
)
