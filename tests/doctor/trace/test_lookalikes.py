from __future__ import annotations

import pytest

from hotloop.doctor.trace.lookalikes import name_lookalike


@pytest.mark.parametrize(
    ("head", "word"),
    [
        (b"", "empty"),
        (b"  \n", "blanks"),
        (b"\x00\x05\x16\x07\x00\x02", "resource fork"),
        (b"SQLite format 3\x00", "SQLite"),
        (b"\x80\x04\x95", "pickle"),
        (b"PK\x03\x04", "zip"),
        (b"\n\x0b\x00\x01" + b"\0" * 20, "Perfetto"),
        (b'{"rocprofiler-sdk-tool": []}', "rocprofv3"),
        (b'{"$schema": "https://www.speedscope.app/file-format-schema.json"}', "speedscope"),
        (b'{"schema": "1.0.1", "pid": 1, "nodes": []}', "execution trace"),
        (b"[[1, 2], [[3, 4]]]", "memory timeline"),
        (b'{"segments": [], "device_traces": []}', "memory snapshot"),
        (b'{"StringIds": []}', "Nsight"),
        (b"<!DOCTYPE html>", "web page"),
        (b"hello", "no JSON"),
    ],
)
def test_each_is_named(head: bytes, word: str) -> None:
    told = name_lookalike(head, "trace.json", len(head))
    assert told is not None
    assert word in told


def test_other_json_is_left_to_the_reader() -> None:
    assert name_lookalike(b'{"a": 1}', "trace.json", 8) is None
