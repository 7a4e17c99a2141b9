"""Updates on the CPU: whether all is finite is asked before each step, at no cost there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from hotloop.errors import OptimizerError
from hotloop.loop.buffers import BufferKeeper
from hotloop.loop.updates import Updates
from hotloop.loop.window import Window
from hotloop.optim.gradients import clip_coefficient, total_norm
from hotloop.state.host import HostState

__all__ = ["HostUpdates"]


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
        self.refused = False

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
            if self.judged or not self._finite or closure is not None or self._special:
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
        if window.optimizers > 1:
            window.take_turn(self)
        if closure is not None:
            return self._step_with(closure)
        factor = 1.0 if window.plain else float(window.factor())
        finite = self._finite or not state.watching
        if not self.judged or state.noted() != self._noted:
            # a backward after the clipping has made further gradients
            rest = self._remaining()
            if state.watching:
                finite = state.judge(rest, factor) and finite
            elif factor != 1.0 and rest:
                torch._foreach_mul_(rest, factor)
        if state.watching:
            finite = finite and (state.losses_finite() if window.plain else not window.loss_bad)
        state.close_losses()
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

    def _is_marked(self) -> bool:
        return self.judged or not self._finite or bool(self._scaled)

    def forget_marks(self) -> None:
        """See `Updates.forget_marks`."""
        super().forget_marks()
        self._finite = True

    def judge_later(self, total: torch.Tensor) -> None:
        """See `Updates.judge_later`."""
        value = total.item()
        if value - value != 0.0:
            self._finite = False

    def clip(
        self,
        parameters: Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float,
        known: set[int] | None = None,
    ) -> torch.Tensor:
        """See `Updates.clip`."""
        listed = [p for p in parameters if p.grad is not None]
        gradients = self._gradients(listed)
        factor = 1.0 if self.window.plain else float(self.window.factor())
        if factor != 1.0:
            true = self._scaled if known is None else known
            fresh = self._gradients(p for p in listed if id(p) not in true)
            if fresh:
                torch._foreach_mul_(fresh, factor)
            self._scaled.update(id(p) for p in listed)
        total = total_norm(gradients, norm_type)
        value = total.item()
        finite = value - value == 0.0
        self._finite = self._finite and finite
        self.judged, self._noted = self._covers(listed), self.state.noted()
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


# What torch's schedulers look for on an optimizer's step, lest they warn or wrap it again.
setattr(HostUpdates.step, "_wrapped_by_lr_sched", True)
setattr(HostUpdates._step_plainly, "_wrapped_by_lr_sched", True)
