from __future__ import annotations

from pathlib import Path

import pytest

from hotloop.doctor.live.gathering import find_gathering
from hotloop.doctor.live.windows import Notes
from hotloop.hardware.processes import Processes
from hotloop.stalls import Sync


def test_one_process_gathers_nothing() -> None:
    assert find_gathering(Processes()) is None


def test_every_rank_finds_the_same_folder_and_another_run_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "29500")
    found = [find_gathering(Processes(rank, 4, rank, 4)) for rank in range(4)]
    assert len({each.folder for each in found if each}) == 1
    assert [each.tells for each in found if each] == [True, False, False, False]
    monkeypatch.setenv("MASTER_PORT", "29501")
    other = find_gathering(Processes(0, 4, 0, 4))
    assert other is not None
    assert found[0] is not None
    assert other.folder != found[0].folder


def test_ranks_of_another_machine_take_part_only_in_a_folder_that_all_see(tmp_path: Path) -> None:
    far = find_gathering(Processes(5, 8, 1, 4))
    assert far is not None
    assert not far.takes_part
    shared = find_gathering(Processes(5, 8, 1, 4), str(tmp_path))
    assert shared is not None
    assert shared.takes_part
    assert shared.folder == tmp_path


def test_what_is_left_is_collected_and_a_rank_that_died_is_missing(tmp_path: Path) -> None:
    trace = tmp_path / "window.json"
    trace.write_text("{}")
    ranks = [find_gathering(Processes(rank, 3, rank, 3), str(tmp_path / "meet")) for rank in range(3)]
    for each in ranks:
        assert each is not None
        each.open()
    notes = Notes(
        1.0,
        event_us=2.0,
        link_bytes_us=3.0,
        syncs=[Sync("a.py", 3, "x.item()"), Sync("a.py", 4, "y.to(d)", True)],
    )
    for each in ranks[:2]:
        assert each is not None
        each.leave([trace, trace], notes)
    teller = ranks[0]
    assert teller is not None
    found = teller.collect(patience_s=0.1)
    assert list(found) == [0, 1]
    files, read = found[1]
    assert [file.read_text() for file in files] == ["{}", "{}"]
    assert read == notes
    # a later run of the same name does not take what an earlier one left
    teller.open()
    assert list(teller.collect(patience_s=0.0)) == [1]
    teller.close()
    assert not (tmp_path / "meet").exists()
