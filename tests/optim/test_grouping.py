"""Each parameter in exactly one group, by what holds it."""

import pytest
import torch
from torch import nn

import hotloop
from hotloop.optim import no_decay, split_matrices


class RootMeanSquareNorm(nn.Module):
    """As models of other libraries have: a norm by its name only, with a gain of two dimensions."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(2, 4))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.position = nn.Parameter(torch.zeros(1, 5, 4))
        self.conv = nn.Conv1d(4, 4, 3)
        self.attention = nn.MultiheadAttention(4, 2)
        self.bn = nn.BatchNorm1d(4)
        self.norm = RootMeanSquareNorm()
        self.hidden = nn.Linear(4, 4)
        self.shared = nn.Linear(4, 4)
        self.shared.weight = self.hidden.weight
        self.tied = nn.Linear(4, 7, bias=False)
        self.tied.weight = self.embed.weight
        self.head = nn.Linear(4, 2)
        self.frozen = nn.Bilinear(2, 2, 2).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(()))


def names(model, groups):
    by_id = {id(p): n for n, p in model.named_parameters()}
    return [sorted(by_id[id(p)] for p in group["params"]) for group in groups]


def assert_each_once(model, groups):
    listed = [id(p) for group in groups for p in group["params"]]
    assert sorted(listed) == sorted(id(p) for p in model.parameters())


def test_decay_is_for_matrices_that_are_no_norms_and_no_embeddings():
    model = Net()
    groups = no_decay(model, 0.1, lr=3e-4)
    assert_each_once(model, groups)
    assert [(g["weight_decay"], g["lr"]) for g in groups] == [(0.1, 3e-4), (0.0, 3e-4)]
    assert names(model, groups)[0] == [
        "attention.in_proj_weight",
        "attention.out_proj.weight",
        "conv.weight",
        "frozen.weight",
        "head.weight",
        "hidden.weight",
        "position",
    ]


def test_a_group_that_would_be_empty_is_left_out():
    assert len(no_decay(nn.Linear(2, 2, bias=False))) == 1
    assert len(no_decay(nn.LayerNorm(2))) == 1
    torch.optim.AdamW(no_decay(nn.LayerNorm(2)))


def test_muon_gets_hidden_matrices():
    model = Net()
    groups = split_matrices(model, weight_decay=0.2, adamw_weight_decay=0.3)
    assert_each_once(model, groups)
    assert names(model, groups)[0] == [
        "attention.in_proj_weight",
        "attention.out_proj.weight",
        "conv.weight",
        "frozen.weight",
        "hidden.weight",
    ]
    assert names(model, groups)[1] == ["head.weight"]
    assert [(g["use_muon"], g["weight_decay"]) for g in groups] == [(True, 0.2), (False, 0.3), (False, 0.0)]


def test_what_the_caller_names_is_adamws():
    model = Net()
    groups = split_matrices(model, adamw=["conv", model.attention.out_proj, model.hidden.weight], head=False)
    assert_each_once(model, groups)
    assert names(model, groups)[:2] == [
        ["attention.in_proj_weight", "frozen.weight", "head.weight"],
        ["attention.out_proj.weight", "conv.weight", "hidden.weight"],
    ]
    with pytest.raises(hotloop.HotloopError, match="Net has no module and no parameter named 'stem'"):
        split_matrices(model, adamw=["stem"])


def test_a_parametrized_embedding_is_an_embedding():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5))
    inner, hidden = (
        nn.utils.parametrizations.spectral_norm(layer).parametrizations.weight.original for layer in model[:2]
    )
    decayed, spared = ([id(p) for p in group["params"]] for group in no_decay(model, 0.1))
    assert sorted(decayed) == sorted([id(hidden), id(model[2].weight)])
    assert id(inner) in spared
    by_muon, *_ = split_matrices(model)
    assert [id(p) for p in by_muon["params"]] == [id(hidden)]
