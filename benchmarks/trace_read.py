"""Reading a long profiler trace into columns: hotloop against json, orjson and HolisticTraceAnalysis.

The file is a real trace, its events repeated until it has the wanted size (the times repeat as well, which no reader
cares about). Every reader runs in a process of its own; counted are the CPU seconds of reading, without imports and
without the cache of the file system being cold, and the process's peak memory, imports included. json and orjson stop
at Python objects; hotloop and HolisticTraceAnalysis end with columns. Peers that are not installed are left out.

    python -m benchmarks.trace_read --source trace.json.gz [--python ENV/bin/python] [--quick] [--json FILE]
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.harness import Figure, arguments, report

_MEASURE = """
import json, sys, time
def measured(read):
    began = time.process_time()
    kept = read()
    cpu_s = time.process_time() - began
    # ru_maxrss would begin with what the parent had
    peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return {"cpu_s": cpu_s, "peak_gb": int(peak.split()[1]) * 1024 / 1e9, "events": len(kept)}
path = sys.argv[1]
"""
_READERS = {
    "hotloop": "from hotloop.doctor.trace.reading import read_recordings\n"
    "class Columns:\n"
    "    def __init__(self, recording): self.events = recording.events\n"
    "    def __len__(self): return self.events.count\n"
    "print(json.dumps(measured(lambda: Columns(read_recordings(path)[0]))))",
    "json": "print(json.dumps(measured(lambda: json.load(open(path))['traceEvents'])))",
    "orjson": "import orjson\n"
    "print(json.dumps(measured(lambda: orjson.loads(open(path, 'rb').read())['traceEvents'])))",
    "HolisticTraceAnalysis": "import contextlib, io, logging\n"
    "logging.disable(logging.CRITICAL)\n"
    "from hta.common.trace import parse_trace_file\n"
    "with contextlib.redirect_stdout(io.StringIO()):\n"
    "    found = measured(lambda: parse_trace_file(path)[1])\n"
    "print(json.dumps(found))",
}


def replicate(source: Path, target: Path, size_bytes: int) -> int:
    """Write the trace `source` with its events repeated to at least `size_bytes`; returns the size."""
    raw = source.read_bytes()
    text = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    begin = text.index(b'"traceEvents"')
    begin = text.index(b"[", begin) + 1
    end = text.rindex(b"}", 0, text.rindex(b"]")) + 1
    written = 0
    with target.open("wb") as file:
        written += file.write(text[:begin])
        while True:
            written += file.write(text[begin:end])
            if written >= size_bytes:
                break
            written += file.write(b",")
        written += file.write(text[end:])
    return written


def run(reader: str, path: Path, python: str) -> dict[str, float] | None:
    """CPU seconds, peak GB and number of events; None if the reader is not installed or fails."""
    program = sys.executable if reader in ("hotloop", "json") else python
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [program, "-c", _MEASURE + _READERS[reader], str(path)],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["killed"])[-1]
        print(f"  {reader} left out: {reason}", file=sys.stderr)
        return None
    return json.loads(done.stdout)


def main() -> None:
    options = arguments(__doc__, source="", python=sys.executable, megabytes="240,1000")
    if not options.source:
        shared = Path(os.environ.get("HOTLOOP_SHARED", Path(__file__).parents[2] / "shared"))
        found = sorted((shared / "cases" / "traces").rglob("df_index_resolver.json.gz"))
        if not found:
            raise SystemExit("give a trace to repeat: --source trace.json.gz")
        options.source = str(found[0])
    sizes = [30] if options.quick else [int(size) for size in options.megabytes.split(",")]
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder:
        for megabytes in sizes:
            path = Path(folder) / f"{megabytes}.json"
            size = replicate(Path(options.source), path, megabytes * 10**6) / 1e6
            results = {reader: run(reader, path, options.python) for reader in _READERS}
            ours = results["hotloop"]
            if ours is None:
                raise SystemExit("hotloop could not read the trace")
            for reader, result in results.items():
                if result is None:
                    continue
                ratio = result["cpu_s"] / ours["cpu_s"] if reader != "hotloop" else None
                peer = "hotloop's CPU time" if ratio is not None else None
                name = f"{megabytes} MB, {reader}"
                figures.append(
                    Figure(f"{name}: speed", size / result["cpu_s"], "MB/CPU-s", None, peer, ratio)
                )
                figures.append(Figure(f"{name}: peak memory", result["peak_gb"], "GB"))
            path.unlink()
    report("reading a trace", figures, options.json)


if __name__ == "__main__":
    main()
