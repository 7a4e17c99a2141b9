from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")


def _runner() -> Any:
    path = Path(__file__).parents[1] / "accelerate_suites" / "run_suites.py"
    spec = importlib.util.spec_from_file_location("run_suites", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["run_suites"] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


RUNNER = _runner()


@pytest.mark.multi
@pytest.mark.slow
@pytest.mark.parametrize("suite", list(RUNNER.CASES))
def test_every_function_of_accelerates_own_script_passes(suite: str) -> None:
    results = RUNNER.run_suite(suite, processes=2, timeout_s=200)
    failed = {one.function: one.reason for one in results if one.outcome == "failed"}
    assert failed == {}
    passed = [one.function for one in results if one.outcome == "passed"]
    expected = [name for name, _ in RUNNER.CASES[suite] + RUNNER.ALONE.get(suite, [])]
    assert sorted(passed) == sorted(expected)


def test_only_import_lines_are_rewritten() -> None:
    installed = Path(importlib.util.find_spec("accelerate").origin).parent / "test_utils" / "scripts"  # type: ignore[union-attr, arg-type]
    for suite in RUNNER.CASES:
        before = (installed / f"{suite}.py").read_text().splitlines()
        after = RUNNER.read_script(suite).splitlines()
        changed = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
        assert changed
        for old, new in changed:
            assert old.lstrip().startswith(("from accelerate", "import accelerate"))
            assert new == old.replace("accelerate", "hotloop.accelerate", 1)
            assert "test_utils" not in old
