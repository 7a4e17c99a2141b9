"""Objects turned into trees that load without running code, and back into the types that they were.

`torch.load(weights_only=True)` reads numbers, strings, tensors, lists, tuples, dicts and a few more. What it
refuses but holds no code either (defaultdict, frozenset, deque, numpy arrays and scalars, paths, long
integers …) is written as a tagged tuple `(TAG, kind, …)` of what it does read. Anything else is refused here,
by name, before a byte is written. Objects that appear twice are stored once and come back as one.
"""

from __future__ import annotations

import pathlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotloop.errors import CheckpointError

__all__ = ["decode", "encode"]

_TAG = "hotloop:"
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_TORCH_PLAIN = (torch.dtype, torch.device, torch.Size, torch.layout)
# A long int pickles to an opcode that the restricted loader does not know.
_LONGEST_INT_BITS = 2000
_FACTORIES: dict[str, Any] = {
    kind.__name__: kind
    for kind in (int, float, bool, str, list, dict, set, tuple, bytes, OrderedDict, Counter, deque)
}
_MEMORY_FORMATS = {
    str(form): form
    for form in (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)
}


def encode(value: Any, where: str, take: Callable[[Tensor, str], Tensor]) -> Any:
    """A deep copy of `value` that `torch.load(weights_only=True)` accepts once saved.

    Args:
        value: nested containers of plain values.
        where: how to name `value` in an error.
        take: makes the copy of each tensor, given the tensor and its name.

    Raises:
        CheckpointError: something in `value` cannot be stored; names the place and the type.
    """
    return _Encoder(take).encode(value, where)


def decode(tree: Any) -> Any:
    """The value that `encode` was given."""
    return _Decoder().decode(tree)


def _tagged(kind: str, *content: Any) -> tuple[Any, ...]:
    return (_TAG, kind, *content)


class _Encoder:
    def __init__(self, take: Callable[[Tensor, str], Tensor]) -> None:
        self._take = take
        self._done: dict[int, tuple[Any, Any]] = {}
        self._open: set[int] = set()

    def encode(self, value: Any, where: str) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            if kind is int and value.bit_length() > _LONGEST_INT_BITS:
                return _tagged("int", hex(value))
            return value
        if kind in _TORCH_PLAIN:
            return value
        if id(value) in self._done:
            return self._done[id(value)][1]
        if id(value) in self._open:
            raise CheckpointError(f"{where} contains itself; a checkpoint cannot hold a cycle")
        self._open.add(id(value))
        result = self._encode_container(value, kind, where)
        self._open.discard(id(value))
        self._done[id(value)] = (value, result)  # holding the value keeps its id from being used again
        return result

    def _encode_container(self, value: Any, kind: type, where: str) -> Any:
        if isinstance(value, Tensor):
            return self._encode_tensor(value, where)
        if kind is list:
            return self._items(value, where)
        if kind is tuple:
            items = tuple(self._items(value, where))
            return _tagged("tuple", list(items)) if items and items[0] == _TAG else items
        if kind in (dict, OrderedDict):
            return self._encode_dict(value, kind, where)
        if kind is Counter:
            return _tagged("Counter", self._pairs(value, where))
        if kind is defaultdict:
            return self._encode_defaultdict(value, where)
        if kind in (set, frozenset):
            return _tagged(kind.__name__, self._items(value, where))
        if kind is deque:
            return _tagged("deque", self._items(value, where), value.maxlen)
        if kind is np.ndarray:
            return self._encode_array(value, where)
        if isinstance(value, np.generic):
            if value.dtype.hasobject:
                raise self._refuse(value, where)
            return _tagged("scalar", _encode_dtype(value.dtype), value.tobytes())
        return self._encode_rare(value, kind, where)

    def _encode_rare(self, value: Any, kind: type, where: str) -> Any:
        if kind is bytearray:
            return _tagged("bytearray", bytes(value))
        if kind is range:
            return _tagged("range", value.start, value.stop, value.step)
        if kind is slice:
            return _tagged("slice", [self.encode(v, where) for v in (value.start, value.stop, value.step)])
        if value is Ellipsis:
            return _tagged("ellipsis")
        if kind is torch.torch_version.TorchVersion:
            return _tagged("TorchVersion", str(value))
        if kind is torch.memory_format:
            return _tagged("memory_format", str(value))
        if isinstance(value, np.dtype) and not value.hasobject:
            return _tagged("dtype", _encode_dtype(value))
        if kind in (pathlib.PosixPath, pathlib.PurePosixPath):
            return _tagged("Path" if kind is pathlib.PosixPath else "PurePosixPath", str(value))
        raise self._refuse(value, where)

    def _encode_tensor(self, value: Tensor, where: str) -> Any:
        host = self._take(value, where)
        if isinstance(value, torch.nn.Parameter):
            if type(value) is not torch.nn.Parameter:
                raise self._refuse(value, where)
            return _tagged("Parameter", host, value.requires_grad)
        return _tagged("grad", host) if value.requires_grad and value.is_leaf else host

    def _encode_dict(self, value: dict[Any, Any], kind: type, where: str) -> Any:
        pairs = self._pairs(value, where)
        if all(type(key) in _PLAIN for key, _ in pairs):
            return kind(pairs)
        return _tagged(kind.__name__, pairs)

    def _encode_defaultdict(self, value: defaultdict[Any, Any], where: str) -> Any:
        factory = value.default_factory
        name = None if factory is None else getattr(factory, "__name__", "")
        if name is not None and _FACTORIES.get(name) is not factory:
            raise CheckpointError(
                f"{where} is a defaultdict whose default_factory is {factory!r}; a checkpoint can hold only "
                f"{', '.join(_FACTORIES)} or None there; give dict(value) instead"
            )
        return _tagged("defaultdict", name, self._pairs(value, where))

    def _encode_array(self, value: np.ndarray[Any, Any], where: str) -> Any:
        if value.dtype.hasobject:
            raise CheckpointError(
                f"{where} is a numpy array of Python objects (dtype {value.dtype}); give a list instead"
            )
        order = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
        content = (
            torch.frombuffer(bytearray(value.tobytes(order="A" if order == "F" else "C")), dtype=torch.uint8)
            if value.nbytes
            else torch.empty(0, dtype=torch.uint8)
        )
        return _tagged("ndarray", _encode_dtype(value.dtype), list(value.shape), order, content)

    def _items(self, values: Any, where: str) -> list[Any]:
        return [self.encode(item, f"{where}[{position}]") for position, item in enumerate(values)]

    def _pairs(self, value: dict[Any, Any], where: str) -> list[tuple[Any, Any]]:
        return [
            (self.encode(key, f"key {key!r} of {where}"), self.encode(item, f"{where}[{key!r}]"))
            for key, item in value.items()
        ]

    def _refuse(self, value: Any, where: str) -> CheckpointError:
        kind = type(value)
        return CheckpointError(
            f"{where} is of type {kind.__module__}.{kind.__qualname__}, which would have to run code to be "
            "loaded; a checkpoint holds numbers, strings, tensors, numpy arrays and standard containers of "
            "them. Save its state_dict() or its plain values instead"
        )


class _Decoder:
    def __init__(self) -> None:
        self._done: dict[int, tuple[Any, Any]] = {}

    def decode(self, tree: Any) -> Any:
        kind = type(tree)
        if kind not in (list, tuple, dict, OrderedDict):
            return tree
        if id(tree) in self._done:
            return self._done[id(tree)][1]
        if kind is list:
            result: Any = [self.decode(item) for item in tree]
        elif kind is tuple:
            tagged = len(tree) > 1 and type(tree[0]) is str and tree[0] == _TAG
            result = self._decode_tagged(tree[1], tree[2:]) if tagged else tuple(self.decode(i) for i in tree)
        else:
            result = kind((self.decode(key), self.decode(item)) for key, item in tree.items())
        self._done[id(tree)] = (tree, result)
        return result

    def _decode_tagged(self, kind: str, content: tuple[Any, ...]) -> Any:
        if kind == "Parameter":
            return torch.nn.Parameter(content[0], requires_grad=content[1])
        if kind == "grad":
            return content[0].detach().requires_grad_()
        if kind == "ndarray":
            return _decode_array(*content)
        if kind == "scalar":
            return np.ndarray((), _decode_dtype(content[0]), content[1] or b"\0")[()]
        if kind == "defaultdict":
            name, pairs = content
            return defaultdict(None if name is None else _FACTORIES[name], self._decode_pairs(pairs))
        if kind in ("dict", "OrderedDict"):
            return (dict if kind == "dict" else OrderedDict)(self._decode_pairs(content[0]))
        if kind == "Counter":
            return Counter(dict(self._decode_pairs(content[0])))
        if kind in ("tuple", "set", "frozenset"):
            return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](
                self.decode(i) for i in content[0]
            )
        if kind == "deque":
            return deque((self.decode(item) for item in content[0]), maxlen=content[1])
        return _decode_rare(kind, [self.decode(item) for item in content])

    def _decode_pairs(self, pairs: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        return [(self.decode(key), self.decode(item)) for key, item in pairs]


def _decode_rare(kind: str, content: list[Any]) -> Any:
    make: dict[str, Callable[..., Any]] = {
        "int": lambda text: int(text, 16),
        "bytearray": bytearray,
        "range": range,
        "slice": lambda bounds: slice(*bounds),
        "ellipsis": lambda: ...,
        "TorchVersion": torch.torch_version.TorchVersion,
        "memory_format": _MEMORY_FORMATS.__getitem__,
        "dtype": _decode_dtype,
        "Path": pathlib.Path,
        "PurePosixPath": pathlib.PurePosixPath,
    }
    if kind not in make:
        raise CheckpointError(f"holds a value of the unknown kind {kind!r}; a newer hotloop wrote it")
    return make[kind](*content)


def _encode_dtype(dtype: np.dtype[Any]) -> Any:
    """numpy's own description of a dtype, which may be nested for structured ones."""
    return np.lib.format.dtype_to_descr(dtype)


def _decode_dtype(description: Any) -> np.dtype[Any]:
    return np.lib.format.descr_to_dtype(description)


def _decode_array(description: Any, shape: list[int], order: Any, content: Tensor) -> np.ndarray[Any, Any]:
    dtype = _decode_dtype(description)
    data = bytearray(content.numpy().tobytes())
    return np.ndarray(shape, dtype, data or None, order=order)
