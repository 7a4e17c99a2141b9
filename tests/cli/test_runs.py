from __future__ import annotations

import json
from pathlib import Path

import pytest

from hotloop.cli import main
from hotloop.runs import Record


@pytest.fixture
def base(tmp_path: Path) -> Path:
    for number, status in ((1, "finished"), (2, "failed")):
        record = Record.start(
            tmp_path / f"run-{number}", config={"lr": 0.5 * number}, seed=number, script=__file__
        )
        assert record.metrics_path is not None
        record.metrics_path.write_text(
            '{"step": 1, "time": 0.5, "loss": 2.5}\n{"step": 2, "time": 1, "loss": 1.25}\n'
        )
        record.finish(status, error=RuntimeError("too warm") if status == "failed" else None)
    return tmp_path


def test_list_has_a_line_for_each_run(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "list", "--base", str(base)]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["name", "status", "duration", "commit", "script"]
    assert [line.split()[:2] for line in lines] == [["run-1", "finished"], ["run-2", "failed"]]
    assert lines[0].split()[-1] == "test_runs.py"
    assert main(["runs", "list", "--base", str(base), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["name"], row["error"]) for row in rows] == [
        ("run-1", None),
        ("run-2", "RuntimeError: too warm"),
    ]


@pytest.mark.parametrize("name", ["last", "run-2", "n-2"])
def test_show_tells_what_is_in_the_record(name: str, base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "show", name, "--base", str(base)]) == 0
    page = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    page = {key: value.strip() for key, value in page.items()}
    assert page["status"] == "failed"
    assert page["error"] == "RuntimeError: too warm"
    assert page["config"] == "lr = 1.0"
    assert page["seed"] == "2"
    assert page["last value"] == "loss = 1.25 (step 2)"
    assert main(["runs", "show", name, "--base", str(base), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["config"] == {"lr": 1.0}


def test_settings_are_shown_with_where_they_came_from_and_without_those_that_are_unset(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {
        "values": {"precision": "auto", "accumulation": 2, "seed": None},
        "sources": {"precision": "argument", "accumulation": "HOTLOOP_ACCUMULATION", "seed": "default"},
        "in_force": {"precision": {"name": "bf16", "weights": "fp32"}},
    }
    Record.start(tmp_path / "run-1", settings=settings, script=__file__).finish("finished")
    assert main(["runs", "show", "last", "--base", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ", 1)[1].strip() for line in lines if line.startswith("setting")] == [
        'precision = auto (argument), which is bf16, weights = "fp32"',
        "accumulation = 2 (HOTLOOP_ACCUMULATION)",
    ]
    assert main(["runs", "show", "last", "--base", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"] == settings


def test_where_nothing_ran_there_is_no_last_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "show", "last", "--base", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"hotloop: there are no runs in {tmp_path}")


def test_a_folder_names_a_run_wherever_it_is(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "show", str(base / "run-1")]) == 0
    assert "finished" in capsys.readouterr().out


def test_what_fits_none_or_several_is_an_error(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "show", "run", "--base", str(base)]) == 2
    assert capsys.readouterr().err == "hotloop: run fits 2 runs: run-1, run-2\n"
    assert main(["runs", "show", "other", "--base", str(base)]) == 2
    assert "there is no run other" in capsys.readouterr().err
    assert main(["runs", "list", "--base", str(base / "none")]) == 0
    assert "no runs in" in capsys.readouterr().out
