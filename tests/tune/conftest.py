"""The script that is tuned in tests, with its reference runs, made once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hotloop.tune.proof import Prover
from hotloop.tune.trial import Nursery, Script

SCRIPTS = Path(__file__).parent / "scripts"
SMALL = str(SCRIPTS / "small.py")


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    with Nursery(Script(SMALL, ["--epochs", "4"])) as opened:
        yield opened


@pytest.fixture(scope="session")
def prover(nursery: Nursery) -> Prover:
    """With three further seeds, over the whole run of 80 steps."""
    made = Prover(nursery, seed=0, seeds=3, horizon=80, exact=False, limit_s=60, whole=True)
    made.prepare(threads=1, beside=2)
    return made


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
