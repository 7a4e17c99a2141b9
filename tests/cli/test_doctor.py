from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from hotloop.cli import main
from hotloop.cli.doctor import _parser
from hotloop.cli.launch import split_arguments


def write(path: Path, kernel_us: float = 50.0) -> Path:
    events = []
    for index in range(20):
        at = 100.0 * index
        events += [
            {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": at, "dur": 6},
            {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1, "ts": at + 1, "dur": 4,
             "args": {"correlation": index + 1}},
            {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": at + 8, "dur": kernel_us,
             "args": {"correlation": index + 1, "stream": 7, "device": 0}},
        ]  # fmt: skip
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_a_trace_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(write(tmp_path / "a.json"))]) == 0
    out = capsys.readouterr().out
    assert "launch-bound" in out
    assert "the device works" in out


def test_json_html_and_overlay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = str(write(tmp_path / "a.json"))
    html, overlay = tmp_path / "a.html", tmp_path / "over.json"
    assert main(["doctor", trace, "--json", "--html", str(html), "--overlay", str(overlay)]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["findings"][0]["rule"] == "launch-bound"
    assert facts["verdict"] in html.read_text().replace("&#x27;", "'")
    assert json.loads(overlay.read_text())["traceEvents"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "a.json", "over.json"]


def test_two_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = write(tmp_path / "a.json", 50), write(tmp_path / "b.json", 80)
    assert main(["doctor", str(first), "--against", str(second)]) == 0
    assert "in B, +" in capsys.readouterr().out
    assert main(["doctor", str(first), "--against", str(second), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["families_s"]["matrix multiply"][1] == pytest.approx(
        20 * 80e-6
    )


def test_the_rules_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--rules"]) == 0
    assert "\nhost-sync" in capsys.readouterr().out
    assert main(["doctor", "--rules", "--json"]) == 0
    assert {"id": "fusion", "what": "chains of element-wise kernels"} in json.loads(capsys.readouterr().out)


def test_what_is_no_trace_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.json").write_text('{"lr": 1}')
    assert main(["doctor", str(tmp_path / "a.json")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "hotloop: a.json is no profiler trace: it is JSON without `traceEvents` (it has lr)\n"
    assert main(["doctor", str(tmp_path / "b.json")]) == 2
    assert main(["doctor"]) == 2
    assert main(["doctor", str(write(tmp_path / "a.json")), "--html", str(tmp_path / "no" / "x.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_examples_put_the_doctors_options_before_the_script() -> None:
    parser = _parser()
    own = {option for action in parser._actions for option in action.option_strings}
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()
    shown = [line.strip() for line in f"{parser.epilog}\n{page}".splitlines()]
    lines = [line for line in shown if line.startswith("hotloop doctor ") and ".py" in line]
    assert len(lines) > 5
    for line in lines:
        words = shlex.split(re.split(r"  | #", line)[0])[2:]
        _, rest = split_arguments(words, parser)
        if rest[0].endswith(".py"):
            assert not own & set(rest[1:]), line


def test_what_cannot_be_compared_with_is_told_before_the_script_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    assert main(["doctor", "--against", str(tmp_path / "none.json"), str(script)]) == 2
    assert "there is no file" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()
