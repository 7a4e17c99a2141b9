"""Settings: which source wins, what is refused, and what the refusal says."""

import argparse
import os

import pytest

import hotloop
from hotloop.errors import SettingError
from hotloop.settings import SETTINGS, find_settings


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    for name in list(os.environ):
        if name.startswith("HOTLOOP_"):
            monkeypatch.delenv(name)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "settings.toml"
    path.write_text('precision = "bf16"\naccumulation = 2\nseed = 5\n')
    return path


def test_defaults():
    settings = find_settings({})
    assert settings["precision"] == "fp32"
    assert settings["accumulation"] == 1
    assert settings["nonfinite"] == "stop"
    assert settings["seed"] is None
    assert settings["record"] is True
    assert set(settings.sources.values()) == {"default"}


def test_argument_over_variable_over_file_over_default(monkeypatch, file):
    monkeypatch.setenv("HOTLOOP_ACCUMULATION", "3")
    monkeypatch.setenv("HOTLOOP_NONFINITE", "skip")
    settings = find_settings({"nonfinite": "ignore", "accumulation": None}, file)
    given = {
        name: settings[name] for name in settings.values if settings[name] is not None or name == "device"
    }
    assert given == {
        "nonfinite": "ignore",
        "accumulation": 3,
        "precision": "bf16",
        "seed": 5,
        "device": None,
        "record": True,
        "capture": settings["capture"],
    }
    assert settings.sources["nonfinite"] == "argument"
    assert settings.sources["accumulation"] == "HOTLOOP_ACCUMULATION"
    assert settings.sources["precision"] == str(file)
    assert settings.sources["device"] == "default"


def test_an_argument_equal_to_the_default_still_wins(monkeypatch):
    monkeypatch.setenv("HOTLOOP_ACCUMULATION", "3")
    assert find_settings({"accumulation": 1})["accumulation"] == 1
    assert find_settings({"record": False})["record"] is False


def test_the_file_may_be_named_by_a_variable_and_have_a_table(monkeypatch, tmp_path):
    path = tmp_path / "x.toml"
    path.write_text("[settings]\nseed = 9\n")
    monkeypatch.setenv("HOTLOOP_SETTINGS", str(path))
    assert find_settings({})["seed"] == 9


def test_override_beats_an_argument_and_says_so(monkeypatch, capsys):
    monkeypatch.setenv("HOTLOOP_OVERRIDE", "precision=bf16, accumulation=4")
    settings = find_settings({"precision": "fp32"})
    assert settings["precision"] == "bf16"
    assert settings["accumulation"] == 4
    assert settings.sources["precision"] == "HOTLOOP_OVERRIDE"
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "precision=bf16" in said
    assert "HOTLOOP_OVERRIDE" in said


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("no", "fp32"),
        ("32", "fp32"),
        ("32-true", "fp32"),
        ("bf16-mixed", "bf16"),
        ("BF16", "bf16"),
        ("16-mixed", "fp16"),
        ("16", "fp16"),
        (32, "fp32"),
        (16, "fp16"),
    ],
)
def test_names_of_the_peers_are_understood(alias, name):
    assert find_settings({"precision": alias})["precision"] == name


@pytest.mark.parametrize(
    ("setting", "value", "valid"),
    [
        ("precision", "fp7", "fp32, tf32, bf16, bf16-true, fp16, fp8, auto"),
        ("nonfinite", "raise", "stop, skip, ignore"),
        ("capture", "always", "auto, off, compile, graph, full"),
        ("accumulation", 0, "at least 1"),
        ("accumulation", 1.5, "at least 1"),
        ("accumulation", True, "at least 1"),
        ("accumulation", "many", "at least 1"),
        ("seed", -1, "0 to 2**63 - 1"),
        ("seed", 2**63, "0 to 2**63 - 1"),
        ("seed", "x", "whole number"),
        ("seed", 0.5, "whole number"),
        ("record", 3, "folder"),
    ],
)
def test_unknown_values_are_refused_with_the_valid_ones(setting, value, valid):
    with pytest.raises(SettingError) as caught:
        find_settings({setting: value})
    assert valid in str(caught.value)
    assert setting in str(caught.value)
    assert "argument" in str(caught.value)


def test_the_refusal_names_the_source(monkeypatch, tmp_path):
    monkeypatch.setenv("HOTLOOP_PRECISION", "fp7")
    with pytest.raises(SettingError, match="HOTLOOP_PRECISION"):
        find_settings({})
    monkeypatch.delenv("HOTLOOP_PRECISION")
    path = tmp_path / "s.toml"
    path.write_text("seed = -4\n")
    with pytest.raises(SettingError, match=r"s\.toml"):
        find_settings({}, path)


def test_unknown_names_are_refused_with_the_valid_ones(monkeypatch, tmp_path):
    monkeypatch.setenv("HOTLOOP_ACCUMULATE", "3")
    with pytest.raises(SettingError, match="did you mean HOTLOOP_ACCUMULATION") as caught:
        find_settings({})
    assert all(f"HOTLOOP_{name.upper()}" in str(caught.value) for name in SETTINGS)
    monkeypatch.delenv("HOTLOOP_ACCUMULATE")

    path = tmp_path / "s.toml"
    path.write_text('presision = "bf16"\n')
    with pytest.raises(SettingError, match="did you mean precision"):
        find_settings({}, path)
    monkeypatch.setenv("HOTLOOP_OVERRIDE", "speed=1")
    with pytest.raises(SettingError, match=r"HOTLOOP_OVERRIDE.*'speed'"):
        find_settings({})
    monkeypatch.setenv("HOTLOOP_OVERRIDE", "precision")
    with pytest.raises(SettingError, match="name=value"):
        find_settings({})


def test_a_file_that_cannot_be_used_is_an_error(tmp_path):
    with pytest.raises(SettingError, match="does not exist"):
        find_settings({}, tmp_path / "none.toml")
    path = tmp_path / "s.toml"
    path.write_text("seed = = 3")
    with pytest.raises(SettingError, match="not valid TOML"):
        find_settings({}, path)


def test_variables_for_tests_and_tools_are_no_settings(monkeypatch):
    for name in ("HOTLOOP_SHARED", "HOTLOOP_RUNS", "HOTLOOP_PROGRESS"):
        monkeypatch.setenv(name, "x")
    assert set(find_settings({}).sources.values()) == {"default"}


def test_loop_takes_them_and_explains_where_each_came_from(monkeypatch, file):
    monkeypatch.setenv("HOTLOOP_NONFINITE", "skip")
    loop = hotloop.Loop(record=False, device="cpu", settings=file, seed=3)
    text = loop.explain()
    loop.end_training()
    assert loop.precision.name == "bf16"
    assert loop.settings["seed"] == 3
    lines = text.splitlines()
    assert "setting    nonfinite = skip, from HOTLOOP_NONFINITE" in lines
    assert f"setting    precision = bf16, from {file}" in lines
    assert "setting    seed = 3, from argument" in lines
    assert not any("threads" in line for line in lines)


def test_loop_refuses_what_is_no_setting():
    with pytest.raises(TypeError):
        hotloop.Loop(mixed_precision="bf16")
    with pytest.raises(SettingError, match="Plan"):
        hotloop.Loop(parallel="ddp")
    with pytest.raises(SettingError, match="precision"):
        hotloop.Loop("fp99")


def test_config_may_be_anything(tmp_path):
    for i, config in enumerate([{"a": 1}, argparse.Namespace(a=1), object()]):
        loop = hotloop.Loop(record=tmp_path / str(i), device="cpu", config=config)
        loop.end_training()
        assert (tmp_path / str(i) / "run.json").exists()
