"""`Loop`: the lines that a plain PyTorch training loop changes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from hotloop.errors import CheckpointError, HotloopError, NonFiniteError, PrepareError, SettingError
from hotloop.hardware.devices import find_device
from hotloop.hardware.kind import machine_kind
from hotloop.hardware.processes import find_local_rank, find_processes
from hotloop.loop.capturing import LoopHost
from hotloop.loop.course import Course
from hotloop.loop.every import Every
from hotloop.loop.explaining import explain
from hotloop.loop.faults import Faults
from hotloop.loop.machine import MachineUse
from hotloop.loop.modules import binding_of
from hotloop.loop.observing import OBSERVERS
from hotloop.loop.preparing import Preparer
from hotloop.loop.saving import Saver
from hotloop.loop.session import Session, sinks_of
from hotloop.loop.together import Together
from hotloop.loop.updates import updates_of
from hotloop.loop.window import Weight, Window
from hotloop.metrics import Sink
from hotloop.nested import map_tensors
from hotloop.optim import gradients_of, total_norm
from hotloop.parallel.plan import Plan
from hotloop.precision import Precision, autocast_context, find_precision
from hotloop.seeds import seed_everything
from hotloop.settings import find_settings
from hotloop.state import HostState, LossScale, ResidentState

if TYPE_CHECKING:
    from hotloop.capture import Buckets

__all__ = ["Loop", "make_state"]

StrPath = str | os.PathLike[str]


class Loop(Together):
    """Your own training loop on whatever hardware is there.

    Args:
        precision: "fp32", "tf32", "bf16", "bf16-true", "fp16", "fp8", "auto", or a `hotloop.precision.Precision`
            with options.
        capture: what `@loop.capture` does: "auto" (graphs on a CUDA device, plain Python elsewhere), "off", "compile"
            (prepared modules' forwards compiled), "graph" (the whole step as one launch), "full" (both).
        accumulation: micro-batches per update, counted in batches of the loader that feeds training.
        nonfinite: what a non-finite loss or gradient does: "stop", "skip" (the update is not made, buffers are put
            back, it is counted) or "ignore".
        parallel: how a model is spread over processes.
        seed: seeds python, numpy and torch; None leaves them as they are.
        config: what this run is, for its record: a dict, an argparse.Namespace, a dataclass.
        record: False to keep no record, or the folder for it; default a new one under `runs/`.
        settings: a TOML file of settings, or a dict of them: also those that are no arguments, `threads`, `workers`,
            `prefetch`, `pin_memory`, `micro_batch`, `fused`, `memory_format`, `cudnn_benchmark`.
        device: "cpu", "cuda", "cuda:1"…; default what is found.
        trackers: one or several further sinks for logged values, such as `hotloop.metrics.TensorBoard`.

    Arguments left at None come from HOTLOOP_<NAME>, the settings file, or the default: fp32, no accumulation,
    stop at the first non-finite loss.

    Raises:
        SettingError: an unknown setting or value.
        PrecisionError: the device does not compute in that precision.

    >>> import torch
    >>> loop = Loop(record=False, device="cpu")
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> model, optimizer = loop.prepare(model, optimizer)
    >>> loss = model(torch.ones(4, 2)).square().mean()
    >>> loop.backward(loss)
    >>> optimizer.step(); optimizer.zero_grad()
    >>> loop.updates
    1
    """

    def __init__(
        self,
        precision: str | Precision | None = None,
        *,
        capture: str | None = None,
        accumulation: int | None = None,
        nonfinite: str | None = None,
        parallel: Plan | None = None,
        seed: int | None = None,
        config: Any = None,
        record: bool | StrPath | None = None,
        settings: StrPath | Mapping[str, Any] | None = None,
        device: str | torch.device | None = None,
        trackers: Sequence[Sink] | Sink = (),
    ) -> None:
        given = {
            "precision": precision,
            "capture": capture,
            "accumulation": accumulation,
            "nonfinite": nonfinite,
            "seed": seed,
            "record": record,
            "device": device,
        }
        if parallel is not None and not isinstance(parallel, Plan):
            raise SettingError(f"parallel={parallel!r} is no hotloop.Plan; leave it out for data parallelism")
        self.settings = find_settings(given, settings, machine_kind)
        self.device = find_device(self.settings["device"], local_rank=find_local_rank())
        self.processes = find_processes(self.device.type, recorded=parallel is not None and parallel.capture)
        self.precision = find_precision(self.settings["precision"], self.device)
        if self.precision.name == "tf32":
            torch.set_float32_matmul_precision("high")
            torch.backends.cudnn.allow_tf32 = True
        if self.settings["seed"] is not None:
            seed_everything(self.settings["seed"])
        self._state = make_state(self.device, self.settings["nonfinite"], scaled=self.precision.scaled)
        self._resident = self._state if isinstance(self._state, ResidentState) else None
        self._window = Window(
            self.settings["accumulation"],
            self.processes,
            self.device,
            resident=self._resident is not None,
        )
        use = MachineUse.of(self.settings)
        if use.serving.micro_batch is not None:
            # how many make an update is known once the loader is
            self._window.plain = False
        if self._resident is not None and self.processes.world > 1 and self._resident.watching:
            self._window.probe = self._resident.share_losses()
        self._plain = self._window.plain and not self.precision.scaled
        self._watching = self._state.watching
        # on the host noting is appending: one call less in the shortest step there is
        self._note_loss = (
            self._state.losses.append if isinstance(self._state, HostState) else self._state.note_loss
        )
        self._session = Session(
            device=self.device,
            processes=self.processes,
            settings=self.settings,
            precision=self.precision.options(),
            config=config,
            trackers=sinks_of(trackers),
            clock=lambda: (self.updates, max(self._course.epoch, 0)),
            samples=lambda: self._course.samples_seen(),
        )
        self._say = self._session.notes.say
        for note in self.settings.notes:
            self._say(note)
        use.begin(self.device, self._say)
        if self.precision.reason:
            self._say(f"precision auto is {self.precision.name}: {self.precision.reason}")
        self._write_row = self._session.log.write
        self._faults = Faults(self._state, self._window, self.processes.rank, self._session)
        self._course = Course(
            window=self._window,
            state=self._state,
            processes=self.processes,
            session=self._session,
            faults=self._faults,
            updates=lambda: self.updates,
        )
        self._preparer = Preparer(
            device=self.device,
            processes=self.processes,
            precision=self.precision,
            plan=parallel or Plan(),
            window=self._window,
            state=self._state,
            seed=self.settings["seed"],
            use=use,
            say=self._say,
            after_update=self._faults.after,
            before_batch=self._course.between_batches,
        )
        self._faults.preparer = lambda: self._preparer
        self._updates = self._preparer.updates
        self._host = LoopHost(
            self.device, self._preparer, self._window, self._state, self._session, self._course.remaining
        )
        self._saver = Saver(
            self._preparer.registry,
            window=self._window,
            state=self._state,
            processes=self.processes,
            device=self.device,
            session=self._session,
            position=self._course.position,
            settle=self._faults.settle,
        )
        self._course.preparer, self._course.saver = self._preparer, self._saver
        if self.device.type in ("xpu", "mps"):
            self._say(f"running on {self.device}: found through torch.accelerator, not tested by hotloop")
        for observer in OBSERVERS:
            observer(self)

    # ------------------------------------------------------------------------------------------------ preparing

    def prepare(self, *objects: Any) -> Any:
        """Ready modules, optimizers, loaders and schedulers for this device and these processes.

        They come in any number, order and nesting, and go back in the same: modules, optimizers and schedulers
        as the very same objects, loaders as a `hotloop.data.Loader`. One object comes back alone.

        Modules are moved to the device and sent from rank 0 to the others; an optimizer comes with or after the
        modules whose parameters it updates.

        Raises:
            PrepareError: an object is none of these, or an optimizer's parameters are not on the device.
            OptimizerError: `nonfinite="skip"` with an optimizer that cannot be skipped on the device.
        """
        prepared = self._preparer.prepare(objects)
        if self._preparer.float8 and self._session.record is not None:
            found = self._preparer.float8
            self._session.record.update(fp8=[{"layers": x.chosen, "not": x.kept} for x in found])
        return prepared

    def register(self, *objects: Any) -> None:
        """Save and resume these too: anything with `state_dict` and `load_state_dict`.

        Raises:
            PrepareError: one has no such methods.
        """
        self._preparer.register(objects)

    # ------------------------------------------------------------------------------------------------ one step

    def backward(self, loss: torch.Tensor, weight: Weight | None = None, **kwargs: Any) -> None:
        """Backpropagate `loss`, the mean over this micro-batch.

        Args:
            loss: 0-d tensor.
            weight: how many samples or tokens the loss is a mean over, a number or a 0-d tensor on the device;
                default: the batch's samples. With accumulation or several processes each micro-batch counts by its
                weight, so that N of them give the gradient of the mean over all. On one process without
                accumulation it has no effect.
            kwargs: for `torch.Tensor.backward`.

        On one process without accumulation, in fp32 or bf16, `p.grad` holds afterwards what plain PyTorch gives.
        Otherwise it holds a multiple of that, until `clip_grad_norm_` or the optimizer's step makes it true.
        """
        if self._plain:
            if self._watching:
                self._note_loss(loss)
            loss.backward(**kwargs)
            return
        window = self._window
        if not window.plain:
            window.enter()
        if self._watching and not window.replaying:
            self._state.note_loss(loss)
        if not window.plain:
            loss = window.weigh(loss, weight)
            if isinstance(self._state, HostState) and self._watching:
                window.loss_bad = not self._state.losses_finite()
        for updates in self._updates:
            updates.reopen()
        replicated = self._preparer.replicated
        if window.boundary:
            for binding in replicated:
                binding.make_ready(loss)
        if isinstance(self._state, ResidentState) and self._state.scale is not None:
            loss = self._state.scale.apply(loss)
        loss.backward(**kwargs)
        for binding in replicated:
            binding.decided = False
        if window.replaying:
            for keeper in self._preparer.keepers:
                keeper.undo_replay()

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Make the gradients of `parameters` true and clip their joint norm, in one factor.

        Returns the norm before clipping, 0-d, on the device. Inside an accumulation window it clips nothing, and the
        norm is that of the sum so far, on the window's own scale: log it where the window ends.
        """
        listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if not self._window.boundary:
            return total_norm(gradients_of(listed), norm_type)
        chosen = self._preparer.updates_for(listed)
        if len(self._updates) == 1:
            return chosen.clip(listed, float(max_norm), float(norm_type))
        known = set().union(*(updates.scaled for updates in self._updates))
        total = chosen.clip(listed, float(max_norm), float(norm_type), known)
        for updates in (*(u for u in self._updates if u is not chosen), chosen):
            updates.note_clipped(listed, chosen, total)
        return total

    def update(
        self, optimizer: Any, scheduler: Any = None, *, max_norm: float | None = None
    ) -> torch.Tensor | None:
        """Unscale, clip, skip if non-finite, step, schedule, zero: one update, or nothing inside a window.

        Returns the gradient norm before clipping (0-d, on the device) if `max_norm` is given, else None.
        """
        updates = updates_of(optimizer)
        if updates is None:
            raise PrepareError(f"update: {type(optimizer).__name__} is not prepared")
        norm = None
        if max_norm is not None:
            updates.folding = True
            try:
                norm = self.clip_grad_norm_(updates.parameters(), max_norm)
            finally:
                updates.folding = False
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
        return norm

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """One micro-batch, for loops that no prepared loader feeds."""
        self._window.open_by_hand()
        try:
            yield
        finally:
            self._window.close_by_hand()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forwards inside do not exchange gradients between processes in their backward."""
        bindings = [b for module in self._preparer.registry.modules if (b := binding_of(module)) is not None]
        before = [b.hold_sync for b in bindings]
        for binding in bindings:
            binding.hold_sync = True
        try:
            yield
        finally:
            for binding, held in zip(bindings, before, strict=True):
                binding.hold_sync = held

    def autocast(self) -> torch.autocast:
        """A context in which operations run in the loop's precision, for code outside a prepared module's call."""
        return autocast_context(self.device, self.precision.autocast)

    def capture(
        self,
        function: Callable[..., Any] | None = None,
        *,
        mode: str | None = None,
        outputs: str = "clone",
        buckets: Buckets | None = None,
        pool_bytes: int | None = None,
        check_every: int | None = None,
    ) -> Any:
        """A step as one launch: any function of tensors; with a backward inside it is a training step.

        The first calls of each shape are real steps, run eagerly; then the step is recorded and replayed, with the
        semantics of the eager loop. What it froze (shapes, Python values it reads, train and eval mode, optimizer
        settings) is compared at each call, and a change records it anew. What cannot be recorded runs eagerly, with
        one line that says why.

        Args:
            function: the step; without it, a decorator is returned.
            mode: as `Loop(capture=)`, for this step alone.
            outputs: "clone" gives each call its own results; "static" the same tensors, valid until the next call.
            buckets: pad batches of variable length to few lengths, a recording each; None records each shape.
            pool_bytes: the most device memory that recordings may hold; those used least recently are given up.
            check_every: run every so many-th replay beside the plain step, from the same state, and compare; it waits
                for the device. None never does.

        >>> import torch
        >>> loop = Loop(record=False, device="cpu")
        >>> @loop.capture
        ... def double(x):
        ...     return 2 * x
        >>> double(torch.ones(1))
        tensor([2.])
        """
        return self._host.capture(function, self.settings, mode, outputs, buckets, pool_bytes, check_every)

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Captured steps run as plain Python inside, for breakpoints and prints."""
        before, self._host.eager = self._host.eager, True
        try:
            yield
        finally:
            self._host.eager = before

    def scalar(self, name: str, value: float | None = None) -> torch.Tensor:
        """A number of the loop's that may change between steps, captured ones too: a float32 0-d device tensor.

        With a value it is set (also made, the first time); without, it is read: `loop.scalar("temperature")`.

        Raises:
            SettingError: it is read before it was set.
        """
        return self._host.scalar(name, value)

    @property
    def updates(self) -> int:
        """Updates made or refused so far: those of the optimizer that has most."""
        mine = self._updates
        return mine[0].attempted if len(mine) == 1 else max((u.attempted for u in mine), default=0)

    @property
    def skipped(self) -> int:
        """Updates refused so far; waits for the device."""
        return self._state.read()[0] if isinstance(self._state, ResidentState) else self._state.skipped

    # ------------------------------------------------------------------------------------------------ going on

    def epochs(self, n: int) -> Iterator[int]:
        """The numbers of the epochs still to do, up to n: after `resume`, from where it stopped."""
        return self._course.epochs(n)

    def steps(self, n: int) -> Iterator[int]:
        """The numbers of the updates still to do, up to n: after `resume`, from where it stopped.

        A pass inside an accumulation window repeats the number; a pass that backpropagates nothing counts as a
        step.
        """
        return self._course.steps(n)

    # ------------------------------------------------------------------------------------------------ values out

    def log(
        self, values: Mapping[str, Any] | None = None, /, *, step: int | None = None, **named: Any
    ) -> None:
        """Log numbers and one-element tensors by name; never waits for the device.

        They go to the progress line, the record's metrics.jsonl and the trackers. `step` defaults to `updates`.

        Raises:
            HotloopError: no names with values, a name that every row has ("step", "time"), or no number.
        """
        if values is not None:
            if not isinstance(values, Mapping):
                raise HotloopError(
                    f"log({values!r}): values have names: log(loss=...) or log({{'loss': ...}})"
                )
            named = {**values, **named}
        if self._resident is not None and self._resident.tape is not None:
            self._resident.tape.append(lambda: self._write_row(self.updates if step is None else step, named))
            return
        self._write_row(self.updates if step is None else step, named)

    def mean(self, name: str, value: Any = None, weight: Weight | None = None) -> float | None:
        """Count `value` into the mean `name`, on the device; without a value, read that mean over all ranks.

        Reading is exact over ranks and resets. What a rank replays to keep the others company is not counted.
        """
        if value is None:
            return self._session.means.read(name)
        if self._replays():
            weight = 0.0
        if self._resident is not None and self._resident.tape is not None:
            self._resident.tape.append(lambda: self._session.means.add(name, value, weight))
        else:
            self._session.means.add(name, value, weight)
        return None

    def read(self, value: Any) -> Any:
        """Tensors of a structure as numbers (one element) or numpy arrays: the one call that waits for the device."""
        return map_tensors(value, lambda t: t.item() if t.numel() == 1 else t.detach().cpu().numpy())

    def print(self, *args: Any, **kwargs: Any) -> None:
        """`print`, in one process only, beside the progress line."""
        if self.processes.is_main:
            self._session.progress.print(*args, **kwargs)

    # ------------------------------------------------------------------------------------------------ state

    def save_state(
        self,
        path: StrPath | None = None,
        *,
        every: str | Every | None = None,
        keep: int | None = None,
        wait: bool = False,
    ) -> bool:
        """Save everything needed to go on exactly here, atomically; True if it was due. Every rank calls it.

        Args:
            path: a folder; default the one given last, else the run's.
            every: only this often: "500 updates", "10 minutes", "1 epoch".
            keep: how many checkpoints to keep there, default 1.
            wait: return when it is on disk; by default it is written beside training.

        Raises:
            CheckpointError: this save, or the one before, failed; earlier checkpoints are untouched.
        """
        return self._saver.save(path, every, keep, wait)

    def resume(self, path: StrPath) -> bool:
        """Go on from the newest whole checkpoint in `path`; False if there is none. After `prepare`.

        Raises:
            CheckpointError: it is damaged, foreign, or of other objects; names file and fault.
        """
        position = self._saver.resume(path)
        if position is None:
            return False
        self._course.go_on(position)
        self._say(f"resumed update {position.updates} from {self._saver.folder()}")
        return True

    def load_state(self, path: StrPath) -> None:
        """`resume`, but a missing checkpoint is an error.

        Raises:
            CheckpointError: there is none, or as in `resume`.
        """
        if not self.resume(path):
            raise CheckpointError(f"{path}: there is no checkpoint here")

    def _trial(self) -> AbstractContextManager[Callable[[], bool]]:
        """Everything prepared is afterwards as it was before, and nothing inside is logged: see `optim.find_rate`."""
        from hotloop.loop.trial import undone

        return undone(self)

    @property
    def record_folder(self) -> Path | None:
        """The folder of this run's record; None if there is none."""
        return self._session.folder

    def explain(self) -> str:
        """What this loop does and decided by itself, as a text of a few lines."""
        return explain(
            self.device,
            self.processes,
            self.precision,
            self.settings,
            self._window.every,
            self._preparer.float8,
            self._session,
        )

    def end_training(self) -> None:
        """Write out everything: saves in flight, logged values, the record. The loop is over."""
        self._finish("finished", None)

    def _finish(self, status: str, error: BaseException | None) -> None:
        self._course.end()
        try:
            if error is None:
                self._faults.settle()
            self._saver.wait()
        finally:
            self._session.end(status, error)

    def __enter__(self) -> Loop:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._finish("finished", None)
        elif isinstance(error, KeyboardInterrupt | SystemExit):
            self._finish("interrupted", error)
        else:
            self._finish("stopped" if isinstance(error, NonFiniteError) else "failed", error)


def make_state(device: torch.device, nonfinite: str, *, scaled: bool) -> HostState | ResidentState:
    """The step's state for `device`: on it, unless it is the host itself."""
    if device.type == "cpu" and not scaled:
        return HostState(nonfinite)
    return ResidentState(device, nonfinite, scale=LossScale(device) if scaled else None)
