"""Inside a trial's process: runs the script under observation, counts, times and compares its steps, and ends it.

Modes: "measure" times stretches of steps as the tuner asks for them; "prove" runs the first steps from the seed and
tells losses, data, weights and memory block by block; "doctor" records a window and judges it. The script's records,
checkpoints, progress line and trackers are left out, and `torch.save` writes nothing.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hotloop.doctor.live.steps import StepMarks
from hotloop.errors import HotloopError
from hotloop.loop.observing import OBSERVERS
from hotloop.seeds import derive_seed
from hotloop.tune.evidence import Evidence
from hotloop.tune.facts import Sight
from hotloop.tune.link import Link

__all__ = ["Probe", "run_trial"]


def run_trial(specification: dict[str, Any]) -> int:
    """Run the script as `specification` says; returns the exit status. Called in a process of its own."""
    os.environ.update(specification["environment"])
    os.chdir(specification["cwd"])
    link = Link.connect(specification["socket"])
    for setup in specification["setups"]:
        _call(setup)
    if specification["mode"] == "doctor":
        return _run_doctor(specification, link)
    probe = Probe(specification, link)
    status = probe.run()
    # everything is told: nothing that would run at exit may still write or wait
    sys.stdout.flush()
    os._exit(status)


def _call(setup: str) -> None:
    file, _, name = setup.rpartition(":")
    module_spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    if module_spec is None or module_spec.loader is None:
        raise HotloopError(f"setup {setup!r} is not of the form file.py:function")
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    getattr(module, name)()


class _Stop(BaseException):
    """Ends the script: no `except Exception` of its own takes this for its business."""


class Probe:
    """Watches one run of the script.

    Args:
        specification: mode, seed, `shift` (number of the reference's seed), and by mode: `warm_up` steps; `horizon` and
            `block` steps, `dropout` on or off, `gradients` file.
        link: to the tuner.
    """

    def __init__(self, specification: dict[str, Any], link: Link) -> None:
        self._spec = specification
        self._link = link
        self._mode: str = specification["mode"]
        self._began = time.perf_counter()
        self._first_s = 0.0
        self._steps = 0
        self._sight = Sight()
        self._sights: list[Sight] = []
        self._evidence: Evidence | None = None
        self._loops: list[Any] = []
        self._measure_from = self._measure_to = -1
        self._clock = 0.0
        self._waited = 0.0
        self._update_s = self._update_began = 0.0
        self._until = int(specification.get("warm_up", 0)) if self._mode == "measure" else 0
        if self._mode == "prove":
            self._evidence = Evidence(specification)

    def run(self) -> int:
        """Run the script to its end, or as far as the tuner wants; tells why it ended."""
        from hotloop.doctor.live.script import run_script

        _leave_files_alone()
        _shift_seeds(self._spec.get("seed"), int(self._spec.get("shift", 0)))
        OBSERVERS.append(self._see)
        self._time_updates()
        spec = self._spec
        with StepMarks(self._after_step):
            if self._evidence is not None:
                self._evidence.begin()
            try:
                status = run_script(spec["target"], spec["arguments"], module=spec["module"])
            finally:
                OBSERVERS.remove(self._see)
        if status and not self._over:
            self._link.send({"event": "error", "text": "", "steps": self._steps})
            return status
        self._end(finished=not self._over)
        return 0

    _over = False

    def _time_updates(self) -> None:
        """Note the host's time inside optimizers."""
        from torch.optim import optimizer as hooks

        def before(*_: Any) -> None:
            self._update_began = time.perf_counter()

        def after(*_: Any) -> None:
            self._update_s += time.perf_counter() - self._update_began

        hooks.register_optimizer_step_pre_hook(before)
        hooks.register_optimizer_step_post_hook(after)

    def _see(self, loop: Any) -> None:
        """A Loop was made."""
        self._loops.append(loop)
        if self._steps:
            # a loop made after training began, for evaluation say: not written down either
            self._sight.quiet(loop)
            return
        sight = Sight() if self._sights else self._sight
        self._sights.append(sight)
        sight.attach(loop)
        if self._evidence is not None:
            self._evidence.attach(loop, sight)

    def _choose_loop(self) -> None:
        """Of several loops the one that has an optimizer is what trains."""
        training = [sight for sight in self._sights if sight.loop._preparer.registry.optimizers]
        if not training:
            return
        self._sight = training[0]
        for sight in self._sights:
            if sight is not self._sight:
                sight.quiet(sight.loop)
        if self._evidence is not None:
            self._evidence.choose(self._sight)

    def _after_step(self) -> None:
        """A step has ended."""
        if self._over or _capturing():
            return
        self._steps += 1
        if self._steps == 1:
            self._choose_loop()
            self._sight.synchronize()
            self._first_s = time.perf_counter() - self._began
            self._update_s, self._waited = 0.0, self._sight.waited_s()
        if self._mode == "measure":
            self._measured_step()
        else:
            assert self._evidence is not None
            message = self._evidence.after_step(self._steps)
            if message is not None:
                self._link.send(message)
            if self._steps >= self._spec["horizon"]:
                self._stop()

    def _measured_step(self) -> None:
        if self._steps == self._measure_from:
            self._sight.synchronize()
            self._waited = self._sight.waited_s()
            self._clock = time.perf_counter()
        if self._steps == self._measure_to:
            self._sight.synchronize()
            seconds = time.perf_counter() - self._clock
            self._link.send(
                {
                    "event": "slice",
                    "steps": self._measure_to - self._measure_from,
                    "seconds": seconds,
                    "waited_s": self._sight.waited_s() - self._waited,
                    "step": self._steps,
                    "memory_bytes": self._sight.memory_bytes(),
                }
            )
            self._until = self._steps
        if self._steps == self._until:
            if self._measure_to < 0:
                self._sight.synchronize()
                facts = self._sight.facts()
                facts["ready_s"] = time.perf_counter() - self._began
                facts["first_s"] = self._first_s
                took = max(facts["ready_s"] - self._first_s, 1e-9)
                facts["step_s"] = took / max(self._steps - 1, 1)
                facts["data_share"] = (self._sight.waited_s() - self._waited) / took
                facts["update_share"] = self._update_s / took
                facts["steps"] = self._steps
                self._link.send({"event": "ready", "facts": facts})
            self._wait()

    def _wait(self) -> None:
        """Stand still until the tuner asks for more."""
        message = self._link.receive()
        while message is not None and "rows" in message:
            self._link.send({"event": "rows", "rows": self._sight.take_rows()})
            message = self._link.receive()
        if message is None or "run" not in message:
            self._stop()
            return
        self._measure_from = self._steps + int(message["skip"])
        self._measure_to = self._measure_from + int(message["run"])
        self._until = -1
        if self._measure_from == self._steps:
            self._sight.synchronize()
            self._waited = self._sight.waited_s()
            self._clock = time.perf_counter()

    def _stop(self) -> None:
        self._end(finished=False)
        os._exit(0)

    def _end(self, *, finished: bool) -> None:
        self._over = True
        message: dict[str, Any] = {"event": "end", "finished": finished, "steps": self._steps}
        message["loops"] = len(self._loops)
        message["memory_bytes"] = self._sight.memory_bytes()
        if self._loops:
            message["facts"] = self._sight.facts()
        if self._evidence is not None:
            message |= self._evidence.last(self._steps)
        else:
            message["rows"] = self._sight.take_rows()
        self._link.send(message)


def _run_doctor(specification: dict[str, Any], link: Link) -> int:
    """Record windows of the script's steps, end it, and tell what the doctor says."""
    from hotloop.doctor.live import run_watched
    from hotloop.doctor.report import gather_facts

    skip, active = int(specification["skip"]), int(specification["active"])
    _leave_files_alone()
    sight = Sight()
    OBSERVERS.append(lambda loop: sight.quiet(loop))
    last = skip + 2 * (active + 2) + 1
    steps = 0

    def count() -> None:
        nonlocal steps
        steps += not _capturing()
        if steps >= last:
            raise _Stop

    with StepMarks(count):
        watched = run_watched(
            specification["target"],
            specification["arguments"],
            module=specification["module"],
            skip=skip,
            active=active,
        )
    facts = None if watched.trace is None else gather_facts(watched.trace)
    link.send({"event": "doctor", "facts": json.loads(json.dumps(facts, default=str))})
    os._exit(0)


def _leave_files_alone() -> None:
    """Trials run the script many times: what it saves would be overwritten by runs that nobody wants."""

    def save_nothing(*args: Any, **kwargs: Any) -> None:
        """Stands in for torch.save."""

    torch.save = save_nothing


def _shift_seeds(seed: int | None, shift: int) -> None:
    """With a shift, have the script's own calls seed otherwise; the override of `seed` does the rest."""
    if seed is not None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
    if not shift:
        return

    def shifted(function: Callable[..., Any], bits: int) -> Callable[..., Any]:
        def call(value: Any = None, *rest: Any, **more: Any) -> Any:
            if isinstance(value, int):
                value = derive_seed(value, "reference", shift) % 2**bits
            return function(value, *rest, **more)

        return call

    torch.manual_seed = shifted(torch.manual_seed, 63)
    random.seed = shifted(random.seed, 63)
    np.random.seed = shifted(np.random.seed, 32)


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
