"""What a run leaves as evidence, block by block: losses, the samples of each update, weights, memory, gradients."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from hotloop.data import Loader
from hotloop.tune.constants import DROPOUT_NAMES, read_layers, read_optimizers
from hotloop.tune.facts import Sight
from hotloop.tune.fingerprint import hash_samples, hash_tensors, mark_weights, sample_gradients

__all__ = ["Evidence"]


class Evidence:
    """Collects evidence in a run of mode "prove".

    Args:
        specification: `horizon` and `block` in steps; `dropout`: False switches dropout off, so that runs with other
            kernels draw the same random numbers: none; `gradients`: file for those of the first step.
    """

    def __init__(self, specification: dict[str, Any]) -> None:
        self._block = int(specification["block"])
        self._dropout = bool(specification.get("dropout", True))
        self._file: str | None = specification.get("gradients")
        self._sight: Sight | None = None
        self._samples: list[torch.Tensor] = []
        self._raw: list[torch.Tensor] = []
        self._updates: list[list[torch.Tensor]] = []
        self._evaluated: list[torch.Tensor] = []
        self._marks: list[torch.Tensor] = []
        self._parameters: list[torch.Tensor] = []
        self._draws = False
        self._generators: list[torch.Tensor] = []
        self._rates: list[float] = []
        self._constants: list[list[Any]] = []
        self._last_constants: dict[str, float] = {}
        self._seen = False

    def begin(self) -> None:
        """Watch every loader and the first optimizer step of this process."""
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        self._watch_loaders()
        register_optimizer_step_pre_hook(self._before_first_step)

    def attach(self, loop: Any, sight: Sight) -> None:
        """Watch `loop`; the first counts until another is chosen."""
        self._sight = self._sight or sight
        if self._dropout:
            return
        prepare = loop.prepare

        def without_dropout(*objects: Any) -> Any:
            result = prepare(*objects)
            for module in sight.modules():
                _switch_off_dropout(module)
            return result

        loop.prepare = without_dropout

    def choose(self, sight: Sight) -> None:
        """Of several loops, `sight` has the one that trains."""
        self._sight = sight

    # ------------------------------------------------------------------------------------------------ data

    def _watch_loaders(self) -> None:
        deliver, iterate = Loader._deliver, torch.utils.data.DataLoader.__iter__
        me = self

        def delivered(self: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
            for batch in deliver(self, *args, **kwargs):
                me._saw(batch, me._samples)
                yield batch

        def iterated(self: Any) -> Any:
            batches = iterate(self)
            # hotloop's own inner loaders are seen where they deliver
            return batches if type(self).__module__.startswith("hotloop.") else me._passing(batches)

        Loader._deliver = delivered  # type: ignore[method-assign]
        torch.utils.data.DataLoader.__iter__ = iterated  # type: ignore[method-assign]

    def _passing(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._saw(batch, self._raw)
            yield batch

    def _saw(self, batch: Any, into: list[torch.Tensor]) -> None:
        with torch.no_grad():
            found = hash_samples(batch)
        if found is not None:
            (into if torch.is_grad_enabled() else self._evaluated).append(found)
        if torch.is_grad_enabled() and not self._marks:
            self._generators = _generator_states()

    # ------------------------------------------------------------------------------------------------ steps

    def _before_first_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        # it stays registered: torch may be going through its hooks right now
        if self._marks or self._seen or _capturing():
            return
        self._seen = True
        now = _generator_states()
        self._draws = bool(self._generators) and not all(
            torch.equal(a, b) for a, b in zip(self._generators, now, strict=False)
        )
        if self._file is not None:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            np.save(self._file, sample_gradients(parameters).numpy())

    def after_step(self, step: int) -> dict[str, Any] | None:
        """Note the step; at the end of a block, what there is to tell."""
        assert self._sight is not None
        if not self._parameters:
            self._parameters = [p.detach() for p in self._sight.parameters()]
        with torch.no_grad():
            if self._parameters:
                self._marks.append(mark_weights(self._parameters))
        self._updates.append(self._samples or self._raw)
        self._samples, self._raw = [], []
        self._rates.append(self._rate())
        self._note_constants(step)
        return self._tell(step) if step % self._block == 0 else None

    def _note_constants(self, step: int) -> None:
        """Where they change: [step, numbers of optimizers and, at the ends of blocks, of layers]."""
        assert self._sight is not None
        now = read_optimizers(self._sight.loop._preparer.registry.optimizers)
        if step == 1 or step % self._block == 0:
            now |= read_layers(self._sight.modules())
        if any(self._last_constants.get(name) != value for name, value in now.items()):
            self._last_constants |= now
            self._constants.append([step, now])

    def _rate(self) -> float:
        """The learning rate of the first optimizer; NaN where it is a tensor on a device."""
        assert self._sight is not None
        optimizers = self._sight.loop._preparer.registry.optimizers
        rate = optimizers[0].param_groups[0].get("lr", float("nan")) if optimizers else float("nan")
        if isinstance(rate, torch.Tensor):
            return float(rate) if rate.device.type == "cpu" else float("nan")
        return float(rate)

    def _tell(self, step: int) -> dict[str, Any]:
        assert self._sight is not None
        updates, self._updates = self._updates, []
        marks, told = self._marks[-len(updates) :], []
        for hashes in updates:
            numbers = [h.cpu().numpy() for h in hashes]
            joined = np.concatenate(numbers) if numbers else np.zeros(0, dtype=np.int64)
            told.append([len(joined), hashlib.blake2b(joined.tobytes(), digest_size=8).hexdigest()])
        rates, self._rates = self._rates, []
        constants, self._constants = self._constants, []
        return {
            "event": "block",
            "step": step,
            "rows": self._sight.take_rows(),
            "updates": told,
            "marks": [float(mark).hex() for mark in marks] if self._parameters else [],
            "rates": rates,
            "constants": constants,
            "memory_bytes": self._sight.memory_now_bytes(),
        }

    def last(self, step: int) -> dict[str, Any]:
        """What is told at the end: the rest of the last block, hashes of weights and of evaluated data."""
        assert self._sight is not None
        told = self._tell(step) if self._updates else {"updates": [], "marks": [], "rates": []}
        told.pop("event", None)
        if not told.get("rows"):
            told["rows"] = self._sight.take_rows()
        modules = self._sight.modules() if self._sight.loop is not None else []
        state = [t for m in modules for t in m.state_dict().values() if isinstance(t, torch.Tensor)]
        evaluated = hashlib.blake2b(digest_size=8)
        samples = 0
        for hashes in self._evaluated:
            samples += len(hashes)
            evaluated.update(hashes.cpu().numpy().tobytes())
        loop = self._sight.loop
        return told | {
            "draws": self._draws,
            "weights": hash_tensors(state),
            "evaluated": [samples, evaluated.hexdigest()],
            "skipped": int(loop.skipped) if loop is not None else 0,
        }


def _switch_off_dropout(module: nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = 0.0
        for name in DROPOUT_NAMES:
            if isinstance(part.__dict__.get(name), float):
                setattr(part, name, 0.0)


def _generator_states() -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return states


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
