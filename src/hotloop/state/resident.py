"""The step's state on the device: written and read by the step's own kernels, never waited for by Python.

A host that runs ahead of the device may not ask "was that loss finite?". So the answer stays where it is: a
flag that the optimizer's kernel obeys, counters beside it, and a copy of the counters to pinned memory after
each update, which the host reads when it waits, as it must, for the update `run_ahead` steps back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hotloop.state.scale import LossScale
from hotloop.state.tape import Landing, Tape

__all__ = ["Pace", "ResidentState", "Seen", "Verdict"]

# Updates of one recorded step whose counters its recording sends to the host itself; of more, each is sent beside it.
_SPARE = 8


class Verdict:
    """What one optimizer's update is to obey.

    Attributes:
        flags: float32 [2] on the device: refuse this update; and: it was non-finite (not a mere fp16 overflow).
        refuse: view of the first flag, 0-d, exactly 0. or 1. (what torch's fused kernels want as found_inf).
        bad: view of the second.
        heard: refusals of this optimizer that the host knows of.
    """

    def __init__(self, device: torch.device) -> None:
        self.flags = torch.zeros(2, dtype=torch.float32, device=device)
        self.refuse, self.bad = self.flags[0], self.flags[1]
        self.heard = 0


class ResidentState:
    """Device-resident verdicts, counters and loss scale.

    Every kernel here is launched once per update by a host that has little time, so there are as few as can be: on
    one process under "stop" one check (over gradients or their norm, and the losses) and one copy of the flag.

    Args:
        nonfinite: "stop" (sticky: after the first bad update none applies), "skip" or "ignore".
        run_ahead: how many updates the host may be ahead of the device before it waits.
        scale: loss scale for fp16, or None.

    Attributes:
        tape: while a step is being captured, what the host has to do after each replay of it; None otherwise.
    """

    resident = True

    def __init__(
        self, device: torch.device, nonfinite: str, *, run_ahead: int = 8, scale: LossScale | None = None
    ) -> None:
        self.device = device
        self.nonfinite = nonfinite
        self.watching = nonfinite != "ignore"
        self.scale = scale
        self.probe: torch.Tensor | None = None
        self.tape: Tape | None = None
        self._losses: list[torch.Tensor] = []
        self._shared = Verdict(device)
        self._one = torch.ones((), dtype=torch.float32, device=device)
        self._overflow = torch.zeros((), dtype=torch.float32, device=device)
        self._counts = torch.zeros(4, dtype=torch.float32, device=device)
        self._refused, self._both, self._wishes = self._counts[0], self._counts[0:2], self._counts[2:4]
        self._sticky = nonfinite == "stop" and scale is None
        self._optimizers = 0
        self._pace = Pace(device, run_ahead)

    def share_losses(self) -> torch.Tensor:
        """Keep the losses' verdict in one 0-d tensor, 0 or NaN, that a sum can carry to other ranks."""
        self.probe = torch.zeros((), dtype=torch.float32, device=self.device)
        return self.probe

    def new_verdict(self) -> Verdict:
        """The verdict for one more optimizer: shared by all where nothing but the first bad one, for all, refuses."""
        self._optimizers += 1
        if self.scale is not None:
            self.scale.deferred = self._optimizers > 1
        if self.nonfinite == "skip" or (self.scale is not None and self._optimizers > 1):
            # an overflow refuses the update of one optimizer, whatever becomes of the others
            return Verdict(self.device)
        return self._shared

    def note_loss(self, loss: torch.Tensor) -> None:
        """Remember the loss of a micro-batch until the update that it leads to."""
        if self.probe is not None:
            value = loss.detach().sum() * 0.0
            if self._losses:
                self.probe.add_(value)
            else:
                self.probe.copy_(value)
                self._losses.append(self.probe)
            return
        # `.data` has a version counter of its own: the check multiplies it by 1 in place, and autograd may not mind
        self._losses.append(loss.data)

    def noted(self) -> int:
        """How many losses wait to be judged; where several processes share them, 0 or 1."""
        return len(self._losses)

    def close_losses(self) -> None:
        """The losses noted so far have been judged."""
        self._losses.clear()

    def inverse(self, factor: float | torch.Tensor) -> torch.Tensor:
        """What gradients are multiplied by to be true: the token factor over the loss scale, float32 0-d."""
        if self.scale is not None:
            return self.scale.inverse(factor)
        if isinstance(factor, torch.Tensor):
            return factor.reshape(()).float()
        if factor == 1.0:
            return self._one
        return torch.full((), factor, dtype=torch.float32, device=self.device)

    def nothing(self) -> torch.Tensor:
        """The norm of no gradients: 0, float32 0-d."""
        return torch.zeros((), dtype=torch.float32, device=self.device)

    def judge(
        self,
        verdict: Verdict,
        gradients: list[torch.Tensor],
        factor: float | torch.Tensor,
        norms: Sequence[torch.Tensor] = (),
        *,
        again: bool = False,
    ) -> None:
        """Multiply `gradients` by their factor in place and set the verdict, in one pass over them.

        `norms`, 0-d, are over further gradients, which are true already. `again` judges the same update once more: the
        loss scale has heard of it.
        """
        inverse = self.inverse(factor)
        if not self.watching and self.scale is None:
            if inverse is not self._one and gradients:
                torch._foreach_mul_(gradients, inverse)
            return
        self._pronounce(verdict, gradients, inverse, list(norms), again)

    def judge_norms(self, verdict: Verdict, norms: list[torch.Tensor], *, again: bool = False) -> None:
        """Set the verdict from norms, 0-d, over gradients that are true already; no pass over those."""
        if self.watching or self.scale is not None:
            self._pronounce(verdict, [], self._one, norms, again)

    def _pronounce(
        self,
        verdict: Verdict,
        tensors: list[torch.Tensor],
        inverse: torch.Tensor,
        norms: list[torch.Tensor],
        again: bool,
    ) -> None:
        check = torch._amp_foreach_non_finite_check_and_unscale_
        if self.scale is None:
            if self.nonfinite == "skip":
                verdict.flags.zero_()
            # under "stop" the flag is never cleared: the first bad update refuses all later ones
            if inverse is self._one:
                check(tensors + norms + self._losses, verdict.refuse, inverse)
                return
            for some, factor in ((tensors, inverse), (norms + self._losses, self._one)):
                if some:
                    check(some, verdict.refuse, factor)
            return
        self._overflow.zero_()
        for some, factor in ((tensors, inverse), (norms, self._one)):
            if some:
                check(some, self._overflow, factor)
        if self.nonfinite != "stop":
            verdict.flags.zero_()
        if self.watching:
            # under "stop" the first bad one stops all optimizers
            bad = self._shared.bad if self.nonfinite == "stop" else verdict.bad
            if self._losses:
                check(self._losses, bad, self._one)
            self.scale.blame(self._overflow, bad)
            if bad is not verdict.bad:
                verdict.bad.copy_(bad)
        torch.maximum(self._overflow, verdict.bad, out=verdict.refuse)
        if not again:
            self.scale.update(self._overflow)

    def count(self, verdict: Verdict, wishes: torch.Tensor | None = None) -> torch.Tensor | None:
        """Count on the device the update just made or refused; returns what the host is to hear of it.

        `wishes` (float64 [2], on the device) are those of any rank, to be seen on all at the same update.
        """
        if self._sticky and wishes is None:
            return verdict.refuse
        if self._sticky:
            self._refused.copy_(verdict.refuse)
        elif self.scale is not None:
            self._both.add_(verdict.flags)
        elif self.watching:
            self._refused.add_(verdict.refuse)
        if wishes is not None:
            self._wishes.add_(wishes)
        return self._counts if self.watching or self.scale is not None or wishes is not None else None

    def land(self, counted: torch.Tensor | None) -> Landing | None:
        """While a step is recorded that may say so: have the recording send what `count` returned to the host."""
        tape = self.tape
        if tape is None or not tape.lands:
            return None
        landing = None
        spare = self._pace.spare(len(tape.landings))
        if counted is not None and spare is not None:
            landing = Landing(counted, spare if counted.dim() else spare[0], tape.updates)
            landing.spare.copy_(counted, non_blocking=True)
            tape.landings.append(landing)
        tape.updates += 1
        return landing

    def aim(self, landings: list[Landing]) -> None:
        """Before a replay: its counters land in the rows of the updates that it makes."""
        address = self._pace.address
        for landing in landings:
            assert landing.aim is not None
            landing.aim(address(landing.ahead))

    def keep_pace(
        self, counted: torch.Tensor | None, verdict: Verdict, landing: Landing | None = None
    ) -> None:
        """Send what `count` returned to the host, and wait if the host is too far ahead."""
        if landing is None or landing.aim is None:
            self._pace.mark(counted, verdict)
        else:
            self._pace.mark(None, verdict, tells=landing.single)

    def after_step(self, effect: Callable[[], None]) -> None:
        """Do what the host has to do for a step: now, or after each replay if the step is being captured."""
        if self.tape is None:
            effect()
        else:
            self.tape.append(effect)

    def seen(self) -> Seen:
        """What the host knows by now, without waiting: the same at the same update on every rank."""
        return self._read(*self._pace.known)

    def troubled(self) -> bool:
        """Whether `seen` shows any update to be refused or non-finite: in a fraction of its time."""
        row = self._pace.known[1]
        return row[0] != 0.0 or row[1] != 0.0

    def first_bad(self) -> int | None:
        """Number of the first update that was non-finite, of those not yet seen; waits for the device."""
        for updates, row in self._pace.drain():
            if self._read(updates, row).bad:
                return updates - 1
        return None

    def read(self) -> tuple[int, int]:
        """(refused, non-finite) over all updates so far; waits for the device."""
        for _ in self._pace.drain():
            pass
        updates, row = self._pace.known
        seen = self._read(updates, row)
        if self._sticky and seen.refused:
            return self._pace.since_nonzero, 1
        return seen.refused, seen.bad

    def load(self, refused: int, bad: int) -> None:
        """Set the counters, as of a checkpoint; a "stop" that has come to pass is lifted."""
        for _ in self._pace.drain():
            pass
        self._shared.flags.zero_()
        self._counts.zero_()
        if not self._sticky:
            self._counts[0].fill_(refused)
            self._counts[1].fill_(bad)
        self._pace.restart([0.0 if self._sticky else float(refused), float(bad), 0.0, 0.0])

    def _read(self, updates: int, row: list[float]) -> Seen:
        refused, bad, stop, saves = row
        return Seen(
            updates, int(refused), int(bad if self.scale is not None else refused), stop > 0, int(saves)
        )


@dataclass(frozen=True)
class Seen:
    """Counters as of update number `updates`: refused, non-finite, wishes of any rank to stop and to save.

    `updates` counts those made when the counters were copied. Under "stop", refused is 0 or 1.
    """

    updates: int = 0
    refused: int = 0
    bad: int = 0
    stop: bool = False
    saves: int = 0


class Pace:
    """Keeps the host at most `depth` updates ahead, and hands it the counters of the update it waited for.

    Attributes:
        known: updates heard of, and the row of the last of them.
        since_nonzero: updates heard of since the first row that began with another value than zero, that one included.
    """

    def __init__(self, device: torch.device, depth: int) -> None:
        # a recording writes the rows of all its updates before the host waits for any of them
        self._rows = torch.zeros(depth + _SPARE, 4, dtype=torch.float32, pin_memory=device.type == "cuda")
        self._spare = torch.zeros(_SPARE, 4, dtype=torch.float32, pin_memory=device.type == "cuda")
        self._whole = list(self._rows)
        self._addresses = [row.data_ptr() for row in self._rows]
        self._first = [row[0] for row in self._rows]
        self._values = self._rows.numpy()
        self._numbers: Any = self._values.reshape(-1).data
        self._events: list[Any] = [
            torch.Event(device) if device.type != "cpu" else None for _ in range(depth)
        ]
        self._owners: list[Verdict | None] = [None] * depth
        # the row says itself that it has come: it began with a number that no counter is
        self._tells = [False] * depth
        self._marks = 0
        self.known: tuple[int, list[float]] = (0, [0.0] * 4)
        self.since_nonzero = 0

    def mark(self, counts: torch.Tensor | None, owner: Verdict | None = None, *, tells: bool = False) -> None:
        """Queue a copy of `counts` (float32 [4] or 0-d) behind this update's work; wait for `depth` updates ago.

        Without `counts`, the copy is queued already, or there is none; with `tells` it is of one number, to where
        `address` said. `owner` is told of the refusals that the copy shows to be new.
        """
        depth = len(self._events)
        slot = self._marks % depth
        if self._marks - self.known[0] >= depth:
            self._hear(self._marks - depth)
        if counts is not None:
            row = self._marks % len(self._addresses)
            (self._whole if counts.dim() else self._first)[row].copy_(counts, non_blocking=True)
        self._owners[slot] = owner
        self._tells[slot] = tells
        event = self._events[slot]
        if event is not None:
            event.record()
        self._marks += 1

    def spare(self, number: int) -> torch.Tensor | None:
        """A row that nobody reads, for recording a copy to; None where there is no further one."""
        return self._spare[number] if number < _SPARE else None

    def address(self, ahead: int) -> int:
        """Where the row of the update lies that comes after `ahead` others; a recording is about to write it."""
        row = (self._marks + ahead) % len(self._addresses)
        self._numbers[4 * row] = -1.0
        return self._addresses[row]

    def drain(self) -> Iterator[tuple[int, list[float]]]:
        """Wait for every update marked, in order; yields what `known` then is."""
        while self.known[0] < self._marks:
            self._hear(self.known[0])
            yield self.known

    def restart(self, row: list[float]) -> None:
        """Count anew, with `row` as what is known; everything marked must have been heard of."""
        self._marks = 0
        self.known = (0, row)
        self.since_nonzero = 0
        self._rows.zero_()

    def _hear(self, mark: int) -> None:
        slot, number = mark % len(self._events), mark % len(self._addresses)
        event = self._events[slot]
        # asking the row takes a tenth of the time that asking the event does
        come = self._tells[slot] and self._numbers[4 * number] >= 0.0
        if not come and event is not None and not event.query():
            event.synchronize()
        row: list[float] = self._values[number].tolist()
        owner = self._owners[slot]
        if owner is not None and row[0] > self.known[1][0]:
            owner.heard += int(row[0] - self.known[1][0])
        self.known = (mark + 1, row)
        self.since_nonzero += self.since_nonzero > 0 or row[0] != 0.0
