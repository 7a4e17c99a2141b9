"""Members of `Accelerator` about accumulation windows and about when ranks exchange gradients."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from hotloop.accelerate.configuring import ConfiguringMembers
from hotloop.accelerate.kinds import DistributedType
from hotloop.accelerate.loaders import DataLoaderDispatcher
from hotloop.accelerate.processes import ProcessMembers
from hotloop.loop.modules import binding_of

__all__ = ["WindowMembers", "replica_of"]


class WindowMembers(ConfiguringMembers, ProcessMembers):
    """The part of `Accelerator` that opens micro-batches."""

    step: int
    _dataloaders: list[Any]

    @contextlib.contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        """One micro-batch; every `gradient_accumulation_steps`-th, and the last of a loader, is an update."""
        self._begin_micro_batch()
        state = self.gradient_state
        if state.sync_gradients or state.plugin_kwargs.get("sync_each_batch", False):
            yield
            return
        with contextlib.ExitStack() as stack:
            for model in models:
                stack.enter_context(self.no_sync(model))
            yield

    def _begin_micro_batch(self) -> None:
        state = self.gradient_state
        loader = state.training_dataloader
        if state.sync_with_dataloader and loader is not None and loader.end_of_dataloader:
            self.step = 0
            state._set_sync_gradients(True)
        else:
            self.step += 1
            state._set_sync_gradients(self.step % state.num_steps == 0)

    _do_sync = _begin_micro_batch

    @contextlib.contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        """Gradients of forwards inside stay on their rank when they are backpropagated."""
        replica = replica_of(model)
        if replica is None:
            yield
            return
        with replica.no_sync():
            yield

    @staticmethod
    @contextlib.contextmanager
    def trigger_sync_in_backward(model: Any) -> Iterator[None]:
        """The next backward shares all gradients so far, though its forward was made under `no_sync`."""
        replica = replica_of(model)
        if replica is None:
            yield
            return
        before = replica.require_backward_grad_sync, replica.require_forward_param_sync
        replica.require_backward_grad_sync = replica.require_forward_param_sync = True
        replica.reducer.prepare_for_backward([])
        try:
            yield
        finally:
            replica.require_backward_grad_sync, replica.require_forward_param_sync = before

    @contextlib.contextmanager
    def join_uneven_inputs(self, joinables: list[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Ranks may leave a loop inside at different batches: those that are done answer for the others' backwards.

        Args:
            joinables: prepared models, or anything that torch's `Join` takes.
            even_batches: within the block, loaders of map-style datasets complete their last round or not.
        """
        if not self.multi_device:
            if self.distributed_type != DistributedType.NO:
                warnings.warn(
                    "Joining uneven inputs is only supported for multi-GPU training (or several CPU processes), so "
                    "`join_uneven_inputs` has no effect here.",
                    stacklevel=3,
                )
            yield
            return
        from torch.distributed.algorithms.join import Join

        changed: list[tuple[Any, bool]] = []
        if even_batches is None:
            even_batches = self.even_batches
        else:
            changed = self._override_even_batches(even_batches)
        members = [replica_of(thing) or thing for thing in joinables]
        try:
            with Join(members, enable=not even_batches, throw_on_early_termination=False):
                yield
        finally:
            for sampler, before in changed:
                sampler.even_batches = before

    def _override_even_batches(self, even_batches: bool) -> list[tuple[Any, bool]]:
        changed = []
        iterable = False
        for loader in self._dataloaders:
            sampler = loader.sampler if hasattr(loader.sampler, "even_batches") else loader.batch_sampler
            if isinstance(loader, DataLoaderDispatcher) or not hasattr(sampler, "even_batches"):
                iterable = True
                continue
            changed.append((sampler, sampler.even_batches))
            sampler.even_batches = even_batches
        if iterable:
            warnings.warn(
                "Overriding even_batches is only supported for map-style datasets, yet some dataloaders are iterable",
                stacklevel=4,
            )
        return changed


def replica_of(model: Any) -> Any:
    """The DistributedDataParallel of a prepared model, or `model` if it is one itself; None without."""
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        return model
    binding = binding_of(model) if isinstance(model, torch.nn.Module) else None
    return None if binding is None else binding.replica
