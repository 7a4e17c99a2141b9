from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys

import pytest
import torch

from hotloop.runs.environment import (
    find_packages,
    find_variables,
    find_versions,
    identify_process,
    process_lives,
    show_command,
)


def test_versions_and_packages_are_those_of_the_metadata() -> None:
    assert find_versions()["torch"] == torch.__version__
    assert find_versions()["hotloop"] == importlib.metadata.version("hotloop")
    packages = find_packages()
    for name in ("numpy", "pytest", "safetensors", "torch"):
        assert packages[name] == importlib.metadata.version(name)


def test_variables_that_matter_and_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {"OMP_NUM_THREADS": "1", "SLURM_JOB_ID": "7", "CUDA_VISIBLE_DEVICES": "", "HOTLOOP_RUNS": "x"}
    unwanted = ("HOTLOOP_TOKEN", "SLURM_API_KEY", "TORCH_SECRET", "NCCL_PASSWORD", "HOME_STUFF", "HF_TOKEN")
    for name in unwanted:
        monkeypatch.setenv(name, "abc")
    for name, value in wanted.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCH_HOME", "https://me:pass@example.org/")
    found = find_variables()
    assert wanted.items() <= found.items()
    assert not set(unwanted) & set(found)
    assert found["TORCH_HOME"] == "https://<withheld>@example.org/"


def test_the_command_hides_secret_options(monkeypatch: pytest.MonkeyPatch) -> None:
    command = [
        "python",
        "t.py",
        "--lr",
        "0.1",
        "--api-key",
        "abc",
        "--token=abc",
        "-x",
        "password=abc",
        "--flag",
    ]
    monkeypatch.setattr(sys, "orig_argv", command)
    shown = show_command()
    assert "abc" not in " ".join(shown)
    assert shown[:4] == command[:4]
    assert len(shown) == len(command)


def test_whether_a_process_lives() -> None:
    assert process_lives(identify_process()) is True
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    dead = identify_process() | {"pid": child.pid, "began": -1}
    if os.path.exists("/proc/self/stat"):
        assert process_lives(dead) is False  # the number was given anew
    child.communicate(b"\n")
    assert process_lives(dead) is False
    assert process_lives({"host": "elsewhere", "pid": 1}) is None
    assert process_lives({}) is None
    assert process_lives(identify_process() | {"boot": "another"}) is False
