"""What a prepared optimizer's `step` and `zero_grad` do: step at a window's end, and only if all is finite."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from hotloop.errors import OptimizerError
from hotloop.kernels.selection import chosen
from hotloop.loop.buffers import BufferKeeper
from hotloop.loop.window import Window
from hotloop.optim.gradients import as_real_dense, clip_coefficient, total_norm
from hotloop.optim.one_launch import OneLaunch
from hotloop.optim.skipping import MaskedStep, choose_route, takes_device_rate
from hotloop.stalls import LISTENERS, mark_step
from hotloop.state.host import HostState
from hotloop.state.resident import ResidentState

if TYPE_CHECKING:
    from hotloop.kernels import Tables

__all__ = ["HostUpdates", "ResidentUpdates", "Updates", "updates_of"]


class Updates(ABC):
    """The updates of one optimizer; `install` puts its `step` and `zero_grad` in place of the optimizer's own.

    Attributes:
        attempted: updates made or refused so far.
        pending: micro-batches backpropagated since the last update.
        folding: a step follows the next clipping at once, and may take the factor along.
    """

    def __init__(self, optimizer: Optimizer, window: Window, keepers: list[BufferKeeper]) -> None:
        self.optimizer = optimizer
        self.window = window
        self.keepers = keepers
        self.attempted = 0
        self.pending = 0
        self.folding = False
        self.judged = False
        self._scaled: set[int] = set()
        self._stepped_in = -1
        self._dense: bool | None = None
        self._covered: tuple[tuple[int, int, int], bool] = ((-1, 0, 0), False)
        self._step: Callable[..., Any] = optimizer.step
        self._zero: Callable[..., None] = optimizer.zero_grad
        if getattr(optimizer.zero_grad, "__func__", None) is Optimizer.zero_grad:
            self._zero = self._forget_gradients

    def install(self) -> None:
        """Let calls on the optimizer come here; pickling and deep copies of it do not carry this along."""
        self.optimizer.step = self.step  # type: ignore[method-assign]
        self.optimizer.zero_grad = self._zero if self.window.plain else self.zero_grad  # type: ignore[method-assign]
        self.optimizer._hotloop_updates = self  # type: ignore[attr-defined]
        self.window.optimizers += 1

    def remove(self) -> None:
        """Give the optimizer its own methods back."""
        self.window.optimizers -= 1
        for name in ("step", "zero_grad", "_hotloop_updates", "found_inf"):
            self.optimizer.__dict__.pop(name, None)

    @abstractmethod
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update, or nothing inside a window."""

    @abstractmethod
    def clip(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
        """Make gradients of `parameters` true and clip them; returns their norm before clipping, 0-d."""

    @abstractmethod
    def make_true(self) -> None:
        """Multiply the gradients by the window's factor now, so that `p.grad` is what the update will use."""

    @abstractmethod
    def was_applied(self) -> bool:
        """Whether the last update was made; waits for the device."""

    def _forget_gradients(self, set_to_none: bool = True) -> None:
        """torch's `zero_grad` by its usual argument: it does this and little else, in four times the host's time."""
        if not set_to_none:
            Optimizer.zero_grad(self.optimizer, set_to_none=False)
            return
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                p.grad = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, unless some of the window now open are waiting in them.

        At the end of a window, after its last backward and instead of a step, it gives the window up.
        """
        window = self.window
        # with several optimizers it may as well make room for the next loss of the same micro-batch
        if window.boundary and window.learned and not window.stepped and window.optimizers == 1:
            window.give_up()
        elif self.pending or (window.waiting and self._stepped_in != window.number):
            return
        self.pending = 0
        self._zero(set_to_none)

    def note_clipped(self, parameters: list[torch.Tensor], by: Updates) -> None:
        """Another optimizer's clipping took some of this one's parameters along: they are true already."""
        if by._scaled:
            mine = {id(p) for p in self.parameters()}
            self._scaled |= mine & {id(p) for p in parameters}

    def restart(self, counts: dict[str, int]) -> None:
        """Go on from counts that were saved; what belonged to a step in progress is forgotten."""
        for name, value in counts.items():
            if hasattr(self, name):
                setattr(self, name, value)
        self.judged = False
        self._scaled = set()

    def parameters(self) -> Iterator[torch.Tensor]:
        """All parameters of the optimizer."""
        for group in self.optimizer.param_groups:
            yield from group["params"]

    def _postpone(self) -> None:
        self.pending += 1
        self.window.end()

    def _remaining(self) -> list[torch.Tensor]:
        """Gradients that no clipping has made true yet."""
        listed: Iterable[torch.Tensor] = self.parameters()
        if self._scaled:
            listed = (p for p in listed if id(p) not in self._scaled)
        return self._gradients(listed)

    def _gradients(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Their gradients; what kind each is, is looked at once, since asking costs more than all else here."""
        found = [g for p in parameters if (g := p.grad) is not None]
        if self._dense is None and found:
            self._dense = not any(g.is_sparse or g.is_complex() for g in found)
        return found if self._dense else [as_real_dense(g) for g in found]

    def _covers(self, parameters: list[torch.Tensor]) -> bool:
        """Whether `parameters` hold every gradient of this optimizer; remembered for the list last asked about."""
        key = (len(parameters), id(parameters[0]), id(parameters[-1])) if parameters else (0, 0, 0)
        if key != self._covered[0]:
            mine = {id(p) for p in self.parameters() if p.grad is not None}
            self._covered = (key, mine <= {id(p) for p in parameters})
        return self._covered[1]

    def _finish(self) -> None:
        # torch's schedulers warn where they cannot see that the optimizer stepped first
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        self.attempted += 1
        self._stepped_in = self.window.number
        self._clear()
        self.window.end()

    def _clear(self) -> None:
        self.pending = 0
        self.judged = False
        if self._scaled:
            self._scaled = set()


class HostUpdates(Updates):
    """Updates where reading a value is free: Python asks, and simply does not step.

    Attributes:
        applied: updates made so far.
        refused: the last update was not made.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        window: Window,
        keepers: list[BufferKeeper],
        state: HostState,
        on_bad: Callable[[HostUpdates], None],
    ) -> None:
        super().__init__(optimizer, window, keepers)
        self.state = state
        self.applied = 0
        self.refused = False
        self._finite = True
        self._special = False
        self._on_bad = on_bad

    def install(self) -> None:
        """See `Updates.install`; one process without accumulation gets a step that is as short as can be."""
        if self.window.plain:
            self.step = self._watched_step() if self.state.watching else self._step_plainly  # type: ignore[method-assign]
        super().install()

    def restart(self, counts: dict[str, int]) -> None:
        """See `Updates.restart`."""
        super().restart(counts)
        self.refused, self._finite = False, True

    def _step_plainly(self, closure: Callable[[], Any] | None = None) -> Any:
        result = self._step() if closure is None else self._step(closure)
        self.attempted += 1
        self.applied += 1
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        return result

    def _watched_step(self) -> Callable[..., Any]:
        """A step that looks at gradients and losses first: `step` with all it needs in locals, 5 microseconds less."""
        inner, optimizer, state, keepers = self._step, self.optimizer, self.state, self.keepers
        losses, found, one, answer = state.losses, state.found, state.one, state.answer
        check = torch._amp_foreach_non_finite_check_and_unscale_

        def step(closure: Callable[[], Any] | None = None) -> Any:
            if self.judged or closure is not None or self._special:
                return HostUpdates.step(self, closure)
            # held until after the step: the optimizer then meets the same Python objects instead of new ones
            gradients = [
                g for group in optimizer.param_groups for p in group["params"] if (g := p.grad) is not None
            ]
            finite = True
            try:
                if gradients:
                    check(gradients, found, one)
                for loss in losses:
                    value = loss.item()
                    finite = finite and value - value == 0.0
            except RuntimeError:
                # sparse or complex gradients, a loss of several elements: the general way knows them
                self._special = True
                found.zero_()
                return HostUpdates.step(self, closure)
            losses.clear()
            if not finite or answer[0] != 0.0:
                found.zero_()
                self._refuse()
                return None
            result = inner()
            self.attempted += 1
            self.applied += 1
            self.refused = False
            optimizer._opt_called = True  # type: ignore[attr-defined]
            for keeper in keepers:
                keeper.accept()
            return result

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        return step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update, refused if a loss or gradient is not finite; nothing inside a window."""
        window, state = self.window, self.state
        if not window.boundary:
            return self._postpone()
        if closure is not None:
            return self._step_with(closure)
        factor = 1.0 if window.plain else float(window.factor())
        finite = self._finite
        if not self.judged:
            rest = self._remaining()
            if state.watching:
                finite = state.judge(rest, factor) and finite
            elif factor != 1.0 and rest:
                torch._foreach_mul_(rest, factor)
        if state.watching:
            finite = finite and (state.losses_finite() if window.plain else not window.loss_bad)
        state.close_losses()
        self._finite = True
        if not finite:
            self._refuse()
            return None
        result = self._step()
        self.applied += 1
        self.refused = False
        for keeper in self.keepers:
            keeper.accept()
        self._finish()
        return result

    def _step_with(self, closure: Callable[[], Any]) -> Any:
        if not self.window.plain:
            raise OptimizerError(
                f"{type(self.optimizer).__name__}.step(closure) evaluates the loss by itself: it needs one process "
                "and accumulation=1"
            )
        result = self._step(closure)
        finite = self.state.losses_finite()
        self.state.close_losses()
        self.applied += 1
        self._finish()
        if self.state.watching and not finite:
            self._on_bad(self)
        return result

    def _refuse(self) -> None:
        self.refused = True
        self.state.skipped += 1
        for keeper in self.keepers:
            keeper.restore()
        self._finish()
        self._on_bad(self)

    def clip(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
        """Make gradients of `parameters` true and clip them; returns their norm before clipping, 0-d."""
        listed = [p for p in parameters if p.grad is not None]
        gradients = self._gradients(listed)
        factor = 1.0 if self.window.plain else float(self.window.factor())
        if factor != 1.0:
            fresh = self._gradients(p for p in listed if id(p) not in self._scaled)
            if fresh:
                torch._foreach_mul_(fresh, factor)
            self._scaled.update(id(p) for p in listed)
        total = total_norm(gradients, norm_type)
        value = total.item()
        finite = value - value == 0.0
        self._finite = self._finite and finite
        self.judged = self._covers(listed)
        # a coefficient of exactly 1 changes nothing; NaN must spread as it does in torch
        if not value <= max_norm - 1e-6 and gradients:
            torch._foreach_mul_(gradients, clip_coefficient(total, max_norm))
        return total

    def make_true(self) -> None:
        """Multiply the gradients by the window's factor now, so that `p.grad` is what the update will use."""
        factor = 1.0 if self.window.plain else float(self.window.factor())
        rest = self._remaining()
        if factor != 1.0 and rest:
            torch._foreach_mul_(rest, factor)
        self._scaled.update(id(p) for p in self.parameters())

    def was_applied(self) -> bool:
        """Whether the last update was made."""
        return not self.refused


class ResidentUpdates(Updates):
    """Updates on a device that the host runs ahead of: a flag on the device refuses, nobody asks.

    Attributes:
        route: how an update is refused: "fused", "masked", or "none" if it cannot be.
        issued: updates whose kernels were issued, also into a capture.
        host_schedule: a schedule changes settings of this optimizer on the host.
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
        self._behind = False
        self.host_schedule = False
        self.watching = state.watching or state.scale is not None
        # an fp16 overflow is skipped whatever is asked about non-finite losses
        self.route = choose_route(optimizer, "skip" if state.scale is not None else state.nonfinite)
        self._masked = MaskedStep(optimizer, self._step, state.nonfinite) if self.route == "masked" else None
        self._one_launch: OneLaunch | None = None
        self._looked = False
        self._coefficient: torch.Tensor | None = None
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
        if closure is not None:
            raise OptimizerError(
                f"{type(self.optimizer).__name__}.step(closure) reads its loss on the host at every evaluation; call "
                'it on an unprepared optimizer, or use device="cpu"'
            )
        if not self.judged:
            factor = 1.0 if window.plain else window.factor()
            state.judge(self.verdict, self._remaining(), factor)
        state.close_losses()
        if state.tape is not None and not self.recordable():
            # the graph ends with the gradients; this optimizer steps eagerly after each replay
            result = None
            self._behind = True
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
        return result

    def _make_step(self) -> Any:
        coefficient, self._coefficient = self._coefficient, None
        kernel = self._kernel()
        if kernel is None and coefficient is not None:
            torch._foreach_mul_(self._gradients(self.parameters()), coefficient)
        if kernel is not None:
            return kernel(coefficient, self.verdict.refuse if self.watching else None)
        return self._masked(self.verdict.refuse) if self._masked is not None else self._step()

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
                self._zero(set_to_none)
            else:
                super().zero_grad(set_to_none)
        elif self.pending == 0:
            if self._behind:
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
        self._behind = False

    def clip(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
        """Make gradients of `parameters` true and clip them; returns their norm before clipping, 0-d.

        One pass measures them; unscaling, token factor and clipping are one further pass.
        """
        listed = [p for p in parameters if p.grad is not None]
        gradients = self._gradients(listed)
        factor = 1.0 if self.window.plain else self.window.factor()
        already = bool(self._scaled) and all(id(p) in self._scaled for p in listed)
        inverse = None
        if not already and (
            self.state.scale is not None or isinstance(factor, torch.Tensor) or factor != 1.0
        ):
            inverse = self.state.inverse(factor)
            self._scaled.update(id(p) for p in listed)
        if gradients and norm_type == 2.0 and chosen() and gradients[0].device.type == "cuda":
            total = self._clip_by_kernel(gradients, max_norm, inverse)
        else:
            total = total_norm(gradients, norm_type)
            if inverse is not None:
                total = total * inverse
            coefficient = clip_coefficient(total, max_norm)
            if inverse is not None:
                coefficient = coefficient * inverse
            if gradients:
                torch._foreach_mul_(gradients, coefficient)
        if self._covers(listed):
            self.judged = True
            self.state.judge_norm(self.verdict, total)
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
        self.state.judge(self.verdict, self._remaining(), 1.0 if self.window.plain else self.window.factor())
        self.judged = True
        self._scaled.update(id(p) for p in self.parameters())

    def was_applied(self) -> bool:
        """Whether the last update was made; waits for the device."""
        return self.verdict.refuse.item() == 0.0


# What torch's schedulers look for on an optimizer's step, lest they warn or wrap it again.
setattr(HostUpdates.step, "_wrapped_by_lr_sched", True)
setattr(HostUpdates._step_plainly, "_wrapped_by_lr_sched", True)
setattr(ResidentUpdates.step, "_wrapped_by_lr_sched", True)


def updates_of(optimizer: Any) -> HostUpdates | ResidentUpdates | None:
    """The updates of a prepared optimizer; None if it is not prepared."""
    return getattr(optimizer, "_hotloop_updates", None)
