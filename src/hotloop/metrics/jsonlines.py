"""Metrics as plain text: one JSON object a line, readable while the run is on and after any crash."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hotloop.errors import HotloopError
from hotloop.state.ring import Row, Value

__all__ = ["JsonLines", "read_metrics"]

_TAIL_BYTES = 1 << 16
_SPELLED = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class JsonLines:
    """The sink that appends `{"step": 3, "time": 1764446400.25, "loss": 0.5}` lines to a file.

    `time` is in seconds since 1970 (UTC). JSON knows no NaN and no infinities: they are written as the
    strings "NaN", "Infinity" and "-Infinity", so that every line is valid JSON. Rows are written as whole
    lines, many in one system call and without a buffer in between, so a killed process loses nothing that
    `write_rows` was given. An existing file is continued: a last line that a crash tore is removed first.

    Raises:
        OSError: the file cannot be opened or written; after a failed write the file ends in a whole line.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 (closed by close)
        try:
            self._end_bytes = self._mend()
        except BaseException:
            self._file.close()
            raise

    def write_rows(self, rows: Sequence[Row]) -> None:
        """Append one line for each row; on failure none of them stays in the file."""
        data = memoryview("".join([_to_line(row) for row in rows]).encode())
        written = 0
        try:
            while written < len(data):
                written += self._file.write(data[written:])
        except OSError:
            if written:
                os.ftruncate(self._file.fileno(), self._end_bytes)
            raise
        self._end_bytes += written

    def close(self) -> None:
        """Force the lines to disk and close the file; calling it again does nothing."""
        if not self._file.closed:
            try:
                if os.path.isfile(self.path):
                    os.fsync(self._file.fileno())
            finally:
                self._file.close()

    def __del__(self) -> None:
        file = getattr(self, "_file", None)
        if file is not None:
            file.close()

    def _mend(self) -> int:
        """Make the file end in a whole line; its size in bytes after that."""
        size = os.fstat(self._file.fileno()).st_size
        if size == 0:
            return 0
        with open(self.path, "rb") as file:
            tail = b""
            begin = size
            while begin > 0 and b"\n" not in tail:
                begin = max(0, begin - _TAIL_BYTES)
                file.seek(begin)
                tail = file.read(size - begin)
        end = begin + tail.rfind(b"\n") + 1
        if end == size:
            return size
        if _parse(tail[end - begin :]) is not None:
            self._file.write(b"\n")
            return size + 1
        os.ftruncate(self._file.fileno(), end)
        return end


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of a `JsonLines` file, in order, as dicts with "step", "time" and the logged names.

    "NaN", "Infinity" and "-Infinity" come back as floats. A torn last line (the run is being written, or was
    killed) is left out. Where a run was resumed, a step can appear twice: the later line is the one that
    counts.

    Raises:
        HotloopError: a line other than the last is no JSON object; the text names file and line.
    """
    lines = Path(path).read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines, 1):
        row = _parse(line)
        if row is not None:
            rows.append({name: _SPELLED.get(v, v) if type(v) is str else v for name, v in row.items()})
        elif line and number < len(lines):
            raise HotloopError(
                f"{os.fspath(path)}, line {number} is no JSON object: {line[:60]!r}; was the file edited?"
            )
    return rows


def _to_line(row: Row) -> str:
    """One line of JSON, newline included."""
    line: dict[str, Value] = {"step": row.step, "time": round(row.time_s, 6)}
    line.update(row.values)
    try:
        return json.dumps(line, allow_nan=False, separators=(", ", ": ")) + "\n"
    except ValueError:
        return json.dumps({name: _spell(value) for name, value in line.items()}, allow_nan=False) + "\n"


def _spell(value: Value) -> Value:
    """`value`, or its name if JSON has no such number."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _parse(line: bytes) -> dict[str, Any] | None:
    """The JSON object on `line`; None if there is no whole one."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
