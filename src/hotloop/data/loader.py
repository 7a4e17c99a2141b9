"""`Loader`: what a loop iterates over, whatever the source; knows where it is and continues from there."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from time import perf_counter
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.datapipes.datapipe import IterDataPipe, MapDataPipe

from hotloop.data.agreement import Agreement
from hotloop.data.feed import Epoch, Feed
from hotloop.data.mapped import MapFeed
from hotloop.data.move import count_samples
from hotloop.data.order import Start
from hotloop.data.prefetch import find_lane, moved_steps, prefetched_steps
from hotloop.data.resident import ResidentLoader
from hotloop.data.sampler_state import samplers_of
from hotloop.data.serving import Serving
from hotloop.data.step import Step
from hotloop.data.streamed import StreamFeed
from hotloop.errors import DataError, PrepareError
from hotloop.hardware import Processes

__all__ = ["Loader"]

_VERSION = 1
_numbers = itertools.count()


class Loader:
    """Iterates over `source` with batches on `device`, one global order over all processes, exact resume.

    On one CPU process the batches are the ones that looping over `source` gives, the same objects in the
    same order, with the same draws from torch's generators. With W processes, process r gets batches
    k*W + r of the one order; at the end, a process without a batch gets its last one again with
    `is_replay` set, so that all processes make the same number of steps. Random numbers drawn while
    fetching a batch of a map-style dataset depend on the epoch and on the batch's number in the global
    order alone: not on the number of workers or processes, nor on what else the script draws.

    Any attribute not listed here is the source's. If the source is a torch `DataLoader`, so is this.

    Args:
        source: a `DataLoader`, any iterable over batches, or a function without arguments returning one.
            `hotloop_sharded = True` on it or on its dataset says that each process iterates its own share.
        device: where batches are put.
        processes: this process among all; constructing a loader is collective.
        seed: the run's seed, for information: orders and streams come from torch's generators, as always.
        prefetch: how many batches ahead copies to the device are queued.
        serving: what replaces the source's own workers, prefetching, pinning and batch size.

    Attributes:
        epoch: number of the epoch that is running or comes next.
        handed_out: batches handed out since construction, over all epochs.
        samples_handed_out: samples in them, on this process.
        live: an iteration is open: begun, not exhausted, not abandoned.
        with_grad: whether gradients were enabled when the last batch was handed out.
        at_last: the batch handed out last is the last one of its epoch, on every process.
        batch_samples: samples of the current batch on this process: 0 for a replay, 1 if it cannot be known.
        is_replay: this process has no batch at this step and got an earlier one again.
        global_samples: samples of all processes at this step; -1 if only communication could tell.
        unserved: what of `serving` the source does not take, as a sentence; else empty.
        waited_s: seconds that the consumer waited for data since construction.
        before_batch: called at the start of every `__next__`, before the position moves on. If it raises,
            the iteration ends there and the next one continues at that position.
    """

    def __new__(cls, source: Any = None, **_: Any) -> Loader:
        """A loader that is a `DataLoader` too, if `source` is one."""
        found: Any = source.source if isinstance(source, Loader) else source
        return object.__new__(_TorchLoader if cls is Loader and isinstance(found, DataLoader) else cls)

    def __init__(
        self,
        source: Any,
        *,
        device: torch.device,
        processes: Processes,
        seed: int | None = None,
        prefetch: int = 2,
        serving: Serving | None = None,
    ) -> None:
        self.source: Any = source.source if isinstance(source, Loader) else source
        self.unserved = ""
        self.serving = serving or Serving()
        self._serve()
        self.device = _with_index(torch.device(device))
        self.processes = processes
        self.seed = seed
        self.prefetch = self.serving.prefetch or prefetch
        self.epoch = 0
        self.handed_out = 0
        self.samples_handed_out = 0
        self.live = False
        self.with_grad = True
        self.batch_samples = 0
        self.is_replay = False
        self.global_samples = -1
        self.waited_s = 0.0
        self.before_batch: Callable[[], None] | None = None
        self._at_last: bool | None = True
        self._start = Start()
        self._step: Step | None = None
        self._owner: object = None
        self._running: Epoch | None = None
        self._resume: dict[str, Any] | None = None
        self._skip = 0
        self._planned: list[int] | None = None
        self._last: Any = None
        self._recent: deque[tuple[int, Any]] = deque(maxlen=64)
        self._lane = find_lane(self.device, pins=self.serving.pin_memory is not False)
        agree = None
        if processes.world > 1:
            agree = Agreement(processes, f"loader {next(_numbers)}")
        self._feed = self._find_feed(agree)

    def _serve(self) -> None:
        """Have the source served as asked, if it is one whose fetch is torch's own."""
        asked = {name: value for name, value in vars(self.serving).items() if value is not None}
        if asked and _is_map_style(self.source):
            self.source = self.serving.apply(self.source)
        elif asked.keys() & {"workers", "micro_batch"}:
            shown = ", ".join(f"{name}={value}" for name, value in asked.items())
            self.unserved = (
                f"{shown}: a {type(self.source).__name__} over data that is not read by index stays as it is"
            )

    def _find_feed(self, agree: Agreement | None) -> Feed:
        source, rank, world = self.source, self.processes.rank, self.processes.world
        if isinstance(source, ResidentLoader):
            from hotloop.data.resident_feed import ResidentFeed

            if source.device != self.device:
                raise PrepareError(
                    f"the resident data lies on {source.device}, but the loop runs on {self.device}: give device= "
                    "where it is made"
                )
            return ResidentFeed(source, rank, world)
        ahead = self.device.type != "cpu"
        pins = self.serving.pin_memory is not False
        if _is_map_style(source):
            return MapFeed(source, self.device, rank, world, agree, ahead, pins)
        if isinstance(source, Iterable) or hasattr(source, "__getitem__") or callable(source):
            return StreamFeed(source, rank, world, agree, ahead, pins and self._lane is not None)
        raise PrepareError(
            f"cannot loop over a {type(source).__name__}: a loader is a DataLoader, an iterable over batches, "
            "or a function without arguments that returns one"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "source" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.source, name)

    def __len__(self) -> int:
        return self._feed.length()

    def planned(self, epochs: int) -> list[int] | None:
        """Steps of each of the first `epochs` epochs, where they differ and are known ahead: with a `Resizing`."""
        if not isinstance(self.source, ResidentLoader) or self.source.resizing is None:
            return None
        if self._planned is None or len(self._planned) != epochs:
            self._planned = [self.source.steps(self.processes.world, epoch) for epoch in range(epochs)]
        return self._planned

    def __repr__(self) -> str:
        return f"Loader({self.source!r}, device={str(self.device)!r})"

    @property
    def at_last(self) -> bool:
        """The batch handed out last is the last one of its epoch, on every process."""
        if self._at_last is None:
            self._at_last = self._running is None or self._running.ended()
        return self._at_last

    @property
    def per_rank_state(self) -> bool:
        """The source shards itself, so a checkpoint has to keep the `state_dict` of every process."""
        return self._feed.per_rank

    def set_epoch(self, epoch: int) -> None:
        """Tell the epoch to this loader, and to its samplers, dataset or source where they take it.

        A position inside another epoch that was loaded and not taken up yet is dropped.
        """
        if epoch != self.epoch and not self.live:
            self._resume = None
        self.epoch = epoch
        if isinstance(self._feed, MapFeed):
            self._feed.set_epoch(epoch)
        parts = [part for _, part in samplers_of(self.source)]
        parts.append(getattr(self.source, "dataset", None))
        if not isinstance(self.source, DataLoader):
            parts.append(self.source)
        told: set[int] = set()
        for part in parts:
            if callable(getattr(part, "set_epoch", None)) and id(part) not in told:
                told.add(id(part))
                part.set_epoch(epoch)

    def skip(self, batches: int) -> Loader:
        """Make the next iteration begin `batches` batches of this process in; later ones are whole.

        Batches of a map-style dataset are passed over without being loaded.
        """
        self._skip = batches
        self._resume = None
        return self

    def indices_of(self, handed_out: int) -> list[Any] | None:
        """Dataset indices of the batch that made `handed_out` this number; None if unknown or long ago."""
        for number, indices in reversed(self._recent):
            if number == handed_out and isinstance(indices, torch.Tensor):
                found: list[Any] = indices.tolist()
                return found
            if number == handed_out and indices is not None:
                return list(indices) if isinstance(indices, (list, tuple)) else [indices]
        return None

    def __iter__(self) -> Iterator[Any]:
        resume, self._resume = self._resume, None
        skip, self._skip = self._skip, 0
        if self.processes.world > 1:
            return self._deliver(None, resume, skip)
        return self._deliver(self._feed.open(resume, skip), None, 0)

    def _on_device(self, steps: Iterator[Step]) -> Iterator[Step]:
        if self._feed.resident:
            return steps
        if self._lane is not None:
            return prefetched_steps(steps, self.device, self.prefetch, self._lane)
        if self.device.type != "cpu":
            return moved_steps(steps, self.device)
        return steps

    def _deliver(self, epoch: Epoch | None, resume: dict[str, Any] | None, skip: int) -> Iterator[Any]:
        if epoch is None:  # with several processes this is collective, so it waits for the first batch
            epoch = self._feed.open(resume, skip)
        me = object()
        self._owner = me
        self._running = epoch
        self._start = epoch.start
        self._step = None
        self.live = True
        several = self.processes.world > 1
        steps = self._on_device(epoch.steps)
        ended = False
        try:
            while True:
                if self.before_batch is not None and self._owner is me:
                    self._call_hook(self.before_batch)
                began = perf_counter()
                step = next(steps, None)
                self.waited_s += perf_counter() - began
                if step is None:
                    ended = True
                    return
                batch, step.batch = step.batch, None
                if several:
                    batch = self._kept(batch)
                if self._owner is me:
                    epoch.handed_out(step)
                    samples = step.samples
                    self._step = step
                    self._at_last = step.last
                    self.handed_out = number = self.handed_out + 1
                    self.with_grad = torch.is_grad_enabled()
                    self.is_replay = step.replay
                    if samples < 0:
                        samples = count_samples(batch)
                    self.batch_samples = samples
                    self.samples_handed_out += samples
                    self.global_samples = step.global_samples if several else samples
                    self._recent.append((number, step.indices))
                yield batch
                del batch
        finally:
            if isinstance(steps, Generator):
                steps.close()
            epoch.close()
            if self._owner is me:
                if self._at_last is None:
                    self._at_last = ended
                if ended or self._step is not None:
                    self.epoch += 1
                self._owner = self._running = self._step = None
                self._start = Start()
                self.live = False

    def _kept(self, batch: Any) -> Any:
        """`batch`, or for a replay the one before it."""
        if batch is None:
            return self._last
        self._last = batch
        return batch

    def _call_hook(self, hook: Callable[[], None]) -> None:
        try:
            hook()
        except BaseException:
            self._resume = self.state_dict()
            raise

    def state_dict(self) -> dict[str, Any]:
        """Where the loader is: the next batch after loading this is the one after the last handed out.

        Tensors, numbers, strings, lists and dicts only (and what a source's own `state_dict` holds), so
        that it loads with `weights_only=True`. May be called at any time, in the middle of an epoch too.
        """
        if self._resume is not None:
            return self._resume
        step, start, running = self._step, self._start, self._running
        if running is None:
            start = Start()
        elif step is not None:
            start = Start(step.steps_done, step.batches_done, step.samples_done)
        return {
            "version": _VERSION,
            "kind": type(self._feed).__name__,
            "epoch": self.epoch,
            "steps": start.steps,
            "batches": start.batches,
            "samples": start.samples,
            "world": self.processes.world,
            "batch_size": self._feed.batch_size,
            "skip": self._skip,
            "open": running is not None,
            **(self._feed.state() if running is None else running.state()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iteration continue where `state_dict` was called; later ones are whole epochs.

        The global generators are not touched: put them back to what they were when `state` was taken, so
        that later epochs are the unbroken run's too. The number of processes and, with torch's own batch
        sampler, the batch size may have changed: the order of the samples is kept.

        Raises:
            DataError: the state is not one of a loader of this kind.
        """
        if not isinstance(state, dict) or state.get("version") != _VERSION:
            raise DataError(
                f"this is not the state of a loader as this version writes it (version {_VERSION}): "
                f"{type(state).__name__} with version {state.get('version') if isinstance(state, dict) else None}"
            )
        if state["kind"] != type(self._feed).__name__:
            raise DataError(
                f"the state is that of a {state['kind']}, but the loader reads its source through a "
                f"{type(self._feed).__name__}: prepare loaders in the order in which they were saved"
            )
        self.epoch = state["epoch"]
        self._skip = state["skip"]
        self._feed.restore(state)
        self._resume = state if state["open"] else None


class _TorchLoader(Loader, DataLoader[Any]):  # type: ignore[misc]
    """A `Loader` for which `isinstance(loader, DataLoader)` holds; torch's constructor never runs."""

    __setattr__ = object.__setattr__  # type: ignore[assignment] # torch's own costs microseconds, and guards what is not used here


def _is_map_style(source: Any) -> bool:
    """True for a loader whose order and fetch are torch's own, over a dataset that is read by index."""
    if not isinstance(source, DataLoader):
        return False
    kind = type(source)
    if kind.__iter__ is not DataLoader.__iter__ or kind._get_iterator is not DataLoader._get_iterator:
        return False
    return not isinstance(source.dataset, (IterableDataset, IterDataPipe, MapDataPipe))


def _with_index(device: torch.device) -> torch.device:
    """`device` with its number, so that it compares equal to the device of a tensor on it."""
    if device.type in ("cuda", "xpu") and device.index is None:
        return torch.device(device.type, torch.get_device_module(device).current_device())
    return device
