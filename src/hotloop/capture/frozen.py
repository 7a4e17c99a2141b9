"""The states that everything a step freezes was in so far: which of them is it in now?"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from hotloop.capture.fingerprint import Fingerprint
from hotloop.capture.identities import Identities, alike
from hotloop.errors import CaptureError

__all__ = ["Frozen"]

# A value that changes in so many calls running would have the step recorded anew for ever.
_CHANGES_IN_A_ROW = 4
# Objects given as arguments are kept and looked into, so many of them; where more come, each call makes its own.
_MOST_ARGUMENTS = 8


class Frozen:
    """Numbers the states of `function`'s fingerprint.

    Args:
        function: the step.
        name: what it is called in lines.
        modules, optimizers, parameters: give the prepared ones.
        skip: objects that are not looked into.

    Attributes:
        fingerprint: what is watched now; made at the first look.
        state: the number of the state found last.
        changed: what the last state that was new differed in, until it is taken.
    """

    fingerprint: Fingerprint

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        modules: Callable[[], Iterable[nn.Module]],
        optimizers: Callable[[], Iterable[Any]],
        parameters: Callable[[], Iterable[torch.Tensor]],
        skip: Iterable[Any],
    ) -> None:
        identities = Identities()
        self._look: Callable[[], Fingerprint] = lambda: Fingerprint(
            function, modules(), optimizers(), skip, parameters(), identities, self._arguments.values()
        )
        self._arguments: dict[int, Any] = {}
        self._name = name
        # names and values of each state
        self._known: list[tuple[list[str], list[Any]]] = []
        self._changes: dict[str, int] = {}
        self.state = -1
        self.changed: str | None = None

    def watch(self, argument: Any) -> bool:
        """From the next look on, watch what the step may read of an object that it is given, or of its class.

        False if there have been too many of them: it is another one each time.
        """
        if id(argument) not in self._arguments:
            if len(self._arguments) >= _MOST_ARGUMENTS:
                return False
            self._arguments[id(argument)] = argument
            self.state = -1
        return True

    def look(self) -> int:
        """The number of the state that everything is in; a new one means recording anew.

        Raises:
            CaptureError: some value was another one in each of the last calls.
        """
        if self.state < 0:
            self.fingerprint = self._look()
            return self._add()
        if self.fingerprint.unchanged():
            self._changes.clear()
            return self.state
        values = self.fingerprint.take()
        known = self._known[self.state][1]
        if alike(values, known):
            self.fingerprint.remember()
            self._changes.clear()
            return self.state
        return self._find(known, values)

    def _find(self, known: list[Any], values: list[Any]) -> int:
        changed = self.fingerprint.difference(known, values)
        fresh = self.fingerprint
        if fresh.leads_elsewhere(known, values):
            # objects, modules or parameters are others now: what they hold counts
            fresh = self._look()
            values = fresh.take()
        for number, (names, known) in enumerate(self._known):
            if names == fresh.names and alike(known, values):
                fresh.remember()
                self.fingerprint, self.state = fresh, number
                return number
        name = changed.split(":")[0]
        # another one that changed meanwhile begins anew
        self._changes = {name: self._changes.get(name, 0) + 1}
        if self._changes[name] >= _CHANGES_IN_A_ROW:
            raise CaptureError(
                f"{self._name}: {changed} changed in each of the last {_CHANGES_IN_A_ROW} calls; a captured step "
                "freezes Python values. Pass it as a tensor argument, or keep it in `loop.scalar(name)`"
            )
        self.changed = changed
        self.fingerprint = self._look() if fresh is self.fingerprint else fresh
        return self._add()

    def _add(self) -> int:
        self._known.append((self.fingerprint.names, self.fingerprint.take()))
        self.state = len(self._known) - 1
        return self.state
