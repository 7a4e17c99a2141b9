"""The step's state on the device: written and read by the step's own kernels, never waited for by Python.

A host that runs ahead of the device may not ask "was that loss finite?". So the answer stays where it is: a
flag that the optimizer's kernel obeys, counters beside it, and a copy of the counters to pinned memory after
each update, which the host reads when it waits, as it must, for the update `run_ahead` steps back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hotloop.state.scale import LossScale

__all__ = ["ResidentState", "Verdict"]


class Verdict:
    """What one optimizer's update is to obey.

    Attributes:
        flags: float32 [2] on the device: refuse this update; and: it was non-finite (not a mere fp16 overflow).
        refuse: view of the first flag, 0-d, exactly 0. or 1. (what torch's fused kernels want as found_inf).
        bad: view of the second.
    """

    def __init__(self, device: torch.device) -> None:
        self.flags = torch.zeros(2, device=device)
        self.refuse, self.bad = self.flags[0], self.flags[1]


class ResidentState:
    """Device-resident verdicts, counters and loss scale.

    Args:
        nonfinite: "stop" (sticky: after the first bad update none applies), "skip" or "ignore".
        run_ahead: how many updates the host may be ahead of the device before it waits.
        scale: loss scale for fp16, or None.
    """

    resident = True

    def __init__(
        self, device: torch.device, nonfinite: str, *, run_ahead: int = 8, scale: LossScale | None = None
    ) -> None:
        self.device = device
        self.nonfinite = nonfinite
        self.watching = nonfinite != "ignore"
        self.scale = scale
        self.counts = torch.zeros(4, dtype=torch.float64, device=device)
        self._shared = Verdict(device)
        self._one = torch.ones((), device=device)
        self._overflow = torch.zeros((), device=device)
        self.probe = torch.zeros((), device=device)
        self._stepped = True
        self._pace = Pace(device, run_ahead, scaled=scale is not None)

    def new_verdict(self) -> Verdict:
        """The verdict for one more optimizer: shared by all where the first bad one stops all."""
        return Verdict(self.device) if self.nonfinite == "skip" else self._shared

    def note_loss(self, loss: torch.Tensor) -> None:
        """Fold the loss of a micro-batch into a probe that is 0 while all are finite and NaN once one is not."""
        value = loss.detach()
        if value.numel() != 1:
            value = value.sum()
        value = value.reshape(())
        if self._stepped:
            self._stepped = False
            torch.mul(value, 0.0, out=self.probe)
        else:
            self.probe.add_(value * 0.0)

    def close_losses(self) -> None:
        """The losses noted so far have been judged; the next one starts afresh."""
        self._stepped = True

    def inverse(self, factor: float | torch.Tensor) -> torch.Tensor:
        """What gradients are multiplied by to be true: the token factor over the loss scale, float32 0-d."""
        if self.scale is not None:
            return self.scale.inverse(factor)
        if isinstance(factor, torch.Tensor):
            return factor.reshape(()).float()
        return self._one if factor == 1.0 else torch.full((), factor, device=self.device)

    def judge(self, verdict: Verdict, gradients: list[torch.Tensor], factor: float | torch.Tensor) -> None:
        """Multiply `gradients` by their factor in place and set the verdict, in one pass over them."""
        inverse = self.inverse(factor)
        if not self.watching and self.scale is None:
            if inverse is not self._one and gradients:
                torch._foreach_mul_(gradients, inverse)
            return
        self._pronounce(verdict, gradients, inverse)

    def judge_norm(self, verdict: Verdict, total: torch.Tensor) -> None:
        """Set the verdict from the total norm of gradients that are true already; no pass over them."""
        if self.watching or self.scale is not None:
            self._pronounce(verdict, [total.reshape(()).clone()], self._one)

    def _pronounce(self, verdict: Verdict, tensors: list[torch.Tensor], inverse: torch.Tensor) -> None:
        check = torch._amp_foreach_non_finite_check_and_unscale_
        if self.scale is None:
            if self.nonfinite == "skip":
                verdict.flags.zero_()
            # under "stop" the flag is never cleared: the first bad update refuses all later ones
            check([*tensors, self.probe], verdict.refuse, inverse)
            return
        self._overflow.zero_()
        if tensors:
            check(tensors, self._overflow, inverse)
        if self.nonfinite != "stop":
            verdict.flags.zero_()
        if self.watching:
            check([self.probe], verdict.bad, self._one)
            self.scale.blame(self._overflow, verdict.bad)
        torch.maximum(self._overflow, verdict.bad, out=verdict.refuse)
        self.scale.update(self._overflow)

    def settle(self, verdict: Verdict, flags: torch.Tensor | None = None) -> None:
        """Count the update just made or refused, and wait if the host is too far ahead.

        `flags` (float64 [2], on the device) are wishes of any rank, to be seen on all at the same update.
        """
        if self.scale is not None:
            self.counts[0:2].add_(verdict.flags)
        elif self.watching:
            self.counts[0].add_(verdict.refuse)
        if flags is not None:
            self.counts[2:4].copy_(flags)
        self._pace.mark(self.counts)

    def seen(self) -> Seen:
        """What the host knows by now, without waiting: the same at the same update on every rank."""
        return self._pace.seen

    def read(self) -> tuple[int, int]:
        """(refused, non-finite) over all updates so far; waits for the device."""
        refused, bad = self.counts[0:2].tolist()
        return int(refused), int(bad if self.scale is not None else refused)


@dataclass(frozen=True)
class Seen:
    """Counters as of update number `updates` (how many had been made): refused, non-finite, and two wishes."""

    updates: int = 0
    refused: int = 0
    bad: int = 0
    stop: bool = False
    save: bool = False


class Pace:
    """Keeps the host at most `depth` updates ahead, and hands it the counters of the update it waited for."""

    def __init__(self, device: torch.device, depth: int, *, scaled: bool) -> None:
        self._rows = torch.zeros(depth, 4, dtype=torch.float64, pin_memory=device.type == "cuda")
        self._events: list[Any] = [
            torch.Event(device) if device.type != "cpu" else None for _ in range(depth)
        ]
        self._marks = 0
        self._scaled = scaled
        self.seen = Seen()

    def mark(self, counts: torch.Tensor) -> None:
        """Queue a copy of `counts` behind the work of this update; wait for that of `depth` updates ago."""
        depth = len(self._events)
        slot = self._marks % depth
        event = self._events[slot]
        if self._marks >= depth:
            if event is not None and not event.query():
                event.synchronize()
            refused, bad, stop, save = self._rows[slot].tolist()
            self.seen = Seen(
                self._marks - depth + 1,
                int(refused),
                int(bad if self._scaled else refused),
                stop > 0,
                save > 0,
            )
        self._rows[slot].copy_(counts, non_blocking=True)
        if event is not None:
            event.record()
        self._marks += 1
