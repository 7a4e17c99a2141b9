from __future__ import annotations

import argparse
import dataclasses
import enum
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hotloop.runs.jsonfile import looks_secret, to_plain, write_json


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Model:
    width: int
    path: Path


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (None, None),
        (True, True),
        (3, 3),
        (0.5, 0.5),
        (float("nan"), "NaN"),
        (float("-inf"), "-Infinity"),
        ("é", "é"),
        ("\udcff", "\\udcff"),
        (Path("a/b"), "a/b"),
        (Colour.RED, "red"),
        (Model(3, Path("x")), {"width": 3, "path": "x"}),
        (argparse.Namespace(lr=0.1, nested=argparse.Namespace(a=1)), {"lr": 0.1, "nested": {"a": 1}}),
        ({1: (1, 2), None: {3}}, {"1": [1, 2], "None": [3]}),
        (torch.device("cuda", 1), "cuda:1"),
        (torch.bfloat16, "torch.bfloat16"),
        (torch.tensor([1.0, 2.0]), "tensor([1., 2.])"),
        (torch.zeros(100, 3), "tensor 100x3 torch.float32 on cpu"),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (torch.relu, None),
        (Unprintable(), None),
        (Model, "{module}.Model"),
    ],
)
def test_values_become_plain(value: Any, plain: Any) -> None:
    found = to_plain(value)
    json.dumps(found, allow_nan=False)
    if isinstance(plain, str):
        plain = plain.replace("{module}", __name__)
    if plain is not None or value is None:
        assert found == plain
        assert type(found) is type(plain)
    else:
        assert isinstance(found, str)


def test_what_is_too_long_or_deep_is_cut_visibly() -> None:
    loop: list[Any] = []
    loop.append(loop)
    assert "deeper" in json.dumps(to_plain(loop))
    assert to_plain(range(3)) == "range(0, 3)"
    assert "20000 items" in to_plain([0] * 20_000)
    assert len(to_plain("x" * 100_000)) < 11_000


def test_secrets_are_withheld_and_hyperparameters_are_not() -> None:
    config = {
        "hf_token": "abc",
        "password": "abc",
        "max_tokens": 5,
        "pad_token": 0,
        "key_dim": 64,
        "tokenizer": "bpe",
    }
    assert to_plain(config) == config | {"hf_token": "<withheld>", "password": "<withheld>"}
    assert looks_secret("--wandb-api-key")
    assert not looks_secret("num_key_value_heads")


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.json"]
