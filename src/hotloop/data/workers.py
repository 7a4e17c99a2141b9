"""Worker processes: torch's own, fed with tickets that say what to fetch under which random streams."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from hotloop.data.fetch import Fetch, build_fetch
from hotloop.data.move import pin
from hotloop.data.randomness import batch_seed, seed_streams
from hotloop.data.serving import is_lasting
from hotloop.hardware.gate import RECORDING_GATE

__all__ = ["MapWorkers", "StreamWorkers", "Ticket", "WorkerStart", "pins_apart"]

Ticket = tuple[Any, int | None, int | None]
"""(indices or None, seed of the streams or None, epoch for the dataset's `set_epoch` or None)."""


class _Inner(DataLoader[Any]):
    """torch's loader without its advice on the number of workers, which the user's loader gave already."""

    def check_worker_number_rationality(self) -> None:
        """Say nothing."""


class WorkerStart:
    """Runs first in every worker: torch's own seeding from our base seed, the user's dataset, their function.

    Torch's loader is built over a wrapper and a generator of ours; user code must see neither, so
    `get_worker_info()` gets the dataset and the seed that it would have shown.
    """

    def __init__(self, base_seed: int, user_function: Callable[[int], None] | None) -> None:
        self.base_seed = base_seed
        self.user_function = user_function

    def __call__(self, worker: int) -> None:
        """Prepare worker number `worker`, in its process."""
        info: Any = get_worker_info()
        seed = self.base_seed + worker
        object.__setattr__(info, "seed", seed)
        object.__setattr__(info, "dataset", info.dataset.user_dataset)
        random.seed(seed)
        torch.manual_seed(seed)
        np.random.seed(_numpy_words(self.base_seed, worker))
        if self.user_function is not None:
            self.user_function(worker)


def _numpy_words(base_seed: int, worker: int) -> Any:
    """The words that torch seeds numpy with in a worker."""
    from torch.utils.data._utils import worker as module

    generate = getattr(module, "_generate_state", None)
    if generate is not None:
        return generate(base_seed, worker)
    return np.random.SeedSequence([worker, base_seed & 0xFFFFFFFF, base_seed >> 32]).generate_state(4)


class _Carried:
    """A batch from a worker on its way to torch's thread that pins, which unpacks it.

    That thread asks every object that it meets to pin itself. So the batch keeps its types, which torch's own way
    does not always, and the thread makes no device call while work is being recorded: it then hands the batch on as
    it is, and the prefetch pins it. What torch was asked to pin is still carried then, and pinned by who takes it.
    """

    def __init__(self, batch: Any, by_torch: bool) -> None:
        self.batch = batch
        self.by_torch = by_torch

    def pin_memory(self, *_: Any) -> Any:
        """The batch in page-locked memory; as torch does it, if the script asked torch for it."""
        with RECORDING_GATE.passed() as free:
            if free:
                return self.unpack()
        return self if self.by_torch else self.batch

    def unpack(self) -> Any:
        """The batch in page-locked memory, whatever is being recorded."""
        if self.by_torch:
            from torch.utils.data._utils.pin_memory import pin_memory

            return pin_memory(self.batch)
        return pin(self.batch)


class _Collated:
    """A collate function whose batches are carried; without one, for batches that are collated already."""

    def __init__(self, collate: Callable[[Any], Any] | None, by_torch: bool) -> None:
        self._collate = collate
        self._by_torch = by_torch

    def __call__(self, samples: Any) -> _Carried:
        return _Carried(samples if self._collate is None else self._collate(samples), self._by_torch)


def _pass_on(batch: Any) -> Any:
    """Collation was done with the fetch, under the same random streams."""
    return batch


def pins_apart(pins: bool) -> bool:
    """Whether batches of workers are pinned by a thread of their own: if they are to be, and can be."""
    if not pins or not torch.accelerator.is_available():
        return False
    accelerator = torch.accelerator.current_accelerator()
    # torch pins nothing for MPS, and starts no thread there
    return accelerator is None or accelerator.type != "mps"


class _TicketDataset(Dataset[Any]):
    """Turns a ticket into a batch, inside a worker."""

    def __init__(self, dataset: Any, collate: Any, auto_collation: bool) -> None:
        self.user_dataset = dataset
        self._collate = collate
        self._auto_collation = auto_collation
        self._fetch: Fetch | None = None
        self._epoch: int | None = None

    def __getitem__(self, ticket: Ticket) -> Any:
        indices, seed, epoch = ticket
        if indices is None:
            return None
        if epoch is not None and epoch != self._epoch:
            self._epoch = epoch
            self.user_dataset.set_epoch(epoch)
        if self._fetch is None:
            self._fetch = build_fetch(self.user_dataset, self._collate, self._auto_collation)
        if seed is not None:
            seed_streams(seed)
        return self._fetch(indices)


class _TicketSource:
    """The sampler of the inner loader: hands over whatever tickets are on offer at the time."""

    def __init__(self) -> None:
        self.tickets: Iterator[Ticket] = iter(())

    def __iter__(self) -> Iterator[Ticket]:
        return self.tickets


def _inner_settings(source: Any, collate: Callable[[Any], Any] | None, pins: bool) -> dict[str, Any]:
    by_torch = bool(source.pin_memory)
    apart = pins_apart(pins or by_torch)
    return {
        "num_workers": source.num_workers,
        "pin_memory": apart,
        "collate_fn": _Collated(collate, by_torch) if apart else collate or _pass_on,
        "timeout": source.timeout,
        "multiprocessing_context": source.multiprocessing_context,
        "prefetch_factor": source.prefetch_factor,
        "persistent_workers": source.persistent_workers or is_lasting(source),
        # The seeds come from WorkerStart; nobody's generator may pay for torch's own draw.
        "generator": torch.Generator(),
    }


def _until_left(inner: DataLoader[Any]) -> Iterator[Any]:
    """What `inner` gives; when the loop is over, or is left, its workers end, unless they are to last.

    Torch ends them when its iterator is freed. After an error that is when the collector comes by, perhaps in the
    thread that pins, which cannot wait for itself; or when the queues that tell workers to end are closed already, and
    then torch waits seconds for each.
    """
    batches: Any = iter(inner)
    try:
        for batch in batches:
            yield batch.unpack() if isinstance(batch, _Carried) else batch
    finally:
        if not inner.persistent_workers and hasattr(batches, "_shutdown_workers"):
            batches._shutdown_workers()


class MapWorkers:
    """The workers of a map-style loader. Batches come in the order of the tickets, always.

    Args:
        source: the user's loader.
        pins: a thread puts batches into page-locked memory as they come; also where the source asks torch for it.
    """

    def __init__(self, source: Any, pins: bool = False) -> None:
        self._source = source
        self._tickets = _TicketSource()
        self._inner: DataLoader[Any] = _Inner(
            _TicketDataset(source.dataset, source.collate_fn, source.batch_sampler is not None),
            batch_size=None,
            sampler=self._tickets,
            **_inner_settings(source, None, pins),
        )

    def batches(self, tickets: Iterator[Ticket], base_seed: int) -> Iterator[Any]:
        """One batch for every ticket. Reads tickets ahead, as many as torch's loader prefetches."""
        self._tickets.tickets = tickets
        self._inner.worker_init_fn = WorkerStart(base_seed, self._source.worker_init_fn)
        yield from _until_left(self._inner)


class _WorkerStream(IterableDataset[Any]):
    """The user's iterable inside a worker, with fresh streams each time that a lasting worker starts over."""

    def __init__(self, dataset: Any, base_seed: int, first_round: int) -> None:
        self.user_dataset = dataset
        self.base_seed = base_seed
        self.round = first_round

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        if self.round > 0 and info is not None:
            seed_streams(batch_seed(batch_seed(self.base_seed, self.round), info.id))
        self.round += 1
        return iter(self.user_dataset)


class StreamWorkers:
    """The workers of a loader over an IterableDataset. Each has streams of its own, anew each epoch.

    Args:
        source, pins: see `MapWorkers`.
    """

    def __init__(self, source: Any, pins: bool = False) -> None:
        self._source = source
        self._pins = pins
        self._inner: DataLoader[Any] | None = None

    def batches(self, base_seed: int, round_number: int) -> Iterator[Any]:
        """The batches of one epoch; workers start with the first.

        `round_number` counts the epochs that lasting workers have served.
        """
        source = self._source
        if self._inner is None or not source.persistent_workers:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._inner = _Inner(
                    _WorkerStream(source.dataset, base_seed, round_number),
                    batch_size=source.batch_size,
                    drop_last=source.drop_last,
                    worker_init_fn=WorkerStart(base_seed, source.worker_init_fn),
                    **_inner_settings(source, source.collate_fn, self._pins),
                )
        yield from _until_left(self._inner)
