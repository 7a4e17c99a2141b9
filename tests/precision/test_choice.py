"""What "auto" chooses, and that it says why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import hotloop
from hotloop.errors import SettingError
from hotloop.hardware import precisions
from hotloop.precision import Precision, choose_precision, find_precision

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)


def pretend_cpu(monkeypatch: pytest.MonkeyPatch, *flags: str) -> None:
    monkeypatch.setattr(precisions, "_cpu_flags", lambda: frozenset(flags))
    precisions._cpu_precisions.cache_clear()
    monkeypatch.setattr(precisions, "_cpu_precisions", precisions._cpu_precisions.__wrapped__)


def pretend_card(monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(precisions, "_cuda_precisions", precisions._cuda_precisions.__wrapped__)


@pytest.mark.parametrize(
    ("flags", "name", "why"),
    [
        (("amx_bf16", "avx512_bf16"), "bf16", "AMX"),
        (("avx512_bf16",), "bf16", "AVX512-BF16"),
        (("avx2", "avx512f"), "fp32", "no units for bf16"),
    ],
)
def test_on_a_cpu(monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], name: str, why: str) -> None:
    pretend_cpu(monkeypatch, *flags)
    chosen, reason = choose_precision(CPU)
    assert chosen == name
    assert why in reason
    assert find_precision("auto", CPU) == Precision(name)


@pytest.mark.parametrize(
    ("card", "capability", "name"),
    [
        ("NVIDIA H200", (9, 0), "bf16"),
        ("NVIDIA B200", (10, 0), "bf16"),
        ("NVIDIA A100", (8, 0), "bf16"),
        ("Tesla T4", (7, 5), "fp16"),
        ("Tesla P100", (6, 0), "fp32"),
    ],
)
def test_on_a_card(
    monkeypatch: pytest.MonkeyPatch, card: str, capability: tuple[int, int], name: str
) -> None:
    pretend_card(monkeypatch, card, capability)
    chosen, reason = choose_precision(CUDA)
    assert chosen == name
    assert card in reason
    found = find_precision("auto", CUDA)
    assert found.name == name
    assert found.reason == reason


def test_the_loop_says_why_and_records_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend_cpu(monkeypatch, "avx2")
    loop = hotloop.Loop("auto", device="cpu", record=tmp_path / "run")
    assert loop.precision == Precision("fp32")
    assert "precision auto is fp32: this CPU has no units for bf16" in capsys.readouterr().err
    assert "precision auto is fp32" in loop.explain()
    loop.end_training()
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["settings"]["values"]["precision"] == "auto"
    assert record["settings"]["in_force"]["precision"]["name"] == "fp32"
    assert "no units for bf16" in record["settings"]["in_force"]["precision"]["reason"]


def test_auto_has_no_options() -> None:
    with pytest.raises(SettingError, match="no option"):
        Precision("auto", weights="bf16")
