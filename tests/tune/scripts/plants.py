"""Changes that are made to a trial from inside: good ones that only look different, and bad ones."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

STATE = {"calls": 0}
LEAK: list[Any] = []


def after_forward(change: Any) -> None:
    """Have every prepared or plain Sequential's training output go through `change(output, number of the call)`."""
    plain = nn.Sequential.forward

    def forward(self: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
        out = plain(self, x)
        if torch.is_grad_enabled():
            STATE["calls"] += 1
            return change(out, STATE["calls"])
        return out

    nn.Sequential.forward = forward


def wrong_by_two_percent() -> None:
    """A kernel that miscomputes a little from the first step."""
    after_forward(lambda out, call: out * 1.02)


def wrong_after_recording() -> None:
    """A replay that computes something else than what was recorded: right at first, wrong from the fifth call."""
    after_forward(lambda out, call: out * 1.1 if call >= 5 else out)


def diverges_late() -> None:
    """A number format that loses it two thirds through."""
    generator = torch.Generator().manual_seed(7)
    after_forward(
        lambda out, call: out + torch.randn(out.shape, generator=generator) * max(0.0, (call - 50) * 0.1)
    )


def not_finite_late() -> None:
    """The same, all at once."""
    after_forward(lambda out, call: out * float("nan") if call == 70 else out)


def rounds_like_bf16() -> None:
    """Honest rounding of outputs, straight through for the gradient."""
    after_forward(lambda out, call: out + (out.bfloat16().float() - out).detach())


def adds_rounding_noise() -> None:
    """Honest noise of the size of float32's rounding."""
    after_forward(lambda out, call: out * (1 + 1e-7))


def drops_a_sample() -> None:
    """A loader that leaves out the last sample of a batch now and then."""
    from hotloop.data import Loader

    plain = Loader._on_device

    def on_device(self: Any, steps: Any) -> Any:
        for number, step in enumerate(plain(self, steps)):
            if number == 7 and step.batch is not None and torch.is_grad_enabled():
                step.batch = [t[:-1] for t in step.batch]
            yield step

    Loader._on_device = on_device


def swaps_samples() -> None:
    """A loader that gives the same samples in another order."""
    from hotloop.data import Loader

    plain = Loader._on_device

    def on_device(self: Any, steps: Any) -> Any:
        for step in plain(self, steps):
            if step.batch is not None:
                step.batch = [t.flip(0) for t in step.batch]
            yield step

    Loader._on_device = on_device


def evaluates_on_less() -> None:
    """Validation on half of its data."""
    from hotloop.data import Loader

    plain = Loader._on_device

    def on_device(self: Any, steps: Any) -> Any:
        for number, step in enumerate(plain(self, steps)):
            if number == 1 and not torch.is_grad_enabled():
                return
            yield step

    Loader._on_device = on_device


def skips_updates() -> None:
    """Every tenth update is not made."""
    plain = torch.optim.AdamW.step

    def step(self: Any, closure: Any = None) -> Any:
        STATE["calls"] += 1
        if STATE["calls"] % 10 == 0:
            return None
        return plain(self, closure)

    torch.optim.AdamW.step = step


def bigger_batches() -> None:
    """Twice the batch size."""
    plain = DataLoader.__init__

    def init(self: Any, *args: Any, batch_size: int = 1, **kwargs: Any) -> None:
        plain(self, *args, batch_size=batch_size * 2, **kwargs)

    DataLoader.__init__ = init


def fewer_steps() -> None:
    """The last batches of each epoch are left out."""
    from hotloop.data import Loader

    plain = Loader._on_device

    def on_device(self: Any, steps: Any) -> Any:
        for number, step in enumerate(plain(self, steps)):
            if self.epoch == 3 and number == 18 and torch.is_grad_enabled():
                return
            yield step

    Loader._on_device = on_device


def higher_rate() -> None:
    """A learning rate that is a tenth too high."""
    plain = torch.optim.AdamW.__init__

    def init(self: Any, params: Any, lr: float = 1e-3, **kwargs: Any) -> None:
        plain(self, params, lr=lr * 1.1, **kwargs)

    torch.optim.AdamW.__init__ = init


def worse_metric() -> None:
    """A right loss, and an evaluation in which the model is broken."""
    plain = nn.Sequential.forward

    def forward(self: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
        out = plain(self, x)
        return out if torch.is_grad_enabled() else out * torch.tensor([1.0, -1.0])

    nn.Sequential.forward = forward


def leaks() -> None:
    """Memory that is never given back."""
    after_forward(lambda out, call: (LEAK.append(torch.ones(150_000)), out)[1])


def random_each_time() -> None:
    """A race: each run adds other errors, from the first step."""
    generator = torch.Generator().manual_seed(int.from_bytes(os.urandom(4), "little"))
    after_forward(lambda out, call: out * (1 + 1e-2 * torch.randn(1, generator=generator)))


def crashes() -> None:
    """Raises in the third step."""

    def change(out: torch.Tensor, call: int) -> torch.Tensor:
        if call == 3:
            raise RuntimeError("planted: the kernel failed")
        return out

    after_forward(change)


def out_of_memory() -> None:
    """As torch says it."""

    def change(out: torch.Tensor, call: int) -> torch.Tensor:
        if call == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return out

    after_forward(change)


def hangs() -> None:
    """Never comes back from the third step."""

    def change(out: torch.Tensor, call: int) -> torch.Tensor:
        if call == 3:
            time.sleep(3600)
        return out

    after_forward(change)


def less_decay() -> None:
    """A weight decay that is a little smaller."""
    plain = torch.optim.AdamW.__init__

    def init(self: Any, params: Any, weight_decay: float = 1e-2, **kwargs: Any) -> None:
        plain(self, params, weight_decay=weight_decay * 0.9, **kwargs)

    torch.optim.AdamW.__init__ = init


def bigger_eps() -> None:
    """An epsilon that is ten times larger."""
    plain = torch.optim.AdamW.__init__

    def init(self: Any, params: Any, eps: float = 1e-8, **kwargs: Any) -> None:
        plain(self, params, eps=eps * 10, **kwargs)

    torch.optim.AdamW.__init__ = init
