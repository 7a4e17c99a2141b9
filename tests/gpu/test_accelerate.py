from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from hotloop.accelerate import Accelerator
from hotloop.accelerate.state import AcceleratorState, GradientState, PartialState

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def fresh_states() -> Iterator[None]:
    for kind in (AcceleratorState, PartialState, GradientState):
        kind._reset_state()
    yield
    for kind in (AcceleratorState, PartialState, GradientState):
        kind._reset_state()


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_a_training_step_never_waits_for_the_device(precision: str) -> None:
    accelerator = Accelerator(mixed_precision=precision, gradient_accumulation_steps=2)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    x = torch.randn(512, 16)
    data = TensorDataset(x, x[:, :4].argmax(1))
    loader = DataLoader(data, batch_size=32, shuffle=True, pin_memory=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses = []
    for epoch in range(4):
        for i, (inputs, targets) in enumerate(loader):
            # the first updates create state and capture nothing; after them no call may wait
            torch.cuda.set_sync_debug_mode("error" if epoch or i > 8 else "default")
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
    torch.cuda.set_sync_debug_mode("default")
    assert torch.stack(losses[-8:]).mean() < 0.7 * torch.stack(losses[:8]).mean()
    assert scheduler.get_last_lr()[0] < 1e-2


def test_batches_arrive_on_the_device_as_they_were() -> None:
    accelerator = Accelerator()
    x = torch.arange(300.0)
    loader: Any = accelerator.prepare(DataLoader(TensorDataset(x), batch_size=7, pin_memory=True))
    seen = [batch[0].clone() for batch in loader]
    assert all(batch.is_cuda for batch in seen)
    assert torch.equal(torch.cat(seen).cpu(), x)
