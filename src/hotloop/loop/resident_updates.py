"""Updates on a device that the host runs ahead of: what is not finite is refused there, and nobody waits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from hotloop.errors import OptimizerError
from hotloop.kernels.selection import chosen
from hotloop.loop.buffers import BufferKeeper
from hotloop.loop.updates import Updates
from hotloop.loop.window import Window
from hotloop.optim.gradients import clip_coefficient, total_norm
from hotloop.optim.one_launch import OneLaunch
from hotloop.optim.skipping import MaskedStep, choose_route, make_momentum_buffers, takes_device_rate
from hotloop.stalls import LISTENERS, mark_step
from hotloop.state.resident import ResidentState

if TYPE_CHECKING:
    from hotloop.kernels import Tables

__all__ = ["ResidentUpdates"]


class ResidentUpdates(Updates):
    """Updates on a device that the host runs ahead of: a flag on the device refuses, nobody asks.

    Attributes:
        route: how an update is refused: "fused", "masked", or "none" if it cannot be.
        issued: updates whose kernels were issued, also into a capture.
        host_schedule: a schedule changes settings of this optimizer on the host.
        behind: in the recording now made, the step comes after each replay.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        window: Window,
        keepers: list[BufferKeeper],
        state: ResidentState,
        after: Callable[[ResidentUpdates], None],
    ) -> None:
        super().__init__(optimizer, window, keepers)
        self.state = state
        self.verdict = state.new_verdict()
        self.issued = 0
        self.behind = False
        self.host_schedule = False
        self.watching = state.watching or state.scale is not None
        self.route = choose_route(optimizer, state.nonfinite, scaled=state.scale is not None)
        self._masked: MaskedStep | None = None
        if self.route == "masked":
            self._masked = MaskedStep(optimizer, self._step, state.nonfinite, scaled=state.scale is not None)
        self._one_launch: OneLaunch | None = None
        self._looked = False
        self._coefficient: torch.Tensor | None = None
        self._norms: list[torch.Tensor] = []
        self._told = False
        self._tables: Tables | None = None
        self._after = after

    def install(self) -> None:
        """See `Updates.install`."""
        super().install()
        self.optimizer.zero_grad = self.zero_grad  # type: ignore[method-assign]
        if self.route == "fused":
            self.optimizer.found_inf = self.verdict.refuse  # type: ignore[attr-defined]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update that the device makes or refuses; nothing inside a window."""
        window, state = self.window, self.state
        if not window.boundary:
            state.after_step(self._postpone)
            if state.tape is not None:
                # only until the recording ends: `zero_grad` after this must find a window open
                self.pending += 1
            return None
        if window.optimizers > 1:
            window.take_turn(self)
        if closure is not None:
            raise OptimizerError(
                f"{type(self.optimizer).__name__}.step(closure) reads its loss on the host at every evaluation; call "
                'it on an unprepared optimizer, or use device="cpu"'
            )
        if not self.judged or state.noted() != self._noted:
            # not clipped, or a backward after the clipping has made further gradients
            factor = 1.0 if window.plain else window.factor()
            state.judge(self.verdict, self._remaining(), factor, self._norms, again=self._told)
        state.close_losses()
        if state.tape is not None and not self.recordable():
            # the graph ends with the gradients; this optimizer steps eagerly after each replay
            result = None
            self.behind = True
            state.tape.append(self._make_step)
        else:
            result = self._make_step()
        for keeper in self.keepers:
            keeper.restore(self.verdict.refuse)
        counted = state.count(self.verdict, window.flags_on_device)
        landing = state.land(counted)
        self.issued += 1
        self._clear()

        def finish() -> None:
            self._finish()
            state.keep_pace(counted, self.verdict, landing)
            self._after(self)
            if LISTENERS:
                mark_step(self.optimizer)

        state.after_step(finish)
        if state.tape is not None and self.behind:
            state.tape.guard(self.parameters(), type(self.optimizer).__name__)
        return result

    def _make_step(self) -> Any:
        coefficient, self._coefficient = self._coefficient, None
        kernel = self._kernel()
        if kernel is None and coefficient is not None:
            torch._foreach_mul_(self._gradients(self.parameters()), coefficient)
        if kernel is not None:
            return kernel(coefficient, self.verdict.refuse if self.watching else None)
        if self._masked is not None:
            return self._masked(self.verdict.refuse)
        if self.route == "fused":
            # parameters that learn from now on, and groups added late
            make_momentum_buffers(self.optimizer)
        return self._step()

    def _kernel(self) -> OneLaunch | None:
        """Hotloop's own kernel for the next step, where kernels are chosen and this optimizer's step is one."""
        if not chosen() or self._masked is not None:
            return None
        if not self._looked:
            self._looked = True
            self._one_launch = OneLaunch.of(self.optimizer)
        kernel = self._one_launch
        return kernel if kernel is not None and kernel.ready() else None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See `Updates.zero_grad`; under capture it is recorded, or done after each replay."""
        tape = self.state.tape
        if tape is None:
            if self.window.plain:
                self._zero_plainly(set_to_none)
            else:
                super().zero_grad(set_to_none)
        elif self.pending == 0:
            if self.behind:
                # the step that is made after the replay reads them
                tape.append(lambda: self._zero(set_to_none))
            else:
                self._zero(set_to_none)

    def recordable(self) -> bool:
        """Whether the step can be recorded: state and learning rate are on the device, nothing moves on the host."""
        return takes_device_rate(self.optimizer) and not self.host_schedule and self.route != "masked"

    def host_marks(self) -> int:
        """What issuing a step changes on the host and recording one must not, to be put back."""
        return self.pending

    def put_host_marks(self, marks: int) -> None:
        """Put `host_marks` back."""
        self.pending = marks
        self.behind = False

    def _is_marked(self) -> bool:
        return self.judged or self._told or bool(self._scaled) or bool(self._norms)

    def forget_marks(self) -> None:
        """See `Updates.forget_marks`."""
        super().forget_marks()
        self._norms = []
        self._told = False

    def judge_later(self, total: torch.Tensor) -> None:
        """See `Updates.judge_later`."""
        self._norms.append(total)

    def clip(
        self,
        parameters: Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float,
        known: set[int] | None = None,
    ) -> torch.Tensor:
        """See `Updates.clip`. One pass measures; unscaling, token factor and clipping are one further pass."""
        listed = [p for p in parameters if p.grad is not None]
        gradients = self._gradients(listed)
        factor = 1.0 if self.window.plain else self.window.factor()
        inverse = None
        if self.state.scale is not None or isinstance(factor, torch.Tensor) or factor != 1.0:
            true = self._scaled if known is None else known
            fresh = [p for p in listed if id(p) not in true] if true else listed
            if fresh:
                inverse = self.state.inverse(factor)
            if len(fresh) < len(listed) and inverse is not None:
                # the rest is true already, and one norm is over both
                torch._foreach_mul_(self._gradients(fresh), inverse)
                inverse = None
            self._scaled.update(id(p) for p in listed)
        if gradients and norm_type == 2.0 and chosen() and gradients[0].device.type == "cuda":
            total = self._clip_by_kernel(gradients, max_norm, inverse)
        else:
            total = total_norm(gradients, norm_type) if gradients else self.state.nothing()
            if inverse is not None:
                total = total * inverse
            coefficient = clip_coefficient(total, max_norm)
            if inverse is not None:
                coefficient = coefficient * inverse
            if gradients:
                torch._foreach_mul_(gradients, coefficient)
        if self._covers(listed):
            self.judged, self._noted = True, self.state.noted()
            self.state.judge_norms(self.verdict, [total, *self._norms], again=self._told)
            self._told = True
        # its factor is 0 or NaN if it is not finite, which the gradients then need not show
        self._norms.append(total)
        return total

    def _clip_by_kernel(
        self, gradients: list[torch.Tensor], max_norm: float, inverse: torch.Tensor | None
    ) -> torch.Tensor:
        """One launch measures; the factor is left to the step that follows, or is one launch more."""
        from hotloop.kernels import Tables, clip_norm, scale_all

        kernel = self._kernel() if self.folding and (self.state.tape is None or self.recordable()) else None
        if self._tables is None:
            self._tables = Tables()
        total, coefficient = clip_norm(gradients, max_norm, inverse=inverse, tables=self._tables)
        if kernel is not None:
            self._coefficient = coefficient
        else:
            scale_all(gradients, coefficient, tables=self._tables)
        return total

    def make_true(self) -> None:
        """Multiply the gradients by the window's factor now, so that `p.grad` is what the update will use."""
        factor = 1.0 if self.window.plain else self.window.factor()
        self.state.judge(self.verdict, self._remaining(), factor, self._norms, again=self._told)
        self.judged, self._noted, self._told = True, self.state.noted(), True
        self._scaled.update(id(p) for p in self.parameters())

    def was_applied(self) -> bool:
        """Whether the last update was made; waits for the device."""
        return self.verdict.refuse.item() == 0.0


# What torch's schedulers look for on an optimizer's step, lest they warn or wrap it again.
setattr(ResidentUpdates.step, "_wrapped_by_lr_sched", True)
