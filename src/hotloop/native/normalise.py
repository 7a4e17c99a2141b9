"""Tidying captured calls before they are lowered: constants folded, several results named apart, writes in place
turned into new values, dead calls dropped."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from hotloop.native.capture import Call, Captured, Ref
from hotloop.native.faults import UnsupportedOpError

__all__ = ["handled", "normalise"]

_IGNORED = {
    "_assert_tensor_metadata",
    "_assert_async.msg",
    "sym_constrain_range_for_size",
    "_set_grad_enabled",
}
# Their result depends on the shape of the input alone.
_SHAPE_ONLY = (
    "zeros_like",
    "ones_like",
    "full_like",
    "empty_like",
    "new_zeros",
    "new_ones",
    "new_full",
    "new_empty",
)
_PIECES = (
    "split.Tensor",
    "split.sizes",
    "split_with_sizes",
    "chunk",
    "unbind.int",
    "unsafe_chunk",
    "unsafe_split.Tensor",
)


def handled() -> set[str]:
    """Operations that are gone after `normalise`: dropped, folded or cut into pieces."""
    return _IGNORED | {"getitem"} | set(_PIECES)


def normalise(captured: Captured) -> Captured:
    """A copy of `captured` whose calls depend on an input, each with results of its own.

    Raises:
        UnsupportedOpError: a write in place to a part of a tensor.
    """
    renamed: dict[str, str] = {}
    constants = dict(captured.constants)
    calls: list[Call] = []
    pieces: dict[str, list[str]] = {}
    made_by: dict[str, Call] = {}
    # pieces that promise to share no memory with what was split
    apart: set[str] = set()

    def resolve(value: Any) -> Any:
        if isinstance(value, Ref):
            name = value.name
            while name in renamed:
                name = renamed[name]
            return Ref(name)
        if isinstance(value, (list, tuple)):
            return type(value)(resolve(item) for item in value)
        return value

    for original in captured.calls:
        if original.op in _IGNORED:
            continue
        call = replace(
            original,
            args=tuple(resolve(arg) for arg in original.args),
            kwargs={key: resolve(value) for key, value in original.kwargs.items()},
        )
        if call.op == "getitem":
            source, index = call.args
            key = f"{source.name}#{index}"
            renamed[call.name] = pieces[source.name][index] if source.name in pieces else key
            continue
        refs = _refs((call.args, list(call.kwargs.values())))
        if call.op.startswith(_SHAPE_ONLY) or all(ref.name in constants for ref in refs):
            _fold(call, constants, captured)
            continue
        if call.op in _PIECES:
            pieces[call.name] = _name_pieces(call, calls, captured, made_by)
            if call.op.startswith("unsafe"):
                apart |= set(pieces[call.name])
            for index, piece in enumerate(pieces[call.name]):
                renamed[f"{call.name}#{index}"] = piece
            continue
        base = call.op.partition(".")[0]
        if base.endswith("_") and not base.startswith("_"):
            target = call.args[0].name
            if (
                target in made_by
                and target not in apart
                and made_by[target].op.startswith(("slice", "select"))
            ):
                raise UnsupportedOpError(
                    f"{call.origin} writes into a part of a tensor; build the result with torch.cat, torch.where or "
                    "torch.stack instead"
                )
            call.op = base[:-1] + call.op[len(base) :]
            renamed[target] = call.name
        calls.append(call)
        made_by[call.name] = call
    outputs = [resolve(output) for output in captured.outputs]
    return replace(captured, calls=_alive(calls, outputs), constants=constants, outputs=outputs)


def _refs(value: Any) -> list[Ref]:
    if isinstance(value, Ref):
        return [value]
    if isinstance(value, (list, tuple)):
        return [ref for item in value for ref in _refs(item)]
    return []


def _alive(calls: list[Call], outputs: list[Any]) -> list[Call]:
    wanted = {ref.name.partition("#")[0] for ref in _refs(outputs)}
    kept = []
    for call in reversed(calls):
        if call.name in wanted:
            kept.append(call)
            wanted |= {ref.name.partition("#")[0] for ref in _refs((call.args, list(call.kwargs.values())))}
    return kept[::-1]


def _fold(call: Call, constants: dict[str, torch.Tensor], captured: Captured) -> None:
    def real(value: Any) -> Any:
        if isinstance(value, Ref):
            if value.name in constants:
                return constants[value.name]
            shape = captured.input_shapes.get(value.name)
            return torch.empty(shape if shape is not None else _shape_of(value.name, captured))
        if isinstance(value, (list, tuple)):
            return type(value)(real(item) for item in value)
        return value

    with torch.no_grad():
        result = call.target(*real(call.args), **{key: real(value) for key, value in call.kwargs.items()})
    if isinstance(result, torch.Tensor):
        constants[call.name] = result
    elif isinstance(result, (list, tuple)):
        for index, value in enumerate(result):
            constants[f"{call.name}#{index}"] = value


def _shape_of(name: str, captured: Captured) -> tuple[int, ...]:
    base, _, index = name.partition("#")
    return next(call.shapes[int(index or 0)] for call in captured.calls if call.name == base)


def _name_pieces(call: Call, calls: list[Call], captured: Captured, made_by: dict[str, Call]) -> list[str]:
    """Turn a split into slices (an unbind into selects), so that each piece is a call of its own."""
    source = call.args[0]
    rest = [*call.args[1:], *call.kwargs.values()]
    if call.op.startswith("unbind"):
        dim = int(rest[0]) if rest else 0
    else:
        dim = int(rest[1]) if len(rest) > 1 else 0
    names, start = [], 0
    for index, shape in enumerate(call.shapes):
        name = f"{call.name}#{index}"
        if call.op.startswith("unbind"):
            piece = Call(
                name, "select.int", (source, dim, index), {}, [shape], [call.dtypes[index]], call.origin
            )
        else:
            count = shape[dim]
            piece = Call(
                name,
                "slice.Tensor",
                (source, dim, start, start + count),
                {},
                [shape],
                [call.dtypes[index]],
                call.origin,
            )
            start += count
        piece = replace(piece, name=f"{call.name}_{index}")
        calls.append(piece)
        made_by[piece.name] = piece
        names.append(piece.name)
    return names
