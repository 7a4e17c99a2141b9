"""Tidying captured calls before they are lowered: constants folded, several results named apart, writes in place
turned into new values, dead calls dropped."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from hotloop.native.capture import Call, Captured, Ref
from hotloop.native.faults import UnsupportedOpError
from hotloop.native.graph import Origin

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
        UnsupportedOpError: a write in place that another value shows, or to the module's own tensors; random dropout.
    """
    renamed: dict[str, str] = {}
    constants = dict(captured.constants)
    calls: list[Call] = []
    pieces: dict[str, list[str]] = {}
    dtypes = {name: tensor.dtype for name, tensor in captured.constants.items()} | captured.input_dtypes
    # whose memory a value shares, and who was written since by which call
    owner: dict[str, str] = {}
    stale: dict[str, Origin] = {}

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
        for index, dtype in enumerate(call.dtypes):
            dtypes[call.name if len(call.dtypes) == 1 else f"{call.name}#{index}"] = dtype
        _refuse_stale(refs, stale)
        _refuse_random(call)
        if call.op.startswith(_SHAPE_ONLY) or all(ref.name in constants for ref in refs):
            _fold(call, constants, captured)
            continue
        if call.op in _PIECES:
            pieces[call.name] = _name_pieces(call, calls)
            # unsafe pieces promise to share no memory with what was split
            if not call.op.startswith("unsafe"):
                owner |= dict.fromkeys(pieces[call.name], owner.get(refs[0].name, refs[0].name))
            for index, piece in enumerate(pieces[call.name]):
                renamed[f"{call.name}#{index}"] = piece
            continue
        base = call.op.partition(".")[0]
        if base.endswith("_") and not base.startswith("_"):
            target = call.args[0].name
            root = owner.get(target, target)
            if target in captured.constants and base != "detach_":
                raise UnsupportedOpError(
                    f"{call.origin} writes to a parameter or buffer of the module; take the state as an input and "
                    "return the new one"
                )
            for name in {root, *(name for name, known in owner.items() if known == root)} - {target}:
                stale[name] = call.origin
            call.op = base[:-1] + call.op[len(base) :]
            renamed[target] = call.name
        elif refs and _is_view(call):
            owner[call.name] = owner.get(refs[0].name, refs[0].name)
        _cast(call, dtypes)
        calls.append(call)
    outputs = [resolve(output) for output in captured.outputs]
    _refuse_stale(_refs(outputs), stale)
    return replace(captured, calls=_alive(calls, outputs), constants=constants, outputs=outputs)


def _refuse_stale(refs: list[Ref], stale: dict[str, Origin]) -> None:
    for ref in refs:
        if ref.name in stale:
            raise UnsupportedOpError(
                f"{stale[ref.name]} writes into a tensor that another one looks at, and the other is used later; "
                "build the result with torch.cat, torch.where or torch.stack instead"
            )


def _refuse_random(call: Call) -> None:
    if call.op in ("dropout", "feature_dropout", "alpha_dropout") and call.args[1] and call.args[2]:
        raise UnsupportedOpError(f"{call.origin} is random here (train=True); pass training=self.training")


def _is_view(call: Call) -> bool:
    schema = getattr(call.target, "_schema", None)
    return schema is not None and any(
        r.alias_info is not None and not r.alias_info.is_write for r in schema.returns
    )


_CASTS = ("to.dtype", "to.dtype_layout", "to.other", "_to_copy", "type_as")


def _cast(call: Call, dtypes: dict[str, torch.dtype]) -> None:
    """Numbers are carried as float32 whatever their type: a cast that changes the value becomes what changes it."""
    if call.op not in _CASTS or call.dtypes[0].is_floating_point:
        return
    source = dtypes.get(call.args[0].name, torch.float32)
    if call.dtypes[0] == torch.bool and source != torch.bool:
        call.op, call.args, call.kwargs = "ne.Scalar", (call.args[0], 0), {}
    elif source.is_floating_point:
        call.op, call.args, call.kwargs = "trunc", (call.args[0],), {}


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


def _name_pieces(call: Call, calls: list[Call]) -> list[str]:
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
        names.append(piece.name)
    return names
