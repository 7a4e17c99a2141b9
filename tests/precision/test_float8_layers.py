"""fp8 in a model's layers: which ones, that they stay the user's, and training through a loop."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import hotloop
from hotloop.errors import PrecisionError
from hotloop.precision import Precision, choose_layers, install_float8, remove_float8

EMULATED = Precision("fp8", layers="all", emulated=True)


class Net(nn.Module):
    def __init__(self, width: int = 32, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
            )
            for _ in range(blocks)
        )
        self.odd = nn.Linear(width, width + 1)
        self.head = nn.Linear(width, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def test_layers_of_a_size_that_gains_are_chosen_but_the_output() -> None:
    with torch.device("meta"):
        model = Net(4096)
    found = choose_layers(model)
    assert found.chosen == ("blocks.0.1", "blocks.0.3", "blocks.1.1", "blocks.1.3")
    assert "multiples of 16" in found.kept["odd"]
    assert "too small" in found.kept["head"]
    assert str(found) == "fp8 in 4 of 6 Linear layers: blocks.*.* (4)"
    with torch.device("meta"):
        wide_output = nn.Sequential(nn.Linear(4096, 4096), nn.Linear(4096, 4096))
        named = nn.ModuleDict({"body": nn.Linear(4096, 4096), "output": nn.Linear(4096, 50304)})
        tied = nn.ModuleDict(
            {"words": nn.Embedding(4096, 4096), "body": nn.Linear(4096, 4096), "z": nn.GELU()}
        )
        tied.body.weight = tied.words.weight
    assert choose_layers(wide_output).chosen == ("0", "1")
    assert choose_layers(named).kept == {"output": "the model's output"}
    assert "body" in choose_layers(tied).kept
    small = choose_layers(Net(32))
    assert small.chosen == ()
    assert str(small).startswith("fp8 in none of 6 Linear layers")


def test_layers_by_name() -> None:
    assert choose_layers(Net(), ("blocks.1.*", "head")).chosen == ("blocks.1.1", "blocks.1.3", "head")
    with pytest.raises(PrecisionError, match=r"blocks\.\*\.\* \(4\), odd, head"):
        choose_layers(Net(), ("encoder.*",))
    with pytest.raises(PrecisionError, match="multiples of 16"):
        choose_layers(Net(), ("odd",))


def test_what_never_calls_a_layer_keeps_it() -> None:
    class Own(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return input

    model = nn.ModuleDict(
        {"own": Own(16, 16), "attention": nn.MultiheadAttention(16, 2), "lin": nn.Linear(16, 16)}
    )
    found = choose_layers(model, "all")
    assert found.chosen == ("lin",)
    assert "forward of its own" in found.kept["own"]
    assert "MultiheadAttention" in found.kept["attention.out_proj"]


def test_the_model_stays_the_users() -> None:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(16, 32)
    plain = model(x)
    kinds, keys, children = [type(m) for m in model.modules()], list(model.state_dict()), repr(model)
    install_float8(model, EMULATED)
    rounded = model(x)
    assert not torch.equal(rounded, plain)
    assert ((rounded - plain).norm() / plain.norm()).item() < 0.06
    assert ([type(m) for m in model.modules()], list(model.state_dict()), repr(model)) == (
        kinds,
        keys,
        children,
    )
    # copies and pickles are plain models with weights of their own
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), plain)
        other.head.weight.data.zero_()
    part = copy.deepcopy(model.blocks[0])
    assert torch.equal(part(x), copy.deepcopy(model).blocks[0](x))
    assert torch.equal(model(x), rounded)
    # and so are models that take up its state
    fresh = Net()
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(x), plain)
    remove_float8(model)
    assert torch.equal(model(x), plain)


def test_a_layer_used_twice_and_recomputed() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(32, 32)
    x = torch.randn(16, 32)
    install_float8(layer_holder := nn.Sequential(layer), EMULATED)

    def gradient(recompute: bool) -> torch.Tensor:
        layer.zero_grad()
        h = checkpoint(layer_holder, x, use_reentrant=False) if recompute else layer_holder(x)
        h = checkpoint(layer_holder, h, use_reentrant=False) if recompute else layer_holder(h)
        h.square().mean().backward()
        assert layer.weight.grad is not None
        return layer.weight.grad.clone()

    assert torch.equal(gradient(True), gradient(False))
    remove_float8(layer_holder)
    right = gradient(False)
    install_float8(layer_holder, EMULATED)
    assert ((gradient(False) - right).norm() / right.norm()).item() < 0.1


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own tracing
def test_compiled_it_computes_the_same() -> None:
    torch.manual_seed(0)
    model, x = Net(blocks=1), torch.randn(16, 32)
    install_float8(model, EMULATED)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    results = []
    for forward in (model, compiled):
        model.zero_grad()
        y = forward(x)
        y.square().mean().backward()
        results.append([y.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def train(
    precision: str | Precision, steps: int, record: object = False
) -> tuple[list[float], hotloop.Loop, Net]:
    torch.manual_seed(0)
    model = Net()
    loop = hotloop.Loop(precision, device="cpu", record=record)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = loop.prepare(model, optimizer)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        x = torch.randn(32, 32, generator=generator)
        out = model(x)
        assert out.dtype == torch.float32
        loss = F.cross_entropy(out, x[:, :16].argmax(1))
        loop.backward(loss)
        loop.update(optimizer, max_norm=1.0)
        losses.append(loss.item())
    loop.end_training()
    return losses, loop, model


def test_training_follows_bf16_and_says_where_it_is_fp8(tmp_path: Path) -> None:
    losses, loop, model = train(EMULATED, 60, tmp_path / "run")
    right, _, _ = train("bf16", 60)
    assert sum(losses[-10:]) / 10 < 0.7 * losses[0]
    assert abs(sum(losses[-10:]) - sum(right[-10:])) / 10 < 0.1
    assert losses != right
    told = loop.explain()
    assert "fp8        blocks.0.1" in told
    assert "not fp8    odd: 32 -> 33 is not in multiples of 16" in told
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["fp8"][0]["layers"] == ["blocks.0.1", "blocks.0.3", "blocks.1.1", "blocks.1.3", "head"]
    assert any("fp8 in 5 of 6 Linear layers" in note["text"] for note in record["notes"])
    # another loop with another precision takes it back
    other = hotloop.Loop("bf16", device="cpu", record=False)
    other.prepare(model)
    assert all("forward" not in m.__dict__ for m in model.modules())
    other.end_training()


def test_bf16_weights_go_with_fp8() -> None:
    precision = Precision("fp8", layers="all", emulated=True, weights="bf16")
    losses, _, model = train(precision, 30)
    right, _, _ = train(EMULATED, 30)
    assert model.head.weight.dtype == torch.bfloat16
    assert abs(sum(losses[-10:]) - sum(right[-10:])) / 10 < 0.1
