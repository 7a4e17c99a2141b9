"""The loop as a captured step sees it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hotloop.errors import SettingError
from hotloop.hardware.processes import before_shut_down
from hotloop.hardware.recording import recording_stream
from hotloop.loop.preparing import Preparer
from hotloop.loop.resident_updates import ResidentUpdates
from hotloop.loop.schedulers import ResidentSchedule
from hotloop.loop.session import Session
from hotloop.loop.window import Window
from hotloop.optim import masters_of
from hotloop.settings import SETTINGS, Settings
from hotloop.state import HostState, Landing, Pace, ResidentState, Tape

if TYPE_CHECKING:
    from hotloop.capture import Buckets, Recorder

__all__ = ["LoopHost", "find_mode"]

# The first calls are real steps, run eagerly: lazy state of optimizers, libraries and autograd is made in them.
_WARM_CALLS = 3
# DistributedDataParallel measures itself in its first ten steps, which waits for the device.
_WARM_CALLS_OF_RANKS = 11


class LoopHost:
    """Gives captured steps the loop's modules, optimizers and state, and keeps its host side straight.

    Attributes:
        device: where steps run.
        eager: captured steps run as plain Python while it is True.
        warm_calls: real steps run eagerly before the first recording.
        remaining: gives how many updates are still to come, None if that is not known.
    """

    def __init__(
        self,
        device: torch.device,
        preparer: Preparer,
        window: Window,
        state: HostState | ResidentState,
        session: Session,
        remaining: Callable[[], int | None],
    ) -> None:
        self.device = device
        self._preparer = preparer
        self._window = window
        self._state = state
        self._session = session
        self.remaining = remaining
        self._recorder: Recorder | None = None
        self._rates: list[tuple[dict[str, Any], torch.Tensor]] = []
        self._rated: list[Any] = []
        self._own_rates: dict[tuple[int, int], torch.Tensor] = {}
        self._places: dict[torch.Tensor, torch.Tensor] = {}
        self._scalars: dict[str, torch.Tensor] = {}
        self.eager = False
        self.warm_calls = _WARM_CALLS

    def capture(
        self,
        function: Callable[..., Any] | None,
        settings: Settings,
        mode: str | None,
        outputs: str,
        buckets: Buckets | None,
        pool_bytes: int | None,
        check_every: int | None,
    ) -> Any:
        """See `Loop.capture`."""
        chosen = settings["capture"] if mode is None else SETTINGS["capture"].check(mode)
        if settings.sources["capture"] == "HOTLOOP_OVERRIDE":
            chosen = settings["capture"]
        wanted, chosen = chosen, find_mode(chosen, self.device)
        if wanted not in ("auto", chosen):
            self.say(f'capture="{wanted}": {self.device} records no graphs, so it is "{chosen}" here')
        if outputs not in ("clone", "static"):
            raise SettingError(f'outputs={outputs!r} is not known; valid values are: "clone", "static"')
        for name, number in (("pool_bytes", pool_bytes), ("check_every", check_every)):
            if number is not None and not (
                isinstance(number, int | float) and number >= 1 and number % 1 == 0
            ):
                raise SettingError(
                    f"capture({name}={number!r}): it has to be a whole number, at least 1, or None"
                )
        from hotloop.capture import Buckets, CapturedStep

        if buckets is not None and not isinstance(buckets, Buckets):
            raise SettingError(
                f"capture(buckets={buckets!r}): it has to be a hotloop.capture.Buckets, such as Buckets(dim=1, most=6)"
            )
        if function is not None and not callable(function):
            raise SettingError(
                f"capture({function!r}): this is no function; options are given by name: @loop.capture(mode=...)"
            )
        if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
            raise SettingError(
                f"capture({function.__name__}): a step that yields or awaits is no single launch"
            )

        make = functools.partial(
            CapturedStep,
            host=self,
            mode=chosen,
            outputs=outputs,
            buckets=buckets,
            pool_bytes=pool_bytes,
            check_every=check_every,
        )
        return make if function is None else make(function)

    def scalar(self, name: str, value: float | None) -> torch.Tensor:
        """See `Loop.scalar`."""
        if isinstance(value, torch.Tensor) and value.numel() != 1:
            raise SettingError(
                f"loop.scalar({name!r}) holds one number; pass a tensor of shape {tuple(value.shape)} to the step"
            )
        held = self._scalars.get(name)
        if held is None:
            if value is None:
                raise SettingError(
                    f"loop.scalar({name!r}) has no value yet; set it before the step that reads it"
                )
            held = self._scalars[name] = _number(float(value), self.device)
        elif value is not None:
            held.fill_(value)
        return held

    def modules(self) -> list[nn.Module]:
        """Prepared modules."""
        return self._preparer.registry.modules

    def optimizers(self) -> list[Any]:
        """Prepared optimizers whose steps are recorded; the settings of others are read at each step anyway."""
        return [
            u.optimizer for u in self._preparer.updates if isinstance(u, ResidentUpdates) and u.recordable()
        ]

    def parameters(self) -> list[torch.Tensor]:
        """Parameters of all prepared optimizers."""
        return [p for updates in self._preparer.updates for p in updates.parameters()]

    def recorder(self) -> Recorder | None:
        """CUDA graphs on a CUDA device and one process; None elsewhere."""
        if self.device.type != "cuda" or not isinstance(self._state, ResidentState):
            return None
        if self._window.processes.world > 1:
            if not self._records_collectives():
                self.say(
                    "captured steps of several processes run eagerly; with NCCL, Loop(parallel=Plan(capture=True)) "
                    "records them"
                )
                return None
            self.warm_calls = _WARM_CALLS_OF_RANKS
        if self._recorder is None:
            from hotloop.capture import CudaRecorder

            # of one process the stream is its own: loops in several threads may record at a time
            several = self._window.processes.world > 1
            self._recorder = CudaRecorder(self.device, recording_stream(self.device) if several else None)
            if several:
                before_shut_down(self._recorder.close)
        return self._recorder

    def _records_collectives(self) -> bool:
        if not self._preparer.plan.capture:
            return False
        import torch.distributed as dist

        return "nccl" in str(dist.get_backend())

    def say(self, text: str) -> None:
        """Say a line once."""
        self._session.notes.say(text)

    def enter(self) -> tuple[Any, ...]:
        """Open the micro-batch; a recording freezes its weight and the factor that ends its window."""
        window = self._window
        if window.plain:
            return ()
        window.enter()
        if self._recorder is not None and window.processes.world > 1:
            window.send_wishes()
        return window.frozen()

    def ready(self) -> tuple[int, ...]:
        """Learning rates on the device, masters that agree with their parameters; see `StepHost.ready`."""
        listed, rated = self._preparer.updates, self._rated
        same = len(listed) == len(rated)
        for updates, groups in zip(listed, rated, strict=False):
            optimizer = updates.optimizer
            # another list of groups comes with a state that was loaded
            same = same and optimizer.param_groups is groups
            masters = masters_of(optimizer)
            if masters is not None:
                # weights loaded since the last replay: a recording knows only what it wrote itself
                masters.refresh()
        if not same:
            self._rate_on_device()
            self._rated = [updates.optimizer.param_groups for updates in listed]
        for group, rate in self._rates:
            lr = group["lr"]
            if lr is not rate and not isinstance(lr, torch.Tensor):
                # set by hand: the recording reads the tensor
                rate.fill_(lr)
                group["lr"] = rate
        layouts = [getattr(updates.optimizer, "layouts", 0) for updates in listed]
        # whether a forward saves buffers is frozen, too
        return (*layouts, *(keeper.fresh for keeper in self._preparer.keepers))

    def settled(self) -> bool:
        """See `StepHost.settled`: the schedule's next step puts its numbers back."""
        schedules = self._preparer.schedules.values()
        return all(schedule.in_force for schedule in schedules if isinstance(schedule, ResidentSchedule))

    def _rate_on_device(self) -> None:
        self._rates.clear()
        for number, updates in enumerate(self._preparer.updates):
            if not isinstance(updates, ResidentUpdates) or not updates.recordable():
                continue
            for i, group in enumerate(updates.optimizer.param_groups):
                if "capturable" in group:
                    group["capturable"] = True
                rate = self._own_rates.get((number, i))
                if not isinstance(group["lr"], torch.Tensor):
                    # the same tensor for a state that was loaded: recordings that read it stay good
                    value = float(group["lr"])
                    rate = _number(value, self.device) if rate is None else rate.fill_(value)
                    group["lr"] = self._own_rates[(number, i)] = rate
                if rate is not None and group["lr"] is rate:
                    self._rates.append((group, rate))

    def hold_gradients(self, parameters: list[torch.Tensor]) -> list[torch.Tensor | None]:
        """Let gradients that wait in `parameters` lie where all recordings look for them; returns them.

        A window's first recording makes them, and each later one adds to the same memory.
        """
        held: list[torch.Tensor | None] = []
        for p in parameters:
            gradient = p.grad
            if gradient is not None:
                place = self._places.setdefault(p, gradient)
                if place is not gradient and place.shape == gradient.shape and place.dtype == gradient.dtype:
                    place.copy_(gradient)
                    p.grad = gradient = place
                self._places[p] = gradient
            held.append(gradient)
        return held

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Tensors that a step writes and no module holds: of optimizers, schedules, verdicts and the loss scale."""
        found: dict[str, torch.Tensor] = {}
        for i, updates in enumerate(self._preparer.updates):
            for j, state in enumerate(updates.optimizer.state.values()):
                found |= {
                    f"{name} of parameter {j} in optimizer {i}": value
                    for name, value in state.items()
                    if isinstance(value, torch.Tensor)
                }
            masters = masters_of(updates.optimizer)
            if masters is not None:
                found |= {f"master {j} of optimizer {i}": t for j, t in enumerate(masters.tensors())}
        things: list[Any] = [self._state, *self._preparer.updates, *self._preparer.schedules.values()]
        for i, thing in enumerate(things):
            found |= {f"{name} of {type(thing).__name__} {i}": t for name, t in _own_tensors(thing, 2)}
        return found

    def generators(self) -> list[torch.Generator]:
        """The default generators of the device and of the CPU."""
        found = [torch.default_generator]
        if self.device.type == "cuda":
            index = self.device.index if self.device.index is not None else torch.cuda.current_device()
            found.append(torch.cuda.default_generators[index])
        return found

    def aim(self, landings: list[Landing]) -> None:
        """Before a replay: say where the counters that it sends to the host land."""
        state = self._state
        assert isinstance(state, ResidentState)
        state.aim(landings)

    @contextmanager
    def recording(self, *, ports: bool = False) -> Iterator[Tape]:
        """Host effects of a step go to the tape instead of being done; the log's thread keeps off the device.

        With `ports` the recording itself may send counters to the host.
        """
        state = self._state
        assert isinstance(state, ResidentState)
        tape = Tape(lands=ports)
        resident = [u for u in self._preparer.updates if isinstance(u, ResidentUpdates)]
        before = [u.host_marks() for u in resident]
        window_before = self._window.marks()
        keepers = self._preparer.keepers
        fresh = [keeper.fresh for keeper in keepers]
        state.tape = self._window.tape = tape
        try:
            with self._session.log.pause():
                yield tape
        finally:
            tape.release()
            state.tape = self._window.tape = None
            state.close_losses()
            self._window.put_marks(window_before)
            for keeper, was in zip(keepers, fresh, strict=True):
                if keeper.fresh != was:
                    tape.append(functools.partial(setattr, keeper, "fresh", keeper.fresh))
                    keeper.fresh = was
            for updates, marks in zip(resident, before, strict=True):
                updates.put_host_marks(marks)


def _number(value: float, device: torch.device) -> torch.Tensor:
    """A number on the device, 0-d: float32, or float64 where that is the script's default."""
    dtype = torch.promote_types(torch.float32, torch.get_default_dtype())
    return torch.tensor(value, dtype=dtype, device=device)


def find_mode(chosen: str, device: torch.device) -> str:
    """The capture mode for `device`: no graphs on a CPU, so compiled forwards are what is left of "full"."""
    if chosen == "auto":
        return "auto" if device.type == "cuda" else "off"
    if device.type == "cpu":
        return {"graph": "off", "full": "compile"}.get(chosen, chosen)
    return chosen


def _own_tensors(thing: Any, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors in the attributes of an object of hotloop's state, and of those it holds."""
    for name, value in vars(thing).items():
        if isinstance(value, torch.Tensor):
            yield name, value
        elif (
            depth > 1 and type(value).__module__.startswith("hotloop.state.") and not isinstance(value, Pace)
        ):
            for inner, tensor in _own_tensors(value, depth - 1):
                yield f"{name}.{inner}", tensor
