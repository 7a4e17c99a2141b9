"""The loop as a captured step sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hotloop.loop.preparing import Preparer
from hotloop.loop.session import Session
from hotloop.loop.updates import ResidentUpdates
from hotloop.loop.window import Window
from hotloop.state import HostState, ResidentState

if TYPE_CHECKING:
    from hotloop.capture import Recorder

__all__ = ["LoopHost"]


class LoopHost:
    """Gives captured steps the loop's modules, optimizers and state, and keeps its host side straight.

    Attributes:
        device: where steps run.
        eager: captured steps run as plain Python while it is True.
    """

    def __init__(
        self,
        device: torch.device,
        preparer: Preparer,
        window: Window,
        state: HostState | ResidentState,
        session: Session,
    ) -> None:
        self.device = device
        self._preparer = preparer
        self._window = window
        self._state = state
        self._session = session
        self._recorder: Recorder | None = None
        self._rates: list[tuple[dict[str, Any], torch.Tensor]] = []
        self._rated: list[Any] = []
        self._own_rates: dict[tuple[int, int], torch.Tensor] = {}
        self._statics: dict[torch.Tensor, torch.Tensor] = {}
        self.eager = False

    def modules(self) -> list[nn.Module]:
        """Prepared modules."""
        return self._preparer.registry.modules

    def optimizers(self) -> list[Any]:
        """Prepared optimizers whose steps are recorded; the settings of others are read at each step anyway."""
        return [
            u.optimizer for u in self._preparer.updates if isinstance(u, ResidentUpdates) and u.recordable()
        ]

    def recorder(self) -> Recorder | None:
        """CUDA graphs on a CUDA device and one process; None elsewhere."""
        if self.device.type != "cuda" or not isinstance(self._state, ResidentState):
            return None
        if self._window.processes.world > 1:
            self.say("captured steps run on one process only: several processes run them eagerly")
            return None
        if self._recorder is None:
            from hotloop.capture import CudaRecorder

            self._recorder = CudaRecorder(self.device)
        return self._recorder

    def say(self, text: str) -> None:
        """Say a line once."""
        self._session.notes.say(text)

    def enter(self) -> tuple[Any, ...]:
        """Open the micro-batch; a recording freezes its weight and the factor that ends its window."""
        window = self._window
        if window.plain:
            return ()
        window.enter()
        return window.frozen()

    def ready(self) -> None:
        """Learning rates on the device, gradients of accumulation windows in place."""
        updates = self._preparer.updates
        groups = [u.optimizer.param_groups for u in updates]
        # another list of groups comes with a state that was loaded
        if len(groups) != len(self._rated) or any(
            a is not b for a, b in zip(groups, self._rated, strict=True)
        ):
            self._rate_on_device()
            self._rated = groups
        for group, rate in self._rates:
            lr = group["lr"]
            if lr is not rate and not isinstance(lr, torch.Tensor):
                # set by hand: the recording reads the tensor
                rate.fill_(lr)
                group["lr"] = rate
        if not self._window.plain:
            self._place_gradients()

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
                    rate = torch.tensor(value, device=self.device) if rate is None else rate.fill_(value)
                    group["lr"] = self._own_rates[(number, i)] = rate
                if rate is not None and group["lr"] is rate:
                    self._rates.append((group, rate))

    def _place_gradients(self) -> None:
        """In a window gradients stay in one place: each micro-batch's recording adds to the same memory."""
        for updates in self._preparer.updates:
            for p in updates.parameters():
                if not p.requires_grad:
                    continue
                static = self._statics.get(p)
                if static is None:
                    dtype = getattr(p, "grad_dtype", None) or p.dtype
                    static = self._statics[p] = torch.zeros_like(p, dtype=dtype)
                if p.grad is not static:
                    if p.grad is None:
                        static.zero_()
                    else:
                        static.copy_(p.grad)
                    p.grad = static

    @contextmanager
    def recording(self) -> Iterator[list[Callable[[], None]]]:
        """Host effects of a step go to the list instead of being done; the log's thread keeps off the device."""
        state = self._state
        assert isinstance(state, ResidentState)
        tape: list[Callable[[], None]] = []
        resident = [u for u in self._preparer.updates if isinstance(u, ResidentUpdates)]
        before = [u.host_marks() for u in resident]
        window_before = self._window.marks()
        state.tape = self._window.tape = tape
        try:
            with self._session.log.pause():
                yield tape
        finally:
            state.tape = self._window.tape = None
            state.close_losses()
            self._window.put_marks(window_before)
            for updates, marks in zip(resident, before, strict=True):
                updates.put_host_marks(marks)
