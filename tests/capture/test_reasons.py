"""Words for why a step is not captured."""

import json

import pytest
import torch

import hotloop
from hotloop.capture.reasons import cause_of, first_line, host_names, is_library, megabytes


def test_the_users_own_line_is_named():
    with pytest.raises(RuntimeError) as caught:
        torch.ones(2) @ torch.ones(3)
    # frames of torch and hotloop are left out
    said = cause_of(caught.value)
    assert said.startswith("test_reasons.py:")
    assert "torch.ones(2) @ torch.ones(3)" in said


def test_one_line_of_an_error():
    assert first_line(ValueError("first\nsecond")) == "first"
    assert first_line(KeyError()) == "KeyError"


def test_files_of_installed_packages_are_told_from_the_users():
    assert is_library(json.__file__) is False
    assert is_library(torch.__file__)
    assert not is_library(__file__)


def test_bytes_for_a_person():
    assert megabytes(3 * 2**20 + 2**19) == "3.5 MiB"
    assert megabytes(5000 * 2**20) == "5,000.0 MiB"


def test_objects_whose_methods_a_recording_understands():
    loop = hotloop.Loop(record=False, device="cpu")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    other = []

    def step(x):
        loop.log(x=x)
        optimizer.step()
        other.append(x)

    assert {"loop", "optimizer"} <= host_names(step)
    assert "other" not in host_names(step)
    loop.end_training()
