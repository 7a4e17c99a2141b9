"""Copies of tensors in host memory, taken so that training may go on while they are written.

CPU tensors are cloned at once. Tensors on an accelerator are copied to pinned memory *on the stream that is
current when the save is asked for*, which is the stream that updates them: the copy runs after every kernel
issued before and before every kernel issued after, so nothing can overwrite a source too early, and no stream
ever has to wait for another. The host waits for nothing; the writing thread waits for one event per device.
The price is that the device copies (18 ms a GB on an H200) before it computes on. A side stream would need
the same wait before the next update, or a second copy of everything on the device. The first save also
allocates the pinned memory, which takes half a second a GB; later ones use it again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hotloop.errors import CheckpointError

__all__ = ["HostCopies", "is_dense"]

# Small tensors share one pinned block: each pinned allocation costs far more than the copy of a small tensor.
_SMALL_BYTES = 1 << 20
_BLOCK_BYTES = 8 << 20
_PINNED_DEVICES = ("cuda", "xpu")


def is_dense(tensor: Tensor) -> bool:
    """True if the elements fill their memory without gap or overlap, in whatever order of dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


class HostCopies:
    """Takes host copies of tensors; tensors that are the same memory give the same copy.

    Args:
        clone: copy CPU tensors too. False hands them out as they are, for a caller that waits.

    Attributes:
        size_bytes: bytes of all copies together.
    """

    def __init__(self, *, clone: bool = True) -> None:
        self.size_bytes = 0
        self._clone = clone
        self._taken: dict[tuple[Any, ...], Tensor] = {}
        self._sources: list[Tensor] = []
        self._blocks: dict[torch.device, tuple[Tensor, int]] = {}
        self._in_blocks: list[Tensor] = []
        self._devices: set[torch.device] = set()
        self._events: list[torch.Event] = []

    def take(self, tensor: Tensor, where: str) -> Tensor:
        """A host copy of `tensor`, detached; its content may be read only after `wait`.

        Raises:
            CheckpointError: the tensor is sparse, quantized, without data, or of a class of its own.
        """
        _check_kind(tensor, where)
        source = tensor.detach()
        key: tuple[Any, ...] = (
            source.device,
            source.data_ptr() if source.numel() else id(tensor),
            source.dtype,
            source.size(),
            source.stride(),
            source.is_conj(),
            source.is_neg(),
        )
        if key not in self._taken:
            self._sources.append(tensor)  # keeps the address in the key from being used again
            self._taken[key] = self._copy(source)
            self.size_bytes += source.numel() * source.element_size()
        return self._taken[key]

    def seal(self) -> None:
        """Mark the end of the copies on every device's current stream. Call it where `take` was called."""
        for device in self._devices:
            event = torch.Event(device, blocking=True)
            event.record(torch.accelerator.current_stream(device))
            self._events.append(event)
        self._sources.clear()

    def wait(self) -> None:
        """Return once every copy has arrived; for the writing thread."""
        for event in self._events:
            event.synchronize()
        self._events.clear()
        with torch.no_grad():
            for view in self._in_blocks:
                # torch.save would write the whole shared block for each small tensor in it
                own = view.clone()
                view.set_(own.untyped_storage(), 0, own.size(), own.stride())
        self._in_blocks.clear()
        self._blocks.clear()

    def _copy(self, source: Tensor) -> Tensor:
        needs_layout = not is_dense(source)
        if source.device.type == "cpu":
            resolved = source.resolve_conj().resolve_neg()
            if needs_layout:
                return resolved.contiguous() if not self._clone else _clone_contiguous(resolved)
            return resolved if not self._clone and resolved is source else resolved.clone()
        resolved = source.resolve_conj().resolve_neg()
        if needs_layout:
            resolved = resolved.contiguous()
        if source.device.type not in _PINNED_DEVICES:
            return resolved.cpu()
        self._devices.add(source.device)
        host = self._pinned(resolved)
        host.copy_(resolved, non_blocking=True)
        return host

    def _pinned(self, like: Tensor) -> Tensor:
        size_bytes = like.numel() * like.element_size()
        if size_bytes == 0:
            return torch.empty_strided(like.size(), like.stride(), dtype=like.dtype)
        if size_bytes > _SMALL_BYTES:
            return torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, pin_memory=True)
        block, used = self._blocks.get(like.device, (None, 0))
        if block is None or used + size_bytes > _BLOCK_BYTES:
            block, used = torch.empty(_BLOCK_BYTES, dtype=torch.uint8, pin_memory=True), 0
        self._blocks[like.device] = (block, used + -(-size_bytes // 64) * 64)
        flat = block[used : used + size_bytes].view(like.dtype)
        view = flat.as_strided(like.size(), like.stride(), flat.storage_offset())
        self._in_blocks.append(view)
        return view


def _clone_contiguous(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _check_kind(tensor: Tensor, where: str) -> None:
    fault = None
    # a class may say that its tensors are copied as plain ones are
    if type(tensor) not in (Tensor, torch.nn.Parameter) and not getattr(
        type(tensor), "copies_plainly", False
    ):
        # A lazily or otherwise specially made Parameter still is a plain tensor underneath.
        plain = isinstance(tensor, torch.nn.Parameter) and type(tensor.data) is Tensor
        if not plain or torch.nn.parameter.is_lazy(tensor):
            kind = type(tensor)
            fault = f"is a {kind.__module__}.{kind.__qualname__}; give its plain local tensor instead"
    if fault is None and tensor.layout is not torch.strided:
        fault = f"has the layout {tensor.layout}; give its dense form, or its indices and values, instead"
    if fault is None and tensor.is_meta:
        fault = "is on the meta device and has no data; materialise it before saving"
    if fault is None and tensor.is_quantized:
        fault = "is quantized; give its integer representation and scale instead"
    if fault is not None:
        raise CheckpointError(f"{where} {fault}")
