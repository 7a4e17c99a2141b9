"""A script's `DataLoader` served otherwise: workers, prefetching, pinning; the same samples in the same order."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from hotloop.data.regroup import Regrouped
from hotloop.errors import SettingError

__all__ = ["Serving", "factor_of", "is_lasting"]

_LASTING = "_hotloop_lasting"


@dataclass(frozen=True)
class Serving:
    """How batches are fetched and brought to the device; None leaves it to the script.

    Attributes:
        workers: processes that fetch. They live as long as the loader, and draw what fetching in this process draws.
        prefetch: batches queued ahead: copies to the device, and batches of each worker.
        pin_memory: whether batches go through page-locked memory.
        micro_batch: samples of a batch.
    """

    workers: int | None = None
    prefetch: int | None = None
    pin_memory: bool | None = None
    micro_batch: int | None = None

    def apply(self, source: Any) -> Any:
        """A copy of a loader over a dataset read by index, changed; shares dataset, samplers and generator.

        Raises:
            SettingError: `micro_batch` neither divides the batch size nor is a multiple of it.
        """
        if (self.workers, self.prefetch, self.pin_memory, self.micro_batch) == (None, None, None, None):
            return source
        changed = copy.copy(source)
        facts = changed.__dict__
        workers = source.num_workers if self.workers is None else self.workers
        if self.workers is not None and workers != source.num_workers:
            facts["num_workers"] = workers
            facts[_LASTING] = workers > 0 and not source.persistent_workers
            if workers == 0:
                facts["persistent_workers"] = False
        if workers > 0:
            facts["prefetch_factor"] = self.prefetch or source.prefetch_factor or 2
        else:
            facts["prefetch_factor"] = None
        if self.pin_memory is not None:
            facts["pin_memory"] = self.pin_memory
        if self.micro_batch is not None:
            factor_of(source, self.micro_batch)
            facts["batch_sampler"] = Regrouped(source.batch_sampler, source.batch_size, self.micro_batch)
            facts["batch_size"] = self.micro_batch
        return changed


def factor_of(source: DataLoader[Any], micro_batch: int) -> tuple[int, int]:
    """(micro-batches that a batch of `source` is split into, batches that one is made of): one of them is 1.

    Raises:
        SettingError: `micro_batch` neither divides the batch size nor is a multiple of it, or there is none.
    """
    size = source.batch_size
    if size is None:
        raise SettingError(f"micro_batch={micro_batch}: the loader has no batch_size; leave micro_batch out")
    if size % micro_batch == 0:
        return size // micro_batch, 1
    if micro_batch % size == 0:
        return 1, micro_batch // size
    raise SettingError(
        f"micro_batch={micro_batch} neither divides the loader's batch_size={size} nor is a multiple of it"
    )


def is_lasting(source: Any) -> bool:
    """Whether workers live on over epochs though the script did not ask for it."""
    return bool(getattr(source, _LASTING, False))
