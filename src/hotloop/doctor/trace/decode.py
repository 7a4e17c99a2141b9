"""From JSON text to event records: a fast way for sound text, and a patient way around every damage seen so far."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

__all__ = ["ARGUMENTS", "Arguments", "Damage", "Event", "decode_events", "record_of", "walk_events"]

# attribute -> the names it has had in Kineto's files
ARGUMENTS: dict[str, tuple[str, ...]] = {
    "correlation": ("correlation",),
    "stream": ("stream",),
    "device": ("device",),
    "external": ("External id",),
    "external_old": ("external id",),
    "bytes": ("bytes",),
    "blocks_per_sm": ("blocks per SM",),
    "occupancy": ("est. achieved occupancy %",),
    "grid": ("grid",),
    "block": ("block",),
    "dims": ("Input Dims",),
    "dims_old": ("Input dims",),
    "types": ("Input type",),
    "sequence": ("Sequence number",),
    "forward_thread": ("Fwd thread id",),
    "collective": ("Collective name",),
    "elements": ("In msg nelems",),
    "group": ("Process Group Name",),
    "kind": ("cuda_sync_kind",),
    "waits_for": ("wait_on_cuda_event_record_corr_id",),
    "stack": ("Call stack",),
    "name": ("name",),
}
_RAW = ("grid", "block", "dims", "dims_old", "types")
_FIELDS = ("ph", "cat", "name", "pid", "tid", "ts", "dur", "args")


@dataclass(slots=True)
class _PlainArguments:
    correlation: Any = None
    stream: Any = None
    device: Any = None
    external: Any = None
    external_old: Any = None
    bytes: Any = None
    blocks_per_sm: Any = None
    occupancy: Any = None
    grid: Any = b""
    block: Any = b""
    dims: Any = b""
    dims_old: Any = b""
    types: Any = b""
    sequence: Any = None
    forward_thread: Any = None
    collective: Any = None
    elements: Any = None
    group: Any = None
    kind: Any = None
    waits_for: Any = None
    stack: Any = None
    name: Any = None


@dataclass(slots=True)
class _PlainEvent:
    ph: Any = None
    cat: Any = None
    name: Any = None
    pid: Any = None
    tid: Any = None
    ts: Any = None
    dur: Any = None
    args: Any = None


if TYPE_CHECKING:
    Arguments = _PlainArguments
    Event = _PlainEvent
    _decode_sound: Callable[[bytes], list[_PlainEvent]] | None = None
else:
    try:
        import msgspec

        Arguments = msgspec.defstruct(
            "Arguments",
            [
                (
                    attribute,
                    msgspec.Raw if attribute in _RAW else Any,
                    msgspec.field(default=msgspec.Raw(b"") if attribute in _RAW else None, name=names[0]),
                )
                for attribute, names in ARGUMENTS.items()
            ],
            gc=False,
        )
        Event = msgspec.defstruct(
            "Event",
            [(name, Any, None) for name in _FIELDS[:-1]] + [("args", Arguments | None, None)],
            gc=False,
        )
        _decode_sound = msgspec.json.Decoder(list[Event]).decode
    except ImportError:
        Arguments, Event = _PlainArguments, _PlainEvent
        _decode_sound = None


@dataclass
class Damage:
    """What was wrong with the text, and what it cost.

    Attributes:
        repaired: how many pieces of text were mended, by kind of fault.
        lost: events (or pieces that must have been events) that could not be read.
    """

    repaired: dict[str, int] = field(default_factory=dict)
    lost: int = 0

    def note(self, kind: str, count: int = 1) -> None:
        """Count `count` repairs of `kind`."""
        self.repaired[kind] = self.repaired.get(kind, 0) + count


def decode_events(body: bytes) -> list[_PlainEvent] | None:
    """Events of a sound list without its brackets, `{...},{...}`; None if the text is not exactly that."""
    if not body.strip():
        return []
    text = b"[" + body + b"]"
    try:
        if _decode_sound is not None:
            return _decode_sound(text)
        rows = json.loads(text)
        return [record_of(row) for row in rows]
    except (ValueError, TypeError, RecursionError):  # msgspec's errors and UnicodeDecodeError are ValueErrors
        return None


def record_of(row: dict[str, Any]) -> _PlainEvent:
    """An event record from parsed JSON.

    Raises:
        TypeError: `row` is no object.
    """
    if not isinstance(row, dict):
        raise TypeError(f"{type(row).__name__} is no event")
    event = Event()
    for name in _FIELDS[:-1]:
        setattr(event, name, row.get(name))
    given = row.get("args")
    if isinstance(given, dict) and given:
        arguments = Arguments()
        for attribute, names in ARGUMENTS.items():
            value = given.get(names[0])
            if value is not None:
                raw = attribute in _RAW
                setattr(arguments, attribute, json.dumps(value).encode() if raw else value)
        event.args = arguments
    return event


# Whatever a control character means inside a string, a blank does no harm there, nor between the tokens.
_BLANKS = bytes(32 if code < 32 else code for code in range(256))
_NOT_FINITE = re.compile(r"([:\[,]\s*)([-+]?(?:NaN|nan|Infinity|inf|Inf))(?=\s*[,}\]])")
_TRAILING = re.compile(r",(\s*[}\]])")
_BAD_ESCAPE = re.compile(r'\\(?!["\\/bfnrt]|u[0-9a-fA-F]{4})')
_NEXT = re.compile(r'\}\s*,?\s*(?=\{\s*"(?:ph|name|cat|pid|tid|ts|dur|args|id|s|bp|attr)"\s*:)')
# `"key": "value"` with anything in the value up to what can only be the next key or the end
_STRING_VALUE = re.compile(
    r'("(?:name|cat|Call stack|Module Hierarchy|Trace name|kernel_file)"\s*:\s*)"(.*?)"'
    r'(?=\s*(?:,\s*"[\w .%()/-]+"\s*:|\}))',
    re.S,
)
_DECODER = json.JSONDecoder(strict=False)


def walk_events(body: bytes, damage: Damage, *, last: bool) -> tuple[list[_PlainEvent], bytes, bytes | None]:
    """Events of text that is not a sound list: damaged, or with the list's end in it.

    Args:
        body: text that starts between two events.
        damage: what was mended and lost is counted here.
        last: nothing follows, so an unfinished event at the end is lost.

    Returns:
        The events, the text left over at the end (an event still unfinished), and the text after the list's closing
        bracket, None if it has not come yet.
    """
    text, events = _mend_whole(body, damage, last=last)
    if events is not None:
        return events, b"", None
    return _walk(text, damage, last=last)


def _mend_whole(body: bytes, damage: Damage, *, last: bool) -> tuple[str, list[_PlainEvent] | None]:
    """Repairs that need no knowledge of where events begin; the events if that was all that was wrong."""
    try:
        text = body.decode("utf-8")
        valid = True
    except UnicodeDecodeError as error:
        # a character may merely be cut in two at the end
        valid = not last and error.start >= len(body) - 3
        text = body.decode("utf-8", "replace")
    if not valid:
        damage.note("invalid UTF-8", text.count("\ufffd"))
    if any(code in body for code in _RARE):
        count = sum(body.count(code) for code in _RARE)
        damage.note("control characters", count)
    changed = text.encode("utf-8", "replace").translate(_BLANKS)
    events = decode_events(changed)
    if events is not None and valid and not any(code in body for code in _RARE):
        damage.note("line breaks inside a string")
    text = changed.decode("utf-8")
    if events is None:
        mended, count = _NOT_FINITE.subn(r"\1null", text)
        if count:
            text = mended
            events = decode_events(text.encode())
            damage.note("NaN or Infinity", count)
    return text, events


_RARE = tuple(bytes([code]) for code in range(32) if code not in (9, 10, 13))


def _walk(text: str, damage: Damage, *, last: bool) -> tuple[list[_PlainEvent], bytes, bytes | None]:
    events: list[_PlainEvent] = []
    position = 0
    size = len(text)
    while True:
        while position < size and text[position] in " ,\n\r\t":
            position += 1
        if position >= size:
            return events, b"", None
        if text[position] == "]":
            return events, b"", text[position + 1 :].encode()
        if text[position] == "{":
            try:
                row, end = _DECODER.raw_decode(text, position)
                events.append(record_of(row))
                position = end
                continue
            except (ValueError, TypeError, RecursionError):
                pass
            row, end = _mend_event(text, position, damage, last=last)
            if row is not None:
                events.append(record_of(row))
                position = end
                continue
            if end < 0:
                return events, text[position:].encode(), None
            damage.lost += 1
            position = end
            continue
        # null, numbers or rubbish between events
        following = text.find("{", position)
        closing = text.find("]", position)
        skipped = text[position : following if following >= 0 else size].strip(" ,\n\r\t")
        if 0 <= closing < following or (following < 0 <= closing):
            position = closing
        elif following < 0:
            if last and skipped:
                damage.lost += 1
            return events, b"" if last else text[position:].encode(), None
        else:
            damage.lost += 1
            position = following


def _mend_event(text: str, start: int, damage: Damage, *, last: bool) -> tuple[dict[str, Any] | None, int]:
    """One damaged event at `start`: (the object, end); (None, end) if it is lost; (None, -1) if it is unfinished."""
    search = start
    for _ in range(4):
        found = _NEXT.search(text, search)
        end = found.start() + 1 if found else _end_of_list(text, start)
        if end < 0:
            break
        row = _mend(text[start:end], damage)
        if row is not None:
            return row, end
        if found is None:
            return None, end
        search = found.end()
    first = _NEXT.search(text, start)
    if first is not None:
        return None, first.start() + 1
    if not last:
        return None, -1
    row = _mend(text[start:].rstrip().rstrip("]} \n\t\r,") + "}}", damage) or _mend(text[start:], damage)
    if row is not None:
        return row, len(text)
    damage.note("text that ends inside an event")
    return None, len(text)


def _end_of_list(text: str, start: int) -> int:
    """End of the last event if the list's own end is in `text`: just after the `}` before `]`; else -1."""
    for found in re.finditer(r"\}(?=\s*,?\s*\]\s*(?:,\s*\"|\}|$))", text[start:]):
        return start + found.end()
    return -1


def _mend(piece: str, damage: Damage) -> dict[str, Any] | None:
    """Try the known faults one after the other, each on top of the one before."""
    kinds: list[str] = []
    for kind, repair in _REPAIRS:
        mended = repair(piece)
        if mended == piece:
            continue
        piece = mended
        kinds.append(kind)
        try:
            row = _DECODER.decode(piece.strip())
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            for each in kinds:
                damage.note(each)
            return row
    return None


def _escape_value(found: re.Match[str]) -> str:
    value = re.sub(r'(?<!\\)((?:\\\\)*)"', r'\1\\"', found.group(2))
    return f'{found.group(1)}"{value}"'


_REPAIRS: tuple[tuple[str, Callable[[str], str]], ...] = (
    ("trailing commas", lambda piece: _TRAILING.sub(r"\1", piece)),
    ("unescaped backslashes", lambda piece: _BAD_ESCAPE.sub(r"\\\\", piece)),
    ("unescaped quotes", lambda piece: _STRING_VALUE.sub(_escape_value, piece)),
    ("missing commas", lambda piece: re.sub(r'(["}\]\d])(\s*\n\s*|\s{2,})(?="[\w ]+"\s*:)', r"\1,\2", piece)),
)
