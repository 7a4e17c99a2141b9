"""What all of hotloop's optimizers do alike when their state is put back."""

import copy

import pytest
import torch
from torch import nn

from hotloop.optim import SGD, Adam, AdamW, Muon

MAKERS = [
    lambda p: SGD(p, lr=0.1, momentum=0.9),
    lambda p: Adam(p, lr=0.1),
    lambda p: AdamW(p, lr=0.1),
    lambda p: Muon(p, lr=0.1),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", MAKERS, ids=["sgd", "adam", "adamw", "muon"])
def test_state_from_a_file_lies_as_its_parameter_does(make, dtype):
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(4, 3, 2, 2, generator=generator).to(dtype) for _ in range(3)]

    def begin(value):
        p = nn.Parameter(value.clone().contiguous(memory_format=torch.channels_last))
        return p, make([p])

    def train(p, optimizer, some):
        for g in some:
            p.grad = g.contiguous(memory_format=torch.channels_last)
            optimizer.step()

    start = torch.randn(4, 3, 2, 2, generator=generator).to(dtype)
    p, optimizer = begin(start)
    train(p, optimizer, gradients)
    first, saving = begin(start)
    train(first, saving, gradients[:1])
    saved = copy.deepcopy(saving.state_dict())
    for state in saved["state"].values():
        for name, value in state.items():
            # files keep no strides
            state[name] = value.contiguous()
    again, loading = begin(first.detach())
    loading.load_state_dict(saved)
    tensors = [t for t in loading.state[again].values() if t.dim()]
    assert tensors
    assert all(t.stride() == again.stride() for t in tensors)
    train(again, loading, gradients[1:])
    assert torch.equal(again, p)
