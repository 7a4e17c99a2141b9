"""Bytes of trace files: plain, gzip, zstandard, archives and folders of ranks; cut files give what they have."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from hotloop.errors import HotloopError

__all__ = ["CHUNK_BYTES", "Source", "TraceError", "find_sources"]

CHUNK_BYTES = 4 * 2**20
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_NAMES = (".json", ".json.gz", ".json.zst", ".trace", ".trace.gz", ".gz", ".zst")


class TraceError(HotloopError, ValueError):
    """A file is no profiler trace, or nothing can be read from it; the text says what it is instead."""


@dataclass
class Source:
    """One trace, as chunks of decompressed bytes.

    Attributes:
        name: file name, or archive and member, for messages.
        size_bytes: compressed size, for the progress of a long read; 0 if unknown.
        faults: what was wrong with the container, filled while reading.
        read_bytes: compressed bytes consumed so far.
    """

    name: str
    open_raw: Callable[[], IO[bytes]]
    size_bytes: int = 0
    faults: list[str] = field(default_factory=list)
    read_bytes: int = 0

    def chunks(self) -> Iterator[bytes]:
        """Decompressed bytes, about `CHUNK_BYTES` at a time; ends early, with a fault noted, where data is damaged.

        What the bytes are is decided by their beginning, never by the file's name.
        """
        with closing(self.open_raw()) as raw:
            head = raw.read(4)
            self.read_bytes = len(head)
            if head[:2] == _GZIP:
                yield from self._inflate(head, raw)
            elif head == _ZSTD:
                yield from self._zstandard(head, raw)
            else:
                if self.name.endswith((".gz", ".zst")) and head:
                    self.faults.append("not compressed, in spite of its name")
                yield from self._plain(head, raw)

    def _more(self, raw: IO[bytes], size: int) -> bytes:
        try:
            data = raw.read(size)
        except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
            self.faults.append(f"the file cannot be read to its end ({error})")
            return b""
        self.read_bytes += len(data)
        return data

    def _plain(self, head: bytes, raw: IO[bytes]) -> Iterator[bytes]:
        yield head
        while data := self._more(raw, CHUNK_BYTES):
            yield data

    def _inflate(self, head: bytes, raw: IO[bytes]) -> Iterator[bytes]:
        """Gzip with several members, cut or damaged: everything up to the fault comes out."""
        engine = zlib.decompressobj(31)
        data = head
        while True:
            try:
                out = engine.decompress(data, CHUNK_BYTES)
            except zlib.error as error:
                self.faults.append(f"gzip data is damaged ({error}); what came before it was read")
                return
            if out:
                yield out
            if engine.eof:
                data = engine.unused_data or self._more(raw, 2**20)
                data = data.lstrip(b"\0")
                if data and not data.startswith(_GZIP):
                    self.faults.append("bytes after the end of the gzip data were ignored")
                    return
                if not data:
                    return
                engine = zlib.decompressobj(31)
            else:
                data = engine.unconsumed_tail or self._more(raw, 2**20)
                if not data:
                    out = engine.flush()
                    if out:
                        yield out
                    self.faults.append("the gzip data ends too early: the file was cut off")
                    return

    def _zstandard(self, head: bytes, raw: IO[bytes]) -> Iterator[bytes]:
        decompress = _zstandard_engine()
        if decompress is None:
            yield from self._zstandard_command(head, raw)
            return
        data = head
        engine = decompress()
        inside_frame = False
        while data:
            inside_frame = True
            try:
                out = engine.decompress(data)
            except Exception as error:  # each of the three libraries has its own error class
                self.faults.append(f"zstandard data is damaged ({error}); what came before it was read")
                return
            if out:
                yield out
            data = b""
            if getattr(engine, "eof", False):
                data = engine.unused_data
                engine = decompress()
                inside_frame = False
            data = data or self._more(raw, 2**18)
        if inside_frame:
            self.faults.append("the zstandard data ends too early: the file was cut off")

    def _zstandard_command(self, head: bytes, raw: IO[bytes]) -> Iterator[bytes]:
        program = shutil.which("zstd")
        if program is None:
            raise TraceError(
                f"{self.name} is compressed with zstandard, and nothing here can read that: "
                "`pip install zstandard`, or decompress it first (`zstd -d FILE`)"
            )
        import threading

        with subprocess.Popen(
            [program, "-d", "-c", "-q"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            pipe = process.stdin

            def feed() -> None:
                try:
                    data = head
                    while data:
                        pipe.write(data)
                        data = self._more(raw, 2**20)
                    pipe.close()
                except BrokenPipeError:
                    pass

            thread = threading.Thread(target=feed, daemon=True)
            thread.start()
            while data := process.stdout.read(CHUNK_BYTES):
                yield data
            thread.join()
        if process.returncode:
            self.faults.append("the zstandard data is damaged or cut off; what came before it was read")


def _zstandard_engine() -> Callable[[], Any] | None:
    try:
        from compression import zstd  # type: ignore[import-not-found, unused-ignore]  # Python 3.14

        return zstd.ZstdDecompressor  # type: ignore[no-any-return, unused-ignore]
    except ImportError:
        pass
    try:
        import zstandard  # type: ignore[import-not-found, unused-ignore]

        return lambda: zstandard.ZstdDecompressor().decompressobj()
    except ImportError:
        return None


def find_sources(path: str | Path) -> list[Source]:
    """The traces under `path`: one for a file, several for a folder or a tar archive of ranks, in name order.

    Raises:
        TraceError: there is no such file, or a folder or archive without anything that could be a trace.
    """
    path = Path(path)
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.is_file() and _could_be(p.name))
        if not found:
            raise TraceError(f"{path} is a folder without a trace (*.json, *.json.gz, *.json.zst)")
        return [_file(p, str(p.relative_to(path))) for p in found]
    if not path.is_file():
        raise TraceError(f"there is no file {path}")
    if path.stat().st_size and _is_archive(path):
        return _members(path)
    return [_file(path, path.name)]


def _is_archive(path: Path) -> bool:
    try:
        return tarfile.is_tarfile(path)
    except (tarfile.TarError, EOFError, OSError, zlib.error):
        return False


def _could_be(name: str) -> bool:
    return name.endswith(_NAMES) and not name.rpartition("/")[2].startswith(".")


def _file(path: Path, name: str) -> Source:
    return Source(name, lambda: path.open("rb"), path.stat().st_size)


def _members(path: Path) -> list[Source]:
    sources = []
    fault = ""
    with tarfile.open(path) as archive:
        try:
            for member in archive:
                if member.isfile() and _could_be(member.name):
                    sources.append(
                        Source(f"{path.name}/{member.name}", _member_opener(path, member.name), member.size)
                    )
        except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
            fault = f"the archive is damaged or cut off ({error})"
    if not sources:
        raise TraceError(f"{path} is a tar archive without a trace in it{f': {fault}' if fault else ''}")
    if fault:
        sources[-1].faults.append(fault)
    return sorted(sources, key=lambda source: source.name)


def _member_opener(path: Path, name: str) -> Callable[[], IO[bytes]]:
    def opened() -> IO[bytes]:
        archive = tarfile.open(path)  # noqa: SIM115  closed with the member, which keeps it alive
        member = archive.extractfile(name)
        if member is None:
            raise TraceError(f"{name} cannot be read from {path}")
        return member

    return opened
