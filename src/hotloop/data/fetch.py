"""From indices to a batch: the fetch that torch's loader would do, and a quicker one with the same result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset, default_collate

from hotloop.data.move import bytes_of, is_copied_alone, new_pinned
from hotloop.data.randomness import FetchStreams, batch_seed

__all__ = ["build_fetch", "draws_nothing", "is_default_collate", "seeded_fetch"]

Fetch = Callable[[Any], Any]
_ONLY_INTEGERS = {int}


def is_default_collate(collate: Any) -> bool:
    """True if `collate` stacks samples exactly as torch does out of the box."""
    if collate is not default_collate:
        return False
    from torch.utils.data._utils import collate as module

    known = module.default_collate_fn_map
    return known.get(torch.Tensor) is module.collate_tensor_fn and tuple not in known and list not in known


def draws_nothing(dataset: Any) -> bool:
    """True if reading from `dataset` cannot draw random numbers, so that its fetch needs no streams."""
    kind = type(dataset)
    if kind in (TensorDataset, list, tuple, range, np.ndarray, torch.Tensor):
        return True
    if kind is Subset:
        return draws_nothing(dataset.dataset)
    if kind is ConcatDataset:
        return all(draws_nothing(part) for part in dataset.datasets)
    if kind is StackDataset:
        parts = dataset.datasets
        return all(draws_nothing(part) for part in (parts.values() if isinstance(parts, dict) else parts))
    return False


def build_fetch(dataset: Any, collate: Any, auto_collation: bool, pinned: bool = False) -> Fetch:
    """A function from what the index sampler yields to a batch, equal to what torch's loader makes of it.

    A `TensorDataset` (or subsets of one) under the default collate is read with one `index_select` a
    tensor instead of one indexing a sample; if `pinned`, straight into page-locked memory.
    """
    plain = _plain_fetch(dataset, collate, auto_collation)
    if auto_collation and is_default_collate(collate):
        return _tensor_fetch(dataset, plain, pinned) or plain
    return plain


def _plain_fetch(dataset: Any, collate: Any, auto_collation: bool) -> Fetch:
    if not auto_collation:
        return lambda index: collate(dataset[index])
    many = getattr(dataset, "__getitems__", None)
    if many:
        return lambda indices: collate(many(indices))
    return lambda indices: collate([dataset[index] for index in indices])


def _tensor_fetch(dataset: Any, plain: Fetch, pinned: bool) -> Fetch | None:
    chosen: list[Any] = []
    while type(dataset) is Subset:
        chosen.append(dataset.indices)
        dataset = dataset.dataset
    if type(dataset) is not TensorDataset or not all(_is_ordinary(t) for t in dataset.tensors):
        return None
    tensors = dataset.tensors

    def fetch(indices: Any) -> Any:
        try:
            at = indices
            for subset in chosen:
                at = [subset[index] for index in at]
            if set(map(type, at)) != _ONLY_INTEGERS:
                return plain(indices)
            numbers = np.array(at)
            where = torch.from_numpy(numbers)
            if pinned:
                return [_select_pinned(tensor, where, numbers) for tensor in tensors]
            return [tensor.index_select(0, where) for tensor in tensors]
        except (IndexError, RuntimeError, TypeError, ValueError):
            return plain(indices)  # negative indices work there, and wrong ones get torch's own error

    return fetch


def _is_ordinary(tensor: Any) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.requires_grad
        and not tensor.is_quantized
        and tensor.is_contiguous()
        and tensor.dim() > 0
    )


def _select_pinned(tensor: torch.Tensor, where: torch.Tensor, numbers: npt.NDArray[np.int64]) -> torch.Tensor:
    out = new_pinned((len(where), *tensor.shape[1:]), tensor.dtype)
    if not is_copied_alone(out) or tensor.is_conj() or tensor.is_neg():
        return torch.index_select(tensor, 0, where, out=out)
    if numbers.min() < 0 or numbers.max() >= len(tensor):
        raise IndexError("numpy would take the nearest")
    np.take(bytes_of(tensor, len(tensor)), numbers, 0, out=bytes_of(out, len(numbers)), mode="clip")
    return out


def seeded_fetch(fetch: Fetch, base: int) -> Callable[[Any, int], Any]:
    """`fetch(indices)` as a function of (indices, ordinal) that runs under that batch's streams of `base`."""
    streams = FetchStreams()

    def fetch_seeded(indices: Any, ordinal: int) -> Any:
        return streams.run(batch_seed(base, ordinal), fetch, indices)

    return fetch_seeded
