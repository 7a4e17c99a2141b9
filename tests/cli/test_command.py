from __future__ import annotations

import json
from typing import Any

import pytest

import hotloop
from hotloop.cli import main
from hotloop.cli.command import VERBS
from hotloop.cli.launch import _parser, split_arguments


def test_help_lists_every_verb_and_two_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for verb in VERBS:
        assert f"\n  {verb.name} " in out
        assert verb.summary in out
    assert out.split("examples:")[1].count("\n  hotloop ") >= 2


@pytest.mark.parametrize("verb", [verb.name for verb in VERBS])
def test_every_verb_has_help_with_examples(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--help"]) == 0
    out = capsys.readouterr().out
    assert f"\n  hotloop {verb}" in out.split("examples:")[1]


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"hotloop {hotloop.__version__}\n"


def test_no_verb_is_a_mistake_that_shows_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "verbs:" in capsys.readouterr().out


def test_an_unknown_verb_suggests_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lanuch", "train.py"]) == 2
    err = capsys.readouterr().err
    assert "'lanuch'; did you mean 'launch'?" in err
    assert main(["frobnicate"]) == 2
    err = capsys.readouterr().err
    assert "did you mean" not in err
    assert "There are: launch, doctor" in err
    assert err.count("\n") == 1


def test_an_error_is_one_message_without_a_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main(["launch", "-n", "0", "train.py"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "hotloop: 0 processes were asked for (-n); it takes at least 1\n"
    assert main(["launch", "-n", "2"]) == 2
    assert "no script to launch" in capsys.readouterr().err
    assert main(["launch", "--no-such-option", "train.py"]) == 2
    assert "--no-such-option" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "own", "rest"),
    [
        ("train.py -n 5", "", "train.py -n 5"),
        ("-n 2 train.py -m x", "-n 2", "train.py -m x"),
        ("-n2 --output=all train.py", "-n2 --output=all", "train.py"),
        ("-n 2 -- train.py -- a", "-n 2", "train.py -- a"),
        ("-m project.train --lr 1", "-m project.train", "--lr 1"),
        ("--nproc_per_node=2 -m project -- a", "--nproc_per_node=2 -m project", "-- a"),
        ("--module=project -n 3", "--module=project", "-n 3"),
        ("-mproject -n 3", "-mproject", "-n 3"),
        (
            "--nnodes 2 --rdzv_endpoint h:1 --max-restarts 1 t.py",
            "--nnodes 2 --rdzv_endpoint h:1 --max-restarts 1",
            "t.py",
        ),
        ("-n", "-n", ""),
    ],
)
def test_the_scripts_arguments_stay_its_own(line: str, own: str, rest: str) -> None:
    assert split_arguments(line.split(), _parser()) == (own.split(), rest.split())


def test_torchruns_words_are_understood() -> None:
    found = vars(
        _parser().parse_args(
            ["--nproc-per-node=2", "--nnodes", "3", "--node_rank=1", "--rdzv-endpoint", "h:1"]
        )
    )
    wanted: dict[str, Any] = {"processes": 2, "nodes": 3, "node_rank": 1, "rendezvous": "h:1"}
    assert {name: found[name] for name in wanted} == wanted


def test_env_prints_a_page_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--json"]) == 0
    machine = json.loads(capsys.readouterr().out)
    assert machine["versions"]["hotloop"] == hotloop.__version__
    assert main(["env"]) == 0
    page = capsys.readouterr().out
    for text in (machine["versions"]["torch"], machine["system"], "usable by this process", "cpu precisions"):
        assert text in page
