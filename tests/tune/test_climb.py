"""The whole climb on a script that is slow on purpose, so that no clock decides: what is kept, told and written."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hotloop
from hotloop.cli import main
from hotloop.errors import HotloopError
from hotloop.hardware import machine_kind
from hotloop.tune import Result, Rung, Tried, make_report, tune
from hotloop.tune.checks import Fault
from hotloop.tune.climb import Climb
from hotloop.tune.measure import Gain
from hotloop.tune.page import format_result
from hotloop.tune.result import Result as PlainResult
from hotloop.tune.trial import Nursery, Script
from hotloop.tune.tuned import tuned_path, write_tuned

SCRIPTS = Path(__file__).parent / "scripts"
PLANTS = SCRIPTS / "plants.py"

SLOW = """
import os, sys
from types import SimpleNamespace
sys.path.insert(0, {folder!r})
import torch
import hotloop.tune.probe as probe
import small
plain = torch.nn.Sequential.forward
now = [0.0]
# steps are timed by a clock that only a forward moves, less so in bf16 or where a variable says so
probe.time = SimpleNamespace(perf_counter=lambda: now[0])
def forward(self, x):
    quick = torch.is_autocast_enabled("cpu") or os.environ.get("QUICK")
    now[0] += 0.001 if quick else 0.04
    return plain(self, x)
torch.nn.Sequential.forward = forward
small.main()
"""


@pytest.fixture(scope="module")
def climbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, list[str]]:
    """One climb with a good rung, a fast one that miscomputes and one that crashes."""
    folder = tmp_path_factory.mktemp("climb")
    script = folder / "train.py"
    script.write_text(SLOW.format(folder=str(SCRIPTS)))
    quick = folder / "quick.py"
    quick.write_text(
        f"import os, sys\nsys.path.insert(0, {str(SCRIPTS)!r})\nimport plants\n"
        "def wrong():\n    os.environ['QUICK'] = '1'\n    plants.wrong_by_two_percent()\n"
    )
    rungs = [
        Rung("crashes", setup=f"{PLANTS}:crashes"),
        Rung("quick and wrong", setup=f"{quick}:wrong"),
        Rung("precision=bf16", {"precision": "bf16"}),
    ]
    said: list[str] = []
    result = tune(
        str(script),
        ["--epochs", "2"],
        budget_s=1200,
        seeds=2,
        only=rungs,
        tell=lambda kind, text: said.append(text),
    )
    return result, said


def test_the_good_rung_is_kept_and_the_others_not(climbed: tuple[Result, list[str]]) -> None:
    result, _ = climbed
    outcomes = {t.rung.name: t.outcome for t in result.tried}
    assert outcomes["crashes"] == "failed"
    assert outcomes["quick and wrong"] == "rejected"
    assert outcomes["precision=bf16"] == "kept"
    wrong = next(t for t in result.tried if t.rung.name == "quick and wrong")
    assert wrong.fault is not None
    assert wrong.fault.kind == "arithmetic"
    assert result.kept[0].settings == {"precision": "bf16"}


def test_the_whole_is_verified_in_the_end(climbed: tuple[Result, list[str]]) -> None:
    result, said = climbed
    assert result.gain is not None
    assert result.gain.low > 1.5
    assert result.baseline_is_fp32
    assert result.gain_fp32 is result.gain
    assert result.horizon == 40
    assert any("the whole run" in text for text in said)
    assert {"fp32, eager", "seed +1", "tuned"} <= set(result.losses)
    assert "val_accuracy" in result.metrics


def test_no_process_is_left_behind(climbed: tuple[Result, list[str]]) -> None:
    mine = [
        status.parent.name
        for status in Path("/proc").glob("[0-9]*/stat")
        if _parent_of(status) == os.getpid()
        and b"hotloop.tune.nursery" in (status.parent / "cmdline").read_bytes()
    ]
    # at most the one that other tests of this session share
    assert len(mine) <= 1
    assert climbed[0].trials > 5


def _parent_of(status: Path) -> int:
    try:
        return int(status.read_text().rpartition(")")[2].split()[1])
    except OSError:
        return -1


def test_it_is_told_in_words_as_a_page_and_as_values(
    climbed: tuple[Result, list[str]], tmp_path: Path
) -> None:
    result, _ = climbed
    text = format_result(result)
    assert "kept: precision=bf16" in text
    assert "rejected: arithmetic: the first gradient is" in text
    page = make_report(result)
    assert "<svg" in page
    assert "http" not in page.replace("http-equiv", "")
    for word in ("as it is", "quick and wrong", "fp32, eager", "the kernel failed"):
        assert word in page
    plain = json.loads(json.dumps(result.to_plain(), default=str))
    assert plain["settings"] == {"precision": "bf16"} | {
        k: v for k, v in result.settings.items() if k != "precision"
    }
    path = tmp_path / "train.tuned.toml"
    write_tuned(result, path)
    content = tomllib.loads(path.read_text())
    assert content["machine"] == machine_kind("cpu")
    loop = hotloop.Loop(record=False, device="cpu", settings=path)
    assert loop.precision.name == "bf16"


def climb_on(nursery: Nursery, script: Script, tell: Any = lambda kind, text: None) -> Climb:
    nursery.script = script
    return Climb(nursery, budget_s=300, exact=False, seeds=1, rungs=(), only=[], tell=tell)


@pytest.fixture
def shared(nursery: Nursery) -> Iterator[Nursery]:
    """The session's nursery, for another script."""
    before = nursery.script
    yield nursery
    nursery.script = before


def test_a_script_without_a_loop_or_that_fails_is_refused(shared: Nursery, tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text(
        "import torch\np = torch.nn.Parameter(torch.ones(1))\no = torch.optim.SGD([p], lr=0.1)\n"
        "for _ in range(30):\n    p.sum().backward()\n    o.step()\n"
    )
    with pytest.raises(HotloopError, match=r"no hotloop\.Loop"):
        climb_on(shared, Script(str(script))).run()
    with pytest.raises(HotloopError, match="fails as it is"):
        climb_on(shared, Script(str(SCRIPTS / "small.py"), ["--epochs", "x"])).run()


def test_an_interrupt_ends_with_the_best_so_far(shared: Nursery) -> None:
    def tell(kind: str, text: str) -> None:
        if text.startswith("as it is"):
            raise KeyboardInterrupt

    climb = climb_on(shared, Script(str(SCRIPTS / "small.py"), ["--epochs", "4"]), tell)
    with pytest.raises(KeyboardInterrupt):
        climb.run()
    result = climb.finish()
    result.interrupted = "interrupted"
    assert result.kept == []
    assert not shared._live
    assert "ended early: interrupted" in format_result(result)


def result_of(script: str) -> Result:
    gain = Gain(2.0, 1.9, 2.1, 8, "faster", [1.0] * 8, [0.5] * 8)
    rung = Rung("precision=bf16", {"precision": "bf16"})
    result = PlainResult(script, machine=machine_kind("cpu"), step_s=1.0, kept=[rung], gain=gain)
    result.gain_fp32, result.baseline_is_fp32 = gain, True
    result.tried = [
        Tried(rung, "kept", gain=gain, step_s=0.5, extra_s=3.0, break_even=6),
        Tried(Rung("x"), "rejected", "data: other samples", fault=Fault("data", "other samples", 3)),
    ]
    return result


def test_the_command_writes_beside_the_script_and_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    called: dict[str, Any] = {}

    def fake(target: str, arguments: list[str], **options: Any) -> Result:
        called.update(options, target=target, arguments=arguments)
        return result_of(target)

    monkeypatch.setattr("hotloop.tune.tune", fake)
    assert main(["tune", "--budget", "2m", "--exact", str(script), "--lr", "0.1"]) == 0
    assert (called["budget_s"], called["exact"], called["arguments"]) == (120.0, True, ["--lr", "0.1"])
    out = capsys.readouterr().out
    assert "2.00x [1.90, 2.10] as fast as the script as it is" in out
    assert "won back after 6 steps" in out
    assert (tmp_path / "train.tuned.toml").exists()
    assert (tmp_path / "train.tuned.html").exists()
    assert main(["tune", "--json", "--out", str(tmp_path / "o"), "-m", "pkg.train"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"] == {"precision": "bf16"}
    assert (tmp_path / "o" / "train.tuned.toml").exists()
    assert main(["tune", "--budget", "soon", str(script)]) == 2
    assert main(["tune", "--rungs", "none.py", str(script)]) == 2


def test_rungs_of_a_file_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mine.py"
    file.write_text("from hotloop.tune import Rung\nRUNGS = [Rung('mine', {'threads': 1})]\n")
    seen: list[Rung] = []

    def fake(target: str, arguments: list[str], *, rungs: list[Rung], **options: Any) -> Result:
        seen.extend(rungs)
        return PlainResult(target)

    monkeypatch.setattr("hotloop.tune.tune", fake)
    assert main(["tune", "--rungs", str(file), "--out", str(tmp_path), str(file)]) == 0
    assert [rung.name for rung in seen] == ["mine"]
    assert not list(tmp_path.glob("*.toml")), "nothing was kept, so there are no settings to write"


def test_where_settings_are_kept() -> None:
    assert tuned_path("a/train.py") == Path("a/train.tuned.toml")
    assert tuned_path("pkg.train", module=True) == Path("train.tuned.toml")


def test_a_script_that_ends_too_soon_or_with_an_error_is_named(shared: Nursery, tmp_path: Path) -> None:
    script = tmp_path / "short.py"
    begin = f"import sys\nsys.path.insert(0, {str(SCRIPTS)!r})\nimport small\n"
    script.write_text(begin + "small.main()\nsys.exit(3)\n")
    with pytest.raises(HotloopError, match=r"fails as it is: .*exit status 3"):
        climb_on(shared, Script(str(script), ["--epochs", "1"])).run()
    script.write_text(
        begin + "from hotloop import Loop\nplain, calls = Loop.backward, []\n"
        "def backward(self, *a, **k):\n    calls.append(1)\n    len(calls) < 15 or sys.exit(0)\n"
        "    return plain(self, *a, **k)\nLoop.backward = backward\nsmall.main()\n"
    )
    with pytest.raises(HotloopError, match=r"ends after 14 updates; measuring takes \d+: have it make more"):
        climb_on(shared, Script(str(script), ["--epochs", "4"])).run()


def test_of_two_loops_the_one_that_trains_counts(shared: Nursery, tmp_path: Path) -> None:
    script = tmp_path / "two.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(SCRIPTS)!r})\nimport hotloop, small\n"
        "first = hotloop.Loop(seed=0)\nsmall.main()\n"
    )
    climb = climb_on(shared, Script(str(script), ["--epochs", "4"]))
    climb.run()
    facts = climb.finish().facts
    assert facts["total_steps"] == 80
    assert facts["optimizers"][0]["type"] == "AdamW"


def test_what_goes_wrong_before_and_behind_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hotloop.tune.tune", lambda target, arguments, **options: PlainResult(target))
    script = tmp_path / "train.py"
    script.write_text("")
    tuned_path(str(script)).write_text("[settings]\n")
    assert main(["tune", str(script), "--out", "elsewhere"]) == 0
    said = capsys.readouterr().err
    assert "--out stands behind the script and goes to it" in said
    assert "train.tuned.toml is there" in said
    assert main(["tune", "--out", str(script), str(script)]) == 2
    assert "cannot be made" in capsys.readouterr().err
    rungs = tmp_path / "rungs.py"
    rungs.write_text("RUNGS = [")
    assert main(["tune", "--rungs", str(rungs), str(script)]) == 2
    assert "SyntaxError" in capsys.readouterr().err


def test_a_budget_spent_before_anything_was_tried_is_said() -> None:
    result = PlainResult("train.py", tried=[Tried(Rung("x"), "not reached", "the budget was spent")])
    assert "nothing was tried: the budget was spent" in format_result(result)


def test_settings_that_were_in_force_from_a_file_and_what_no_file_can_hold_are_written(
    tmp_path: Path,
) -> None:
    result = result_of("train.py")
    result.facts = {"from_file": {"fused": True, "precision": "fp32"}}
    result.kept.append(Rung("pages", environment={"PAGES": "1"}, setup="mine.py:install"))
    path = tmp_path / "train.tuned.toml"
    write_tuned(result, path)
    assert tomllib.loads(path.read_text())["settings"] == {"fused": True, "precision": "bf16"}
    assert "# kept too, and no setting: PAGES=1 in the environment" in path.read_text()
    assert "# kept too, and no setting: mine.py:install called" in path.read_text()


def test_a_trial_tells_what_the_script_reads_from_a_file(shared: Nursery, tmp_path: Path) -> None:
    settings = tmp_path / "small.tuned.toml"
    settings.write_text("[settings]\nfused = true\n")
    script = tmp_path / "reads.py"
    script.write_text(
        f"import os, sys\nsys.path.insert(0, {str(SCRIPTS)!r})\nimport small\n"
        f"os.environ['HOTLOOP_SETTINGS'] = {str(settings)!r}\nsmall.main()\n"
    )
    climb = climb_on(shared, Script(str(script), ["--epochs", "4"]))
    climb.run()
    assert climb.finish().facts["from_file"] == {"fused": True}
