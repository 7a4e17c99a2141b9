"""Damaged text comes out as the events it was made from; real files load or are refused by name."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotloop.doctor import read
from hotloop.doctor.trace import decode, reading
from hotloop.doctor.trace.columns import Category
from hotloop.doctor.trace.reading import Recording, read_recordings
from hotloop.doctor.trace.stream import TraceError


def made(count: int = 50) -> list[dict[str, Any]]:
    return [
        {"ph": "X", "cat": "cpu_op", "name": f"aten::op{i % 7}", "pid": 1, "tid": 2, "ts": 10.5 * i, "dur": 3 + i % 5,
         "args": {"External id": i, "Input Dims": [[i, 2], []], "Input type": ["float", ""]}}
        for i in range(count)
    ]  # fmt: skip


def text_of(events: list[dict[str, Any]], indent: int | None = None) -> str:
    return json.dumps({"schemaVersion": 1, "traceEvents": events, "traceName": "t"}, indent=indent)


def reading_of(text: str | bytes, path: Path) -> Recording:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    (recording,) = read_recordings(path)
    return recording


def same(recording: Recording, events: list[dict[str, Any]]) -> None:
    found = recording.events
    assert found.count == len(events)
    assert [found.name_of(row) for row in range(found.count)] == [event["name"] for event in events]
    np.testing.assert_allclose(found.start_us, [event["ts"] - events[0]["ts"] for event in events])
    np.testing.assert_allclose(found.duration_us, [event["dur"] for event in events])
    np.testing.assert_array_equal(found.external, [event["args"]["External id"] for event in events])


@pytest.mark.parametrize("indent", [None, 1])
def test_a_sound_file_comes_back_as_columns(indent: int | None, tmp_path: Path) -> None:
    events = made()
    recording = reading_of(text_of(events, indent), tmp_path / "a.json")
    same(recording, events)
    assert recording.recovery.sound
    assert recording.header == {"schemaVersion": 1, "traceName": "t"}
    shapes, types = recording.events.texts[recording.events.shapes[3]]
    assert (json.loads(shapes), json.loads(types)) == ([[3, 2], []], ["float", ""])


def test_the_size_of_the_chunks_makes_no_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hotloop.doctor.trace import stream

    events = made(400)
    path = tmp_path / "a.json"
    path.write_text(text_of(events, 1))
    for size in (101, 1000, 7777):
        monkeypatch.setattr(stream, "CHUNK_BYTES", size)
        (recording,) = read_recordings(path)
        same(recording, events)
        assert recording.recovery.sound
        assert recording.header["traceName"] == "t"


def test_without_msgspec_the_result_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "_decode_sound", None)
    monkeypatch.setattr(decode, "Event", decode._PlainEvent)
    monkeypatch.setattr(decode, "Arguments", decode._PlainArguments)
    events = made()
    recording = reading_of(text_of(events), tmp_path / "a.json")
    same(recording, events)
    assert recording.recovery.sound


DAMAGES = {
    "invalid UTF-8": lambda t: t.replace(b'"aten::op3"', b'"aten::op3\xff\xfe"'),
    "control characters": lambda t: t.replace(b'"aten::op3"', b'"aten::op3\x01\x1f"'),
    "line breaks inside a string": lambda t: t.replace(b'"aten::op3"', b'"aten::op3\n"'),
    "NaN or Infinity": lambda t: t.replace(
        b'"Input type"', b'"x": NaN, "y": -Infinity, "z": nan, "Input type"'
    ),
    "trailing commas": lambda t: t.replace(b'"float", ""]', b'"float", "",]'),
    "unescaped backslashes": lambda t: t.replace(b'"aten::op3"', b'"C:\\Users\\qop3"'),
    "unescaped quotes": lambda t: t.replace(b'"aten::op3"', b'"f("x", "op3")"'),
}


@pytest.mark.parametrize("kind", DAMAGES)
@pytest.mark.parametrize("chunk", [4 * 2**20, 3000])
def test_damage_is_mended_and_counted(
    kind: str, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hotloop.doctor.trace import stream

    monkeypatch.setattr(stream, "CHUNK_BYTES", chunk)
    events = made(200)
    recording = reading_of(DAMAGES[kind](text_of(events).encode()), tmp_path / "a.json")
    assert recording.events.count == 200
    assert recording.recovery.lost == 0
    assert kind in recording.recovery.repaired
    np.testing.assert_allclose(recording.events.duration_us, [event["dur"] for event in events])
    names = [recording.events.name_of(row) for row in range(200)]
    assert [("op3" in name) for name in names] == [i % 7 == 3 for i in range(200)]


@pytest.mark.parametrize("share", [0.15, 0.5, 0.93])
def test_a_cut_file_keeps_what_it_has(share: float, tmp_path: Path) -> None:
    events = made(300)
    text = text_of(events)
    recording = reading_of(text[: int(len(text) * share)], tmp_path / "a.json")
    whole = text[: int(len(text) * share)].count('"Input type": ["float", ""]}}')
    assert whole - 1 <= recording.events.count <= whole + 1
    assert any("cut off" in fault for fault in recording.recovery.faults)


def test_random_damage_never_raises_anything_but_trace_errors(tmp_path: Path) -> None:
    rng = random.Random(0)
    good = text_of(made(30)).encode()
    counts = []
    for _ in range(150):
        bad = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            place = rng.randrange(len(bad))
            if rng.random() < 0.5:
                bad[place] = rng.randrange(256)
            else:
                del bad[place : place + rng.randint(1, 40)]
        try:
            counts.append(reading_of(bytes(bad), tmp_path / "a.json").events.count)
        except TraceError:
            counts.append(0)
    # a few wrong bytes cost a few events
    assert np.median(counts) >= 28


def test_odd_values_are_taken_as_what_they_mean(tmp_path: Path) -> None:
    events = [
        {"ph": "X", "name": "a", "pid": "x", "tid": 15514734831341844875, "ts": "1708722576381804.125", "dur": "3.5"},
        {"ph": "X", "name": "b", "pid": None, "tid": [1], "ts": "1708722576381900a", "dur": None},
        {"cat": "cpu_op", "name": "c", "pid": 1, "tid": 1, "ts": 1708722576381910, "dur": 2},
        {"ph": "B", "name": "d", "pid": 1, "tid": 1, "ts": 1708722576381920},
        {"ph": "E", "pid": 1, "tid": 1, "ts": 1708722576381929},
        {"ph": "X", "name": "no time", "pid": 1, "tid": 1, "dur": 4},
        {},
        {"ph": "M", "name": "process_name", "ts": "invalid", "pid": 1, "args": {"name": "p"}},
        {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 1708722576381950, "dur": 5,
         "args": {"correlation": 2**70, "stream": 7, "grid": [2, 3, 4], "block": [32, 1, 1]}},
    ]  # fmt: skip
    recording = reading_of(json.dumps(events), tmp_path / "a.json")
    found = recording.events
    assert [found.name_of(row) for row in range(found.count)] == ["a", "b", "c", "d", "k"]
    np.testing.assert_allclose(found.duration_us, [3.5, 0, 2, 9, 5])
    np.testing.assert_allclose(found.start_us, [0, 96, 106, 116, 146], atol=0.26)
    assert found.correlation[4] == 2**70 % 2**63
    assert found.kernel_rows.tolist() == [4]
    assert found.kernel_facts[0, :2].tolist() == [24, 32]
    assert recording.recovery.unclear == 3


def test_names_of_2021_mean_the_same(tmp_path: Path) -> None:
    events = [
        {"ph": "X", "cat": "Runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1, "ts": 1, "dur": 2,
         "args": {"correlation": 5, "external id": 9}},
        {"ph": "X", "cat": "Kernel", "name": "k", "pid": 0, "tid": 7, "ts": 9, "dur": 2,
         "args": {"correlation": 5, "external id": 9, "stream": 7}},
        {"ph": "X", "cat": "Operator", "name": "o", "pid": 1, "tid": 1, "ts": 0, "dur": 9,
         "args": {"External id": 9, "Input dims": [[2]]}},
    ]  # fmt: skip
    found = reading_of(json.dumps({"traceEvents": events}), tmp_path / "a.json").events
    assert found.category.tolist() == [Category.OP, Category.RUNTIME, Category.KERNEL]
    assert found.external.tolist() == [9, 9, 9]


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "empty"),
        (b'{"a": 1}', "it has a"),
        (b"[1, 2]", "not of events"),
        (b'[{"a": 1}]', "no events"),
        (b'{"traceEvents": [}}}}}', "not one event"),
    ],
)
def test_what_is_no_trace_is_refused(content: bytes, word: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(TraceError, match=word):
        read(tmp_path / "a.json")


def test_an_empty_list_of_events_is_a_trace(tmp_path: Path) -> None:
    assert reading_of('{"traceEvents": []}', tmp_path / "a.json").events.count == 0


def test_ranks_are_sorted_and_foreign_files_left_out(tmp_path: Path) -> None:
    for rank in (1, 0):
        text = json.dumps({"distributedInfo": {"rank": rank}, "traceEvents": made(3)})
        (tmp_path / f"{9 - rank}.json").write_text(text)
    (tmp_path / "config.json").write_text('{"lr": 1}')
    trace = read(tmp_path)
    assert [each.timeline.rank for each in trace.ranks] == [0, 1]
    assert trace.ranks[1].ranks == trace.ranks
    told = [fault for each in trace.ranks for fault in each.recovery.faults]
    assert len(told) == 1
    assert "config.json" in told[0]


def test_progress_is_told_on_long_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hotloop.doctor.trace import stream

    monkeypatch.setattr(stream, "CHUNK_BYTES", 2000)
    clock = iter(range(10**6))
    monkeypatch.setattr(reading.time, "monotonic", lambda: next(clock))
    (tmp_path / "a.json").write_text(text_of(made(300)))
    told: list[tuple[str, float, int]] = []
    read_recordings(tmp_path / "a.json", lambda *news: told.append(news))
    shares = [share for _, share, _ in told]
    assert len(told) > 5
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1.0, abs=0.1)


REFUSED = {
    "._huvideo_traces_rank_0_step_3.json": "resource fork",
    "908_results.json.gz": "rocprofv3",
    "profile.json": "speedscope",
    "benchmark_simple_add_et.json.gz": "execution trace",
    "adamw8bit_04-11-01-memory-timeline.json": "memory timeline",
    "28_memory_timeline_wrong_file.json": "memory timeline",
}


def test_every_real_file_loads_or_is_refused_by_name(traces: Path) -> None:
    seen = 0
    for path in sorted(p for p in traces.rglob("*") if p.is_file() and p.suffix != ".md"):
        word = REFUSED.get(path.name)
        if word is not None:
            with pytest.raises(TraceError, match=word):
                read_recordings(path)
        else:
            (recording,) = read_recordings(path)
            assert recording.events.count >= 0
            assert (np.diff(recording.events.start_us) >= 0).all()
        seen += 1
    assert seen > 50


REPAIRS = {
    "01": (1, 0), "02": (1, 0), "04": (1, 0), "05": (1, 0), "07": (3, 0), "08": (1, 0), "10": (1, 0), "11": (1, 0),
    "13": (2, 0), "14": (6, 0), "16": (1, 0), "17": (4, 0), "19": (1, 0), "20": (3, 0), "22": (1, 0), "23": (1, 0),
    "25": (1, 0), "26": (68, 1),
}  # fmt: skip


def test_the_repairs_lose_nothing_that_is_there(traces: Path) -> None:
    for path in sorted((traces / "repairs").iterdir()):
        if path.name[:2] in REPAIRS:
            (recording,) = read_recordings(path)
            assert (recording.events.count, recording.recovery.lost) == REPAIRS[path.name[:2]], path.name


def test_real_files_are_read_as_json_reads_them(traces: Path) -> None:
    for name in ("b200/eager_trace.json.gz", "mi300/resnet_act_checkpoint.json.gz"):
        (path,) = traces.rglob(name)
        with gzip.open(path) as file:
            events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
        (recording,) = read_recordings(path)
        assert recording.recovery.sound
        assert recording.events.count == len(events)
        assert recording.events.duration_us.sum() == pytest.approx(sum(event["dur"] for event in events))
        named = sorted(event["name"] for event in events)
        assert sorted(recording.events.name_of(row) for row in range(recording.events.count)) == named
