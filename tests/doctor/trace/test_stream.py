from __future__ import annotations

import gzip
import io
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from hotloop.doctor.trace.stream import Source, TraceError, find_sources

DATA = bytes(range(65, 91)) * 200_000  # more than one chunk


def _all(path: Path) -> tuple[bytes, list[str]]:
    (source,) = find_sources(path)
    return b"".join(source.chunks()), source.faults


def test_plain_and_gzip_give_the_same_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(DATA)
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(DATA, 1))
    assert _all(tmp_path / "a.json") == (DATA, [])
    assert _all(tmp_path / "b.json.gz") == (DATA, [])


def test_members_of_one_gzip_file_follow_each_other(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(gzip.compress(DATA, 1) + gzip.compress(b"tail", 1))
    assert _all(tmp_path / "a.gz") == (DATA + b"tail", [])


def test_a_cut_gzip_file_gives_what_it_has(tmp_path: Path) -> None:
    whole = gzip.compress(DATA, 1)
    (tmp_path / "a.json.gz").write_bytes(whole[: len(whole) // 2])
    data, faults = _all(tmp_path / "a.json.gz")
    assert DATA.startswith(data)
    assert len(data) > len(DATA) // 4
    assert faults == ["the gzip data ends too early: the file was cut off"]


def test_a_damaged_gzip_file_gives_what_came_before(tmp_path: Path) -> None:
    whole = bytearray(gzip.compress(bytes(range(256)) * 1000 + DATA, 9))
    whole[-8:] = b"\0" * 8  # the checksum
    (tmp_path / "a.json.gz").write_bytes(whole)
    data, faults = _all(tmp_path / "a.json.gz")
    assert data.startswith(bytes(range(256)) * 1000)
    assert "damaged" in faults[0]


def test_the_content_decides_not_the_name(tmp_path: Path) -> None:
    (tmp_path / "a.json.gz").write_bytes(b"{}   ")
    assert _all(tmp_path / "a.json.gz") == (b"{}   ", ["not compressed, in spite of its name"])
    (tmp_path / "b.json").write_bytes(gzip.compress(b"{}   "))
    assert _all(tmp_path / "b.json") == (b"{}   ", [])


@pytest.mark.skipif(shutil.which("zstd") is None, reason="no zstd command")
def test_zstandard_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(DATA)
    subprocess.run(["zstd", "-q", "a.json"], cwd=tmp_path, check=True)
    assert _all(tmp_path / "a.json.zst") == (DATA, [])
    whole = (tmp_path / "a.json.zst").read_bytes()
    (tmp_path / "cut.json.zst").write_bytes(whole[: len(whole) // 2])
    data, faults = _all(tmp_path / "cut.json.zst")
    assert DATA.startswith(data)
    assert len(faults) == 1


def test_without_any_zstandard_the_message_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hotloop.doctor.trace import stream

    monkeypatch.setattr(stream, "_zstandard_engine", lambda: None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    (tmp_path / "a.zst").write_bytes(b"\x28\xb5\x2f\xfdxxxx")
    (source,) = find_sources(tmp_path / "a.zst")
    with pytest.raises(TraceError, match="pip install zstandard"):
        list(source.chunks())


def test_ranks_of_a_folder_and_of_an_archive(tmp_path: Path) -> None:
    for rank in (1, 0):
        (tmp_path / f"rank{rank}.json").write_bytes(b"%d   " % rank)
    (tmp_path / "._rank0.json").write_bytes(b"fork")
    (tmp_path / "notes.txt").write_bytes(b"no")
    sources = find_sources(tmp_path)
    assert [(s.name, b"".join(s.chunks())) for s in sources] == [
        ("rank0.json", b"0   "),
        ("rank1.json", b"1   "),
    ]
    archive = tmp_path / "ranks.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for name, data in (("r/b.json", b"bbbb"), ("r/a.json.gz", gzip.compress(b"aaaa"))):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    sources = find_sources(archive)
    assert [b"".join(s.chunks()) for s in sources] == [b"aaaa", b"bbbb"]


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="there is no file"):
        find_sources(tmp_path / "x.json")
    with pytest.raises(TraceError, match="folder without a trace"):
        find_sources(tmp_path)


def test_reading_counts_the_bytes_for_progress(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(DATA)
    (source,) = find_sources(tmp_path / "a.json")
    assert isinstance(source, Source)
    for _ in source.chunks():
        pass
    assert source.read_bytes == source.size_bytes == len(DATA)
