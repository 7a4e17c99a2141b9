"""A training step that is launched as one: run eagerly a few times, recorded, then replayed, with eager semantics."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from operator import is_
from typing import Any

import torch

from hotloop.capture.arguments import Opened
from hotloop.capture.buckets import Buckets, Padding
from hotloop.capture.checking import differing, keep, outcome_of
from hotloop.capture.choosing import Choice
from hotloop.capture.effects import find_effects
from hotloop.capture.entry import Entry, describe, only_tensors
from hotloop.capture.forwards import CompiledForwards
from hotloop.capture.frozen import Frozen
from hotloop.capture.given import Given, Values, why_not_taken
from hotloop.capture.graphs import Recorder
from hotloop.capture.host import StepHost
from hotloop.capture.parts import Parts
from hotloop.capture.ports import PortError
from hotloop.capture.reasons import cause_of, first_line, host_names
from hotloop.capture.recordings import Recordings
from hotloop.capture.rehearsal import rehearse

__all__ = ["CapturedStep"]

# So many calls are run eagerly while somebody's numbers stand in place of a schedule's, before they are recorded.
_UNSETTLED_CALLS = 32


class CapturedStep:
    """`function` as one launch.

    Args:
        function: any function of tensors; with a backward inside it is a training step.
        host: the loop.
        mode: "off", "compile" (prepared modules' forwards compiled), "graph" (the whole recorded), "full" (both),
            "auto" (recorded, and compiled where the run is long enough).
        outputs: "clone" gives each call results of its own; "static" gives the same tensors each time, valid until
            the next call.
        buckets: how batches of variable length are padded; None records each length.
        pool_bytes: the most memory that recordings may hold; None for what the device has.
        check_every: compare every so many-th replay with the plain step; None never.

    Attributes:
        captures: how many recordings were made.
        replays: how many calls were replays.
        checks: how many replays were compared with the plain step.
        reason: why calls run eagerly, or None.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        host: StepHost,
        mode: str,
        outputs: str = "clone",
        *,
        buckets: Buckets | None = None,
        pool_bytes: int | None = None,
        check_every: int | None = None,
    ) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.name = getattr(function, "__name__", "the step")
        self.mode = mode
        self.captures = self.replays = self.checks = 0
        self.reason: str | None = None
        self._host = host
        self._clone = outputs == "clone"
        self._padding = Padding(buckets) if buckets is not None else None
        self._check_every = check_every
        self._frozen = Frozen(function, self.name, host.modules, host.optimizers, host.parameters, [host])
        # entries of the state that everything frozen is in, by what distinguishes them in the usual call
        self._usual: dict[Any, Entry] = {}
        self._usual_state = -1
        self._values = Values(self.name)
        self._unsettled = 0
        self._suspect: str | None = None
        self._compiled = CompiledForwards(host.device, host.modules, host.say)
        self._choice: Choice | None = None
        self._parts: Parts | None = None
        self._recorder = host.recorder() if mode in ("auto", "graph", "full") else None
        self._recordings: Recordings | None = None
        self._ports = self._recorder is not None and self._padding is None
        if self._recorder is not None:
            self._recordings = Recordings(self.name, self._recorder, pool_bytes, host.say)
            if mode == "auto":
                self._choice = Choice(self._recorder, host.modules, host.remaining, host.say)
            effects = find_effects(function, host_names(function))
            if effects:
                self._give_up(f"{'; '.join(effects)}: a replay would not repeat that; do it outside the step")
        elif mode in ("auto", "graph", "full"):
            self._give_up(f"{host.device} records no graphs")

    def __repr__(self) -> str:
        if self.reason is not None:
            how = f"runs eagerly: {self.reason}"
        elif self._recorder is None:
            how = "runs as it is" if self.mode == "off" else "runs eagerly, its forwards compiled"
        else:
            how = f"{self.captures} recordings, {self.replays} replays"
        return f"<captured step {self.name}, mode {self.mode!r}: {how}>"

    @property
    def evictions(self) -> int:
        """How many recordings were given up for memory."""
        return self._recordings.evictions if self._recordings is not None else 0

    @property
    def compiles(self) -> bool:
        """Whether forwards of prepared modules are compiled now."""
        return self._choice.compiled if self._choice is not None else self.mode in ("compile", "full")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One step."""
        host = self._host
        recorder = self._recorder
        if recorder is None or host.eager:
            return self._run_eagerly(args, kwargs)
        place = (*host.enter(), *host.ready())
        if self._usual and not kwargs:
            fingerprint = self._frozen.fingerprint
            waiting = fingerprint.gradients_wait()
            entry = self._usual.get((place, waiting))
            if (
                entry is not None
                and entry.takes(args)
                and fingerprint.unchanged()
                and entry.does_as_given(args)
                and (not waiting or entry.bring_gradients())
            ):
                return self._replay(entry, args, args, kwargs)
        return self._call_generally(recorder, place, args, kwargs)

    def _call_generally(
        self, recorder: Recorder, place: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A call that is not like the one before in everything, or that no recording is there for yet."""
        opened = Opened((args, kwargs))
        leaves = opened.leaves
        padding, length, to = self._padding, None, None
        if padding is not None and (length := padding.length_of(leaves)) is not None:
            to, said = padding.choose(length)
            if said is not None:
                self._host.say(f"{self.name}: {said}")
            if not padding.lengths:
                return recorder.warm(lambda: self._run_eagerly(args, kwargs))
        self._unsettled = 0 if self._host.settled() else self._unsettled + 1
        if 0 < self._unsettled <= _UNSETTLED_CALLS:
            # the schedule puts its own numbers back in this step, or at the end of its window
            return recorder.warm(lambda: self._run_eagerly(args, kwargs))
        state = self._look()
        waiting = self._frozen.fingerprint.gradients_wait()
        if padding is not None and length is not None and to is not None:
            shapes = tuple(padding.describe(leaf, length, to) for leaf in leaves)
        else:
            shapes = tuple(map(describe, leaves))
        key = (place, waiting, state, self.compiles, opened.key, shapes)
        assert self._recordings is not None
        entry = self._recordings.find(key)
        if entry is None:
            entry = self._new_entry(self._recordings, key, opened)
            if self._recorder is None:
                return self._run_eagerly(args, kwargs)
        if entry.recording is None:
            if padding is not None and length is not None and to is not None:
                leaves = padding.pad(leaves, length, to)
            result = self._towards_recording(recorder, entry, opened, leaves)
            met = entry.recording is not None or entry.refused is not None
            if padding is not None and met and to == padding.lengths[-1]:
                padding.first = False
            return result
        self._values.settle()
        tensors = only_tensors(leaves)
        if not entry.does_as_given(tensors) or (waiting and not entry.bring_gradients()):
            return self._run_eagerly(args, kwargs)
        if padding is None and not kwargs and len(tensors) == len(args) and all(map(is_, tensors, args)):
            entry.expect(tensors)
            self._usual[place, waiting] = entry
        return self._replay(entry, tensors, args, kwargs, length)

    def _look(self) -> int:
        """The state that everything frozen is in."""
        frozen = self._frozen
        state = frozen.look()
        if state != self._usual_state:
            self._usual.clear()
            self._usual_state = state
        if frozen.changed is not None:
            if self.captures:
                self._host.say(f"{self.name} is captured anew: {frozen.changed}")
            frozen.changed = None
        return state

    def _new_entry(self, recordings: Recordings, key: Any, opened: Opened) -> Entry:
        entry = Entry(key, compiled=self.compiles)
        if (restless := self._values.look(opened)) is not None:
            self._give_up(restless)
            return entry
        # what is known by its identity has to live as long as that is asked about
        entry.held = [leaf for leaf in opened.leaves if not isinstance(leaf, torch.Tensor)]
        recordings.add(entry)
        refusal = why_not_taken(opened, self._frozen)
        if refusal is not None:
            recordings.refuse(entry, refusal)
        return entry

    # -------------------------------------------------------------------------------------------- replaying

    def _replay(
        self,
        entry: Entry,
        tensors: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        length: int | None = None,
    ) -> Any:
        if self._check_every is not None and (self.replays + 1) % self._check_every == 0:
            return self._replay_checked(entry, tensors, args, kwargs, length)
        try:
            self._launch(entry, tensors, length)
        except PortError as error:
            # nothing was launched
            self._leave_ports(error)
            return self(*args, **kwargs)
        return self._after(entry)

    def _leave_ports(self, error: PortError) -> None:
        """From now on inputs and counters are copied beside the recordings, which are made anew."""
        self._ports = False
        self._usual.clear()
        assert self._recordings is not None
        self._recordings.forget([e for e in self._recordings if e.recording is not None])
        self._host.say(f"{self.name}: recordings copy nothing in and out by themselves: {error}")

    def _launch(self, entry: Entry, tensors: Any, length: int | None) -> None:
        if length is None or self._padding is None:
            entry.copy_in(tensors)
        else:
            self._padding.fill(entry.inputs, tensors, length)
        if entry.landings:
            self._host.aim(entry.landings)
        assert entry.recording is not None
        choice = self._choice
        if choice is None or choice.settled or choice.compiled != entry.compiled:
            entry.recording.replay()
        else:
            choice.launch(entry.recording.replay, self.name)
            if choice.compiled != entry.compiled:
                self._usual.clear()
        if entry.written:
            entry.copy_out(tensors)
        self.replays += 1
        assert self._recordings is not None
        self._recordings.touch(entry)

    def _after(self, entry: Entry) -> Any:
        """What a replay leaves to the host: gradients in place, effects, results."""
        if entry.gradients is not None:
            entry.place_gradients()
        for effect in entry.effects:
            effect()
        results = entry.outputs
        if self._clone:
            results = [r.clone() if isinstance(r, torch.Tensor) else r for r in results]
        return results[0] if entry.single else entry.around(results)

    def _replay_checked(
        self, entry: Entry, tensors: Any, args: tuple[Any, ...], kwargs: dict[str, Any], length: int | None
    ) -> Any:
        """The plain step, then the replay, both from the same state; where they differ, the plain one counts."""
        fingerprint, recorder = self._frozen.fingerprint, self._recorder
        assert recorder is not None
        # what lies elsewhere no recording writes, and copies to it may still be on their way
        device = self._host.device.type
        live = self._host.state_tensors() | fingerprint.live_tensors()
        live = {name: tensor for name, tensor in live.items() if tensor.device.type == device}
        live |= {f"argument {i}": tensor for i, (tensor, _) in enumerate(entry.written_of(tensors))}
        kept = keep(live, fingerprint.parameters, [*self._host.generators(), *fingerprint.generators])
        if length is not None and self._padding is not None:
            opened = Opened((args, kwargs))
            to = self._padding.length_of(entry.inputs) or length
            args, kwargs = self._arguments(opened, self._padding.pad(opened.leaves, length, to))
        with self._forwards(), self._host.recording() as effects:
            result = recorder.warm(lambda: self.function(*args, **kwargs))
        plain = outcome_of(kept, result)
        kept.put_back()
        try:
            self._launch(entry, tensors, length)
        except PortError as error:
            self._leave_ports(error)
        else:
            entry.place_gradients()
            replayed = outcome_of(kept, entry.around(entry.outputs))
            self.checks += 1
            odd = differing(kept, plain, replayed)
            if odd is None:
                return self._after(entry)
            self._give_up(
                f"replay {self.replays} beside the plain step: {odd}; the plain step counts", distrust=True
            )
        plain.put(kept)
        for effect in effects:
            effect()
        return result

    # -------------------------------------------------------------------------------------------- recording

    def _towards_recording(self, recorder: Recorder, entry: Entry, opened: Opened, leaves: list[Any]) -> Any:
        """A real step, eagerly, until there were enough; then the recording and its first replay."""
        if entry.refused is not None:
            return self._run_eagerly(*opened.structure)
        args, kwargs = self._arguments(opened, leaves)
        # compiling itself waits for the device: the call that is watched for waits comes after it
        needed = self._host.warm_calls if self.captures == 0 else 2 if entry.compiled else 1
        if entry.warm < needed:
            result = self._warm(recorder, entry, args, kwargs, watched=entry.warm + 1 == needed)
            # one that raised was no step, and what raises anyway is not recorded
            entry.warm += 1
            return result
        if not self._record(recorder, entry, opened, leaves):
            return self._run_eagerly(args, kwargs)
        tensors = only_tensors(leaves)
        if recorder.runs_while_recording:
            entry.copy_out(tensors)
            result = self._after(entry)
        else:
            try:
                self._launch(entry, tensors, None)
            except PortError as error:
                entry.leave_gradients()
                self._leave_ports(error)
                return self._run_eagerly(args, kwargs)
            result = self._after(entry)
        assert self._recordings is not None
        if self._recordings.keep_within(entry):
            self._usual.clear()
        return result

    def _warm(self, recorder: Recorder, entry: Entry, args: Any, kwargs: Any, *, watched: bool) -> Any:
        """An eager step on the recording stream; the one before recording is watched for waits."""
        fingerprint, choice = self._frozen.fingerprint, self._choice
        given = Given((args, kwargs))
        trial = choice if choice is not None and entry.compiled and choice.untried else None
        gradients = [p.grad for p in fingerprint.parameters] if trial is not None else []

        def step() -> Any:
            return recorder.warm(lambda: self.function(*args, **kwargs))

        try:
            seen = rehearse(step, self._forwards(), fingerprint, self._host.device, watched=watched)
        except Exception as error:
            if trial is None:
                raise
            trial.refuse(f"{self.name}: compiling failed, eager kernels are used: {first_line(error)}")
            for p, gradient in zip(fingerprint.parameters, gradients, strict=True):
                p.grad = gradient
            return self._run_eagerly(args, kwargs)
        if trial is not None:
            trial.untried = False
        self._suspect = seen.suspect
        if seen.reason is not None:
            self._give_up(seen.reason)
        elif (refusal := given.why_not_replayed(seen.result, clone=self._clone)) is not None:
            assert self._recordings is not None
            self._recordings.refuse(entry, refusal)
        return seen.result

    def _record(self, recorder: Recorder, entry: Entry, opened: Opened, leaves: list[Any]) -> bool:
        """Record the step for this shape; False if it cannot be, and then it runs eagerly."""
        fingerprint = self._frozen.fingerprint
        args, kwargs = self._arguments(opened, entry.take_inputs(leaves))
        given = Given((args, kwargs))
        entry.parameters = fingerprint.parameters
        entry.before = self._host.hold_gradients(entry.parameters)

        def work() -> Any:
            entry.watch_inputs()
            try:
                result = self.function(*args, **kwargs)
            finally:
                effects.close()
            entry.settle_gradients()
            return result

        ports = self._ports and recorder.ports
        feeds = entry.feeds(leaves) if ports else None
        try:
            with self._forwards(), given.noting(), self._host.recording(ports=ports) as effects:
                entry.recording, result = recorder.record(work, fingerprint.generators, feeds)
            if feeds is not None:
                entry.open_ports(feeds, effects.landings)
        except BaseException as error:
            entry.leave_gradients()
            if not isinstance(error, RuntimeError | AssertionError):
                # the step's own, or an interrupt: it is recorded when it comes next
                entry.forget()
                raise
            if isinstance(error, PortError):
                entry.forget()
                self._leave_ports(error)
                return self._record(recorder, entry, opened, leaves)
            if isinstance(error, torch.OutOfMemoryError):
                self._usual.clear()
                assert self._recordings is not None
                if self._recordings.make_room(entry, first_line(error)):
                    return self._record(recorder, entry, opened, leaves)
            elif self._choice is not None and entry.compiled:
                self._choice.refuse(f"{self.name} is recorded with eager kernels: {cause_of(error)}")
            else:
                self._give_up(self._suspect or cause_of(error))
            return False
        refusal = given.why_not_replayed(result, clone=self._clone)
        if refusal is None:
            entry.keep(result, effects)
            self.captures += 1
            if not entry.does_as_given(only_tensors(leaves)):
                refusal = "it writes into an argument, and two arguments are one memory"
        if refusal is not None:
            entry.leave_gradients()
            entry.forget()
            assert self._recordings is not None
            self._recordings.refuse(entry, refusal)
        return refusal is None

    # -------------------------------------------------------------------------------------------- running

    def _arguments(self, opened: Opened, leaves: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of the function; a mask of what is padded comes last among the leaves."""
        count = len(opened.leaves)
        args, kwargs = opened.around(leaves[:count])
        if len(leaves) > count and self._padding is not None:
            kwargs = {**kwargs, str(self._padding.buckets.mask): leaves[-1]}
        return args, kwargs

    def _forwards(self) -> AbstractContextManager[None]:
        """While it is open, prepared modules' forwards are compiled or launched as one, if that is so now."""
        if self._parts is not None:
            return self._parts.open()
        return self._compiled.open() if self.compiles else nullcontext()

    def _run_eagerly(self, args: Any, kwargs: Any) -> Any:
        padding = self._padding
        if padding is not None and padding.buckets.mask is not None and padding.buckets.mask not in kwargs:
            opened = Opened((args, kwargs))
            if (length := padding.length_of(opened.leaves)) is not None:
                args, kwargs = self._arguments(opened, padding.pad(opened.leaves, length, length))
        if self._host.eager:
            return self.function(*args, **kwargs)
        with self._forwards():
            return self.function(*args, **kwargs)

    def _give_up(self, reason: str, *, distrust: bool = False) -> None:
        self.reason = reason
        if self._recorder is not None and not self.compiles and not distrust:
            self._parts = Parts(self._recorder, self._host.device, self._host.modules, self._host.say)
        self._recorder = self._recordings = None
        self._usual.clear()
        self._host.say(f"{self.name} runs eagerly, not as one launch: {reason}")
