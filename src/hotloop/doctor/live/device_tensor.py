"""A virtual GPU's tensors: CPU tensors behind a device of their own, which notes where a GPU would be waited for.

torch lets Python stand behind its private-use device (from 2.11 on, experimental, once per process). Each tensor of it
wraps one of the CPU, on which every operator is run; so a script computes what it computes on the CPU, while its
tensors cannot be mixed with those of the host and leave the device only by calls that are seen here.
"""

from __future__ import annotations

import linecache
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from hotloop.doctor.live.device_cells import CELLS
from hotloop.doctor.live.stall_log import StallLog

__all__ = ["NAME", "DeviceTensor", "Dispatch", "is_pinned", "is_virtual", "make_device", "pin"]

NAME = "vgpu"
_PINNED: set[int] = set()  # addresses of memory of the host that was pinned

# operators of a GPU that wait: for a value, or to learn how large their result is
_WAITS = {
    "_local_scalar_dense": "item",
    "nonzero": "nonzero",
    "masked_select": "masked_select",
    "_unique2": "unique",
    "unique_dim": "unique",
    "unique_consecutive": "unique_consecutive",
    "bincount": "bincount",
    "equal": "equal",
    "is_nonzero": "__bool__",
    "_linalg_check_errors": "linalg",
    "_ctc_loss": "ctc_loss",
    "histc": "histc",
}
_WITH_SIZES = ("_pack_padded_sequence", "_pad_packed_sequence")  # the second result stays on the host
_MASKED = {
    "index": "__getitem__",
    "index_put_": "__setitem__",
    "_index_put_impl_": "__setitem__",
    "index_put": "__setitem__",
}


def make_device() -> bool:
    """Give the process its private-use device; False where this torch has no such thing.

    Raises:
        RuntimeError: the process has one already.
    """
    try:
        from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
    except ImportError:
        return False
    _setup_privateuseone_for_python_backend(NAME)
    return True


def pin(tensor: torch.Tensor) -> torch.Tensor:
    """Remember the memory of a tensor of the host as pinned."""
    _PINNED.add(tensor.untyped_storage().data_ptr())
    return tensor


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether the memory of a tensor is pinned."""
    return not isinstance(tensor, DeviceTensor) and tensor.untyped_storage().data_ptr() in _PINNED


def is_virtual(device: Any) -> bool:
    """Whether a device, by name or object, is the virtual GPU: by its own name or as "cuda"."""
    return device is not None and torch.device(device).type in (NAME, "cuda")


class DeviceTensor(torch.Tensor):
    """A tensor of the virtual GPU; to the script it says that it lies on "cuda:0"."""

    raw: torch.Tensor
    copies_plainly = True  # for whoever saves tensors and refuses classes it does not know

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> DeviceTensor:
        """Put a tensor of the CPU behind one of the device."""
        made: DeviceTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            raw.shape,
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            layout=raw.layout,
            device=torch.device(NAME, 0),
        )
        made.raw = raw
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operator on the tensors behind."""
        return Dispatch.current().run(func, args, kwargs or {})

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """As the script knows it."""
        return torch.device("cuda", 0)

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        """True."""
        return True

    @property
    def data(self) -> torch.Tensor:
        """The values without their history."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not isinstance(value, DeviceTensor) or value.shape != self.shape or value.dtype != self.dtype:
            raise RuntimeError(
                "the virtual GPU replaces a tensor's data only by such of the same shape and dtype"
            )
        self.raw = value.raw

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(_index(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        numbers = isinstance(index, torch.Tensor) and index.dtype not in (torch.bool, torch.uint8)
        if not isinstance(value, torch.Tensor) and (numbers or type(index) is int):
            # sent over as a tensor; behind slices and masks a number is filled in
            Dispatch.current().log.note("to the device")
        super().__setitem__(_index(index), value)

    def __bool__(self) -> bool:
        Dispatch.current().log.note("__bool__")
        return bool(self.raw)

    def tolist(self) -> Any:
        """Values as numbers: waits."""
        Dispatch.current().log.note("tolist")
        return self.raw.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Refused as a GPU's tensor refuses it, unless forced."""
        if not force:
            raise TypeError(
                "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory "
                "first."
            )
        return self.detach().cpu().numpy()

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.numpy()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        Dispatch.current().log.note("__repr__")
        text = repr(self.raw)
        history = f", grad_fn=<{type(self.grad_fn).__name__}>" if self.grad_fn is not None else ""
        return f"{text[:-1]}, device='cuda:0'{history})"

    def __format__(self, spec: str) -> str:
        Dispatch.current().log.note("__format__")
        if self.dim() == 0:
            return format(self.raw.item(), spec)
        return format(repr(self.raw), spec)

    def record_stream(self, stream: Any) -> None:
        """Nothing: there is one stream, which does nothing by itself."""

    def pin_memory(self, device: Any = None) -> torch.Tensor:
        """Refused as on a GPU."""
        raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")


def _index(index: Any) -> Any:
    """Lists as tensors of the host: torch would make them in C++, past all modes."""
    if isinstance(index, tuple):
        return tuple(map(_index, index))
    plain = isinstance(index, list) and all(isinstance(item, (int, bool, list)) for item in index)
    return torch.tensor(index) if plain else index


class Dispatch(TorchDispatchMode):
    """Runs the device's operators on the CPU, and notes those that would wait.

    Attributes:
        log: where they are noted. made: tensors that came to the device.
    """

    _entered: Dispatch | None = None

    def __init__(self, log: StallLog) -> None:
        super().__init__()
        self.log = log
        self.made = 0
        self._arrived: dict[tuple[str, int], dict[int, list[tuple[int, ...]]]] = {}

    @classmethod
    def current(cls) -> Dispatch:
        """The one that is entered, in whichever thread."""
        assert cls._entered is not None
        return cls._entered

    def __enter__(self) -> Dispatch:
        Dispatch._entered = self
        super().__enter__()
        return self

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Send what makes tensors on the device, or has some among its arguments, to the tensors behind."""
        kwargs = kwargs or {}
        if is_virtual(kwargs.get("device")) or _any_there(args) or _any_there(kwargs):
            return self.run(func, args, kwargs)
        return func(*args, **kwargs)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operator with the device's tensors among its arguments, or that makes one."""
        name = func.overloadpacket.__name__
        device = kwargs.get("device")
        there = True
        if device is not None:
            there = is_virtual(device)
            kwargs = {**kwargs, "device": torch.device("cpu")}
        self._look(name, args, kwargs, there)
        wrappers: dict[int, DeviceTensor] = {}

        def behind(tensor: DeviceTensor) -> torch.Tensor:
            wrappers[id(tensor.raw)] = tensor
            return tensor.raw

        raw_args = tree_map_only(DeviceTensor, behind, args)
        raw_kwargs = tree_map_only(DeviceTensor, behind, kwargs)
        result = CELLS.get(name, func)(*raw_args, **raw_kwargs)
        if not there:
            return result

        def wrap(tensor: torch.Tensor) -> torch.Tensor:
            known = wrappers.get(id(tensor))
            if known is not None:
                return known
            self.made += 1
            return DeviceTensor(tensor)

        if name == "copy_" and args and not isinstance(args[0], DeviceTensor):
            return args[0]  # from the device into a tensor of the host
        if name in _WITH_SIZES:
            return wrap(result[0]), result[1]
        return tree_map_only(torch.Tensor, wrap, result)

    def _look(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], there: bool) -> None:
        """Note an operator that would wait."""
        if name in _WAITS:
            self.log.note(_WAITS[name])
        elif name in _MASKED:
            self._look_at_indices(name, args)
        elif name == "repeat_interleave":
            if kwargs.get("output_size") is None and isinstance(args[-1], torch.Tensor):
                self.log.note(name)
        elif name == "_to_copy":
            self._look_at_copy(args[0], there, bool(kwargs.get("non_blocking")))
        elif name == "copy_":
            source, target = args[1], args[0]
            if isinstance(source, DeviceTensor) != isinstance(target, DeviceTensor):
                free = bool(kwargs.get("non_blocking")) or (len(args) > 2 and bool(args[2]))
                if not (free and is_pinned(target)):
                    self._look_at_copy(source, isinstance(target, DeviceTensor), free)

    def _look_at_indices(self, name: str, args: tuple[Any, ...]) -> None:
        indices = [i for i in (args[1] if len(args) > 1 else ()) if isinstance(i, torch.Tensor)]
        value = args[2] if len(args) > 2 else None
        # one value behind a mask is a fill, of which nothing need be known
        fill = isinstance(value, torch.Tensor) and value.numel() == 1
        if any(i.dtype in (torch.bool, torch.uint8) for i in indices) and not fill:
            self.log.note(_MASKED[name])
        elif any(not isinstance(i, DeviceTensor) for i in indices):
            self.log.note("to the device")

    def _look_at_copy(self, source: torch.Tensor, to_device: bool, non_blocking: bool) -> None:
        if isinstance(source, DeviceTensor) == to_device:
            return
        if not to_device:
            # into new memory, which is pageable: it waits, whatever was asked for
            self.log.note("to the host")
            return
        place = self.log.place()
        if place is not None:
            self._arrived.setdefault(place, {}).setdefault(self.log.steps, []).append(tuple(source.shape))
        if source.numel() and not (non_blocking and is_pinned(source)):
            self.log.note("to the device")

    def changing_shapes(self) -> list[tuple[str, int, str, str]]:
        """(file, line, text, why) of the lines that bring tensors of several shapes over, again and again."""
        found = []
        for (file, line), by_step in self._arrived.items():
            batches = Counter(tuple(shapes) for shapes in by_step.values())
            # a loader that runs ahead brings two batches in one step, and none in another
            usual = Counter(map(len, by_step.values())).most_common(1)[0][0]
            batches = Counter({shapes: count for shapes, count in batches.items() if len(shapes) == usual})
            if len(batches) > 1:
                some = ", ".join(str(list(shapes[0])) for shapes, _ in batches.most_common(3))
                why = f"brings {len(batches)} shapes ({some}), each a recording of its own: drop_last=True, or pad"
                found.append((file, line, linecache.getline(file, line).strip(), why))
        return found


def _any_there(values: Any) -> bool:
    if isinstance(values, DeviceTensor):
        return True
    if isinstance(values, dict):
        return any(_any_there(value) for value in values.values())
    return isinstance(values, (list, tuple)) and any(_any_there(value) for value in values)
