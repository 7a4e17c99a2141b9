"""Which words of the command line are tune's and which the script's."""

from __future__ import annotations

import pytest

from hotloop.cli.tune import _own_after_script, _seconds
from hotloop.errors import HotloopError


@pytest.mark.parametrize(
    ("words", "own", "script"),
    [
        (["t.py", "--lr", "1", "--budget", "2m"], ["--budget", "2m"], ["t.py", "--lr", "1"]),
        (["t.py", "--budget=90s", "--exact"], ["--budget=90s", "--exact"], ["t.py"]),
        (["t.py", "--out", "x", "--seeds", "3"], [], ["t.py", "--out", "x", "--seeds", "3"]),
        (["t.py", "--exact", "--", "--budget", "7"], ["--exact"], ["t.py", "--budget", "7"]),
    ],
)
def test_budget_and_exact_may_stand_behind_the_script(
    words: list[str], own: list[str], script: list[str]
) -> None:
    assert _own_after_script(words) == (own, script)


def test_budgets() -> None:
    assert [_seconds(text) for text in ("90", "90s", "1.5m", "1h")] == [90, 90, 90, 3600]
    for text in ("", "soon", "0s", "-1m"):
        with pytest.raises(HotloopError, match="is no time"):
            _seconds(text)
