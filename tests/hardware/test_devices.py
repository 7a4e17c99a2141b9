"""Devices: found, overridden, refused with a list of what is there."""

import pytest
import torch

import hotloop
from hotloop.errors import SettingError
from hotloop.hardware import devices
from hotloop.hardware.devices import find_device, has_stream


@pytest.fixture
def pretend(monkeypatch):
    """pretend(kind, count): this computer has so many accelerators of that kind."""

    def choose(kind, count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: kind == "cuda")
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        monkeypatch.setattr(
            torch.accelerator,
            "current_accelerator",
            lambda check_available=False: torch.device(kind) if kind else None,
        )
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)

    return choose


def test_the_best_there_is(pretend):
    pretend(None, 0)
    assert find_device() == torch.device("cpu")
    pretend("cuda", 4)
    assert find_device(local_rank=2) == torch.device("cuda", 2)
    pretend("xpu", 1)
    assert find_device() == torch.device("xpu", 0)


def test_an_override_is_obeyed(pretend):
    pretend("cuda", 4)
    assert find_device("cpu", local_rank=3) == torch.device("cpu")
    assert find_device("cuda", local_rank=3) == torch.device("cuda", 3)
    assert find_device("cuda:1", local_rank=3) == torch.device("cuda", 1)
    assert find_device(torch.device("cuda", 2)) == torch.device("cuda", 2)


def test_what_is_not_there_is_refused_with_what_is(pretend):
    pretend(None, 0)
    with pytest.raises(SettingError, match="'cuda' is not there; this computer has: cpu"):
        find_device("cuda")
    with pytest.raises(SettingError, match="'gpu' is not a device; this computer has: cpu"):
        find_device("gpu")
    pretend("cuda", 2)
    with pytest.raises(SettingError, match="cpu, cuda:0, cuda:1"):
        find_device("xpu")
    with pytest.raises(SettingError, match="there are 2"):
        find_device(local_rank=2)
    with pytest.raises(SettingError, match="there are 2"):
        find_device("cuda:7")


def test_streams(pretend):
    assert not has_stream(torch.device("cpu"))
    assert has_stream(torch.device("cuda", 0))
    assert devices.__all__ == ["find_device", "has_stream"]


def test_the_device_comes_from_the_environment_too(monkeypatch):
    monkeypatch.setenv("HOTLOOP_DEVICE", "tpu")
    with pytest.raises(SettingError, match="'tpu' is not a device"):
        hotloop.Loop(record=False)
    monkeypatch.setenv("HOTLOOP_DEVICE", "cpu")
    loop = hotloop.Loop(record=False)
    loop.end_training()
    assert loop.device == torch.device("cpu")
