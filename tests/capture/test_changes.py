"""A run that changes as it goes: sizes grow, layers thaw, training and evaluation take turns. All by themselves."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

IMAGES = torch.randn(64, 3, 16, 16, generator=torch.Generator().manual_seed(1))
LABELS = torch.randint(4, (64,), generator=torch.Generator().manual_seed(2))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(8, 4))

    def forward(self, x):
        return self.head(self.stem(x))


def run(loop, captured, script):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    model, optimizer, scheduler = loop.prepare(model, optimizer, scheduler)

    def train(x, y):
        loss = F.cross_entropy(model(x), y)
        loop.backward(loss)
        loop.update(optimizer, scheduler, max_norm=1.0)
        return loss

    def evaluate(x, y):
        with torch.no_grad():
            return F.cross_entropy(model(x), y)

    if captured:
        train, evaluate = loop.capture(train, mode="graph"), loop.capture(evaluate, mode="graph")
    torch.manual_seed(3)
    values = []
    for i, action in enumerate(script):
        at = i * 4 % 60
        if isinstance(action, int):
            model.train()
            x = F.interpolate(IMAGES[at : at + 4], size=action)
            values.append(train(x, LABELS[at : at + 4]).detach())
        elif action == "evaluate":
            model.eval()
            values.append(evaluate(IMAGES[at : at + 4], LABELS[at : at + 4]))
        elif action in ("freeze", "thaw"):
            model.stem.requires_grad_(action == "thaw")
    return train, evaluate, model, torch.stack(values)


SCRIPTS = {
    "sizes grow": [8] * 6 + [12] * 5 + [16] * 5 + [8] * 3,
    "thaw": ["freeze"] + [8] * 7 + ["thaw"] + [8] * 7 + ["freeze"] + [8] * 3,
    "turns": ([8] * 4 + ["evaluate"] * 3) * 4,
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_captured_run_is_the_plain_one(graph_loop, name):
    plain = run(graph_loop(), False, SCRIPTS[name])
    train, evaluate, model, values = run(graph_loop(), True, SCRIPTS[name])
    assert torch.equal(values, plain[3])
    for p, q in zip(model.state_dict().values(), plain[2].state_dict().values(), strict=True):
        assert torch.equal(p, q)
    assert train.reason is None
    assert evaluate.reason is None
    # nothing is recorded twice
    assert train.captures == {"sizes grow": 3, "thaw": 2, "turns": 1}[name]
    if name == "turns":
        assert evaluate.captures == 1
        assert evaluate.replays > 6


def test_generators_that_a_step_reaches_are_given_to_the_recording(graph_loop):
    loop = graph_loop()
    generator, other = torch.Generator().manual_seed(3), torch.Generator().manual_seed(4)
    held = {"noise": other}

    def step(x):
        return x + torch.rand(2, generator=generator) + torch.rand(2, generator=held["noise"])

    run = loop.capture(step, mode="graph")
    values = [run(torch.zeros(2)) for _ in range(8)]
    assert {id(g) for g in run._recorder.generators} == {id(generator), id(other)}
    generator.manual_seed(3)
    other.manual_seed(4)
    assert torch.equal(torch.stack(values), torch.stack([step(torch.zeros(2)) for _ in range(8)]))
