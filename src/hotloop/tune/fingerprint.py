"""Short marks of what a step saw and did, computed on the device: samples, gradients, weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch

__all__ = ["hash_samples", "hash_tensors", "mark_weights", "sample_gradients"]

_MOST_GRADIENTS = 1 << 20
_FACTOR = 1000003


def hash_samples(batch: Any) -> torch.Tensor | None:
    """[samples] int64, one number for each sample of a batch; None if the batch has no tensor with a first dimension.

    A sample's number is the sum of its bits as integers, each multiplied by an odd number of its own, modulo 2**64: it
    depends on every value and its place, not on layout, and not on the batch that the sample came in.
    """
    found: torch.Tensor | None = None
    for tensor in _tensors(batch):
        if tensor.dim() == 0 or tensor.is_complex() or tensor.layout is not torch.strided:
            continue
        rows = _as_integers(tensor.detach()).reshape(tensor.shape[0], -1)
        weights = torch.arange(rows.shape[1], device=rows.device, dtype=torch.int64) * 2 + 1
        number = (rows * weights).sum(1)
        if found is None:
            found = number
        elif found.shape == number.shape:
            found = found * _FACTOR + number
    return found


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    sizes = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
    if tensor.is_floating_point():
        tensor = tensor.contiguous().view(sizes[tensor.element_size()])
    return tensor.to(torch.int64)


def _tensors(thing: Any) -> Iterable[torch.Tensor]:
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, Mapping):
        for value in thing.values():
            yield from _tensors(value)
    elif isinstance(thing, (list, tuple)):
        for value in thing:
            yield from _tensors(value)


def mark_weights(parameters: list[torch.Tensor]) -> torch.Tensor:
    """0-d float64: a sum over all parameters that changes when any of them does; one launch or a few."""
    # norms of 16-bit weights would themselves be rounded to 16 bits
    wide = [p.float() if p.element_size() < 4 else p for p in parameters]
    marks = torch.stack([norm.double() for norm in torch._foreach_norm(wide)])
    scale = torch.arange(1, len(marks) + 1, device=marks.device, dtype=torch.float64).sqrt()
    return (marks * scale).sum()


def hash_tensors(tensors: Iterable[torch.Tensor]) -> str:
    """SHA-256 over values, shapes and dtypes, in order."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        plain = tensor.detach().cpu().contiguous()
        if plain.numel():
            digest.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def sample_gradients(parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    """[at most about 2**20] float32 on the CPU: gradients of all parameters, evenly thinned out above that."""
    grads = [g.detach() for p in parameters if (g := p.grad) is not None and not g.is_sparse]
    total = sum(g.numel() for g in grads)
    every = max(1, -(-total // _MOST_GRADIENTS))
    if not grads:
        return torch.zeros(0)
    # logical order: gradients may be laid out as their weights are
    return torch.cat([g.contiguous().reshape(-1)[::every].float().cpu() for g in grads])
