from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from hotloop.errors import HotloopError
from hotloop.metrics import JsonLines, Sink, read_metrics
from hotloop.state.ring import Row


def write(path: Path, *rows: Row) -> None:
    sink = JsonLines(path)
    sink.write_rows(rows)
    sink.close()
    sink.close()


def test_each_row_is_one_line_of_valid_json(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "metrics.jsonl"
    write(
        path, Row(3, 12.25, {"loss": 0.5, "stage": 'a "b"\nc', "n": 2, "ok": True}), Row(4, 13.0, {"é": 1.0})
    )

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    lines = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert lines == [
        {"step": 3, "time": 12.25, "loss": 0.5, "stage": 'a "b"\nc', "n": 2, "ok": True},
        {"step": 4, "time": 13.0, "é": 1.0},
    ]
    assert read_metrics(path) == lines
    assert isinstance(JsonLines(path), Sink)


def test_non_finite_numbers_are_strings_in_the_file_and_floats_when_read(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write(path, Row(0, 1.0, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.5, "e": "text"}))
    assert path.read_text() == (
        '{"step": 0, "time": 1.0, "a": "NaN", "b": "Infinity", "c": "-Infinity", "d": 1.5, "e": "text"}\n'
    )
    row = read_metrics(path)[0]
    assert math.isnan(row["a"])
    assert (row["b"], row["c"], row["d"], row["e"]) == (math.inf, -math.inf, 1.5, "text")


def test_floats_come_back_bit_for_bit(tmp_path: Path) -> None:
    values = [0.1, 1 / 3, 1e-320, 1.7976931348623157e308, 2.0**-1074]
    write(tmp_path / "m.jsonl", *[Row(i, 0.0, {"v": v}) for i, v in enumerate(values)])
    assert [row["v"] for row in read_metrics(tmp_path / "m.jsonl")] == values


def test_a_second_sink_continues_the_file(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write(path, Row(0, 0.0, {"a": 1}))
    write(path, Row(1, 0.0, {"a": 2}))
    assert [row["step"] for row in read_metrics(path)] == [0, 1]


@pytest.mark.parametrize("cut", range(1, 33))
def test_a_torn_last_line_is_left_out_and_repaired(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "m.jsonl"
    write(path, Row(0, 0.0, {"a": 1}), Row(1, 0.0, {"a": 2}))
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    # Without its newline only, the last line is still whole.
    kept = [0, 1] if cut == 1 else [0]
    assert [row["step"] for row in read_metrics(path)] == kept
    write(path, Row(2, 0.0, {"a": 3}))
    assert [row["step"] for row in read_metrics(path)] == [*kept, 2]
    assert path.read_bytes().endswith(b"}\n")


def test_zeros_at_the_end_and_long_torn_lines_are_repaired(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    for torn in (b"\0" * 4096, b'{"step": 1, "x": "' + b"y" * 200_000, b"5"):
        path.write_bytes(b'{"step": 0, "time": 0.0}\n' + torn)
        write(path, Row(2, 0.0, {}))
        assert [row["step"] for row in read_metrics(path)] == [0, 2]
    path.write_bytes(b'{"st')
    write(path, Row(2, 0.0, {}))
    assert [row["step"] for row in read_metrics(path)] == [2]


def test_a_damaged_line_in_the_middle_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 0}\nrubbish\n{"step": 1}\n')
    with pytest.raises(HotloopError, match=r"m\.jsonl, line 2"):
        read_metrics(path)


def test_a_full_disk_raises(tmp_path: Path) -> None:
    sink = JsonLines("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        sink.write_rows([Row(0, 0.0, {"a": 1})])
    sink.close()


def test_a_half_written_batch_is_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    sink = JsonLines(path)
    sink.write_rows([Row(0, 0.0, {"a": 1})])
    file = sink._file

    class Tearing:
        """Takes ten bytes, then the disk is full."""

        closed = False
        calls = 0

        def write(self, data: memoryview) -> int:
            self.calls += 1
            if self.calls == 2:
                raise OSError(28, "No space left on device")
            return file.write(data[:10])

        def fileno(self) -> int:
            return file.fileno()

        def close(self) -> None:
            file.close()

    sink._file = Tearing()  # type: ignore[assignment]
    with pytest.raises(OSError, match="No space left"):
        sink.write_rows([Row(1, 0.0, {"a": 2})])
    sink._file = file
    sink.write_rows([Row(2, 0.0, {"a": 3})])
    sink.close()
    assert [row["step"] for row in read_metrics(path)] == [0, 2]


def test_a_short_write_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    sink = JsonLines(path)
    file = sink._file

    class Slow:
        closed = False

        def write(self, data: memoryview) -> int:
            return file.write(data[:7])

    sink._file = Slow()  # type: ignore[assignment]
    sink.write_rows([Row(0, 0.0, {"a": 1}), Row(1, 0.0, {"a": 2})])
    sink._file = file
    sink.close()
    assert [row["step"] for row in read_metrics(path)] == [0, 1]
