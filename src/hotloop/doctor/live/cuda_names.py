"""The names of CUDA in a process whose GPU is virtual: "cuda" means the private-use device, `torch.cuda` answers.

For a process of its own: nothing is put back. Autocast casts nothing, compiling compiles nothing, streams and events
are there and do nothing: what is looked for is where the host waits, not how fast anything is.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from hotloop.doctor.live.device_tensor import NAME, DeviceTensor, is_pinned, is_virtual, pin
from hotloop.doctor.live.stall_log import StallLog

__all__ = ["DeviceNames", "redirect_cuda"]


class DeviceNames(TorchFunctionMode):
    """While it is entered, tensors out of Python values reach the virtual device, and pinned memory is remembered.

    All else that names a device is seen by the dispatch mode, which stays in force inside torch's own functions.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call `func`, or what stands for it."""
        kwargs = dict(kwargs or {})
        pinned = bool(kwargs.pop("pin_memory")) if "pin_memory" in kwargs else False
        make = _from_values if getattr(func, "__name__", "") in _FROM_VALUES else _call
        result = make(func, args, kwargs)
        return pin(result) if pinned and isinstance(result, torch.Tensor) else result


def _call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


# made in C++ out of Python values, past all modes
_FROM_VALUES = frozenset(["tensor", "as_tensor", "asarray", "new_tensor"])


def _from_values(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A tensor out of values: made on the host, then sent over, as torch does it for a GPU."""
    device, wants_grad = kwargs.pop("device", None), bool(kwargs.pop("requires_grad", False))
    if getattr(func, "__name__", "") == "new_tensor":
        like, args, func = args[0], args[1:], torch.tensor
        kwargs.setdefault("dtype", like.dtype)
        device = torch.device(NAME, 0) if device is None and isinstance(like, DeviceTensor) else device
    if args and isinstance(args[0], DeviceTensor):
        made = args[0] if kwargs.get("dtype") is None else args[0].to(kwargs["dtype"])
        made = made if device is None or is_virtual(device) else made.to(device)
    else:
        made = func(*args, **kwargs)
        made = made if device is None else made.to(device)
    return made.requires_grad_() if wants_grad else made


class _Idle:
    """A stream, an event, a graph's pool: there, and doing nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = torch.device("cuda", 0)

    def __enter__(self) -> _Idle:
        return self

    def __exit__(self, *exception: object) -> None:
        return None

    def is_capturing(self) -> bool:
        return False

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0

    def record_event(self, event: Any = None) -> Any:
        return event if event is not None else _Idle()

    def record(self, *args: Any) -> None:
        return None

    @property
    def cuda_stream(self) -> int:
        return 0

    wait_event = wait_stream = wait = record


def redirect_cuda(log: StallLog) -> None:
    """Let `torch.cuda` and what asks it find one GPU, for the rest of the process."""
    cuda: Any = torch.cuda

    def waits(*args: Any, **kwargs: Any) -> None:
        log.note("synchronize")

    properties = types.SimpleNamespace(
        name="virtual GPU",
        major=9,
        minor=0,
        total_memory=2**36,
        multi_processor_count=128,
        is_integrated=False,
        warp_size=32,
    )
    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_name": properties.name,
        "get_device_capability": (properties.major, properties.minor),
        "get_device_properties": properties,
        "is_bf16_supported": True,
        "is_current_stream_capturing": False,
        "get_sync_debug_mode": 0,
        "mem_get_info": (2**36, 2**36),
    }
    for name, answer in answers.items():
        setattr(cuda, name, _always(answer))
    for name in (
        "init", "_lazy_init", "set_device", "empty_cache", "ipc_collect", "manual_seed", "manual_seed_all", "seed",
        "seed_all", "set_sync_debug_mode", "reset_peak_memory_stats", "reset_max_memory_allocated", "set_stream",
        "set_per_process_memory_fraction",
    ):  # fmt: skip
        setattr(cuda, name, _always(None))
    for name in (
        "memory_allocated",
        "max_memory_allocated",
        "memory_reserved",
        "max_memory_reserved",
        "utilization",
    ):
        setattr(cuda, name, _always(0))
    cuda.memory_stats = lambda *args, **kwargs: {}
    cuda.synchronize = waits
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    cuda.get_rng_state_all = lambda: [torch.get_rng_state()]
    cuda.set_rng_state_all = lambda states: None
    stream = type("Stream", (_Idle,), {"synchronize": waits})
    cuda.Stream, cuda.Event = stream, type("Event", (_Idle,), {"synchronize": waits})
    public: Any = torch
    public.Stream, public.Event = stream, cuda.Event
    public._C._cuda_getCurrentRawStream = _always(0)
    cuda.current_stream = cuda.default_stream = lambda *args, **kwargs: stream()
    cuda.stream = cuda.device = lambda *args, **kwargs: contextlib.nullcontext()
    accelerator: Any = torch.accelerator
    accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")
    accelerator.synchronize = waits
    accelerator.is_available = _always(True)
    accelerator.device_count = _always(1)
    accelerator.current_device_index = accelerator.current_device_idx = _always(0)
    accelerator.current_stream = cuda.current_stream
    _move()
    _pin()
    _leave_alone()


def _always(answer: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: answer


def _move() -> None:
    """`Tensor.to` and `cuda`, which ask for CUDA's own library before any mode is asked."""
    tensor: Any = torch.Tensor
    move = tensor.to
    there = torch.device(NAME, 0)

    def here(value: Any) -> Any:
        return there if isinstance(value, (str, torch.device)) and is_virtual(value) else value

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and isinstance(args[0], DeviceTensor):
            args = (there, args[0].dtype, *args[1:])
        moved: torch.Tensor = move(
            self, *map(here, args), **{key: here(value) for key, value in kwargs.items()}
        )
        return moved

    def cuda(self: torch.Tensor, device: Any = None, non_blocking: bool = False, **rest: Any) -> torch.Tensor:
        return to(self, there, non_blocking=non_blocking, **rest)

    tensor.to, tensor.cuda = to, cuda
    # a module that is moved keeps its parameters, which optimizers know already
    torch.__future__.set_swap_module_params_on_conversion(True)


def _pin() -> None:
    """Pinned memory that is remembered as such; also in the thread of a loader, which enters no mode."""
    tensor: Any = torch.Tensor

    def pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
        return self if is_pinned(self) else pin(self.clone())

    tensor.pin_memory = pin_memory
    tensor.is_pinned = lambda self, device=None: is_pinned(self)
    loading: Any = torch.utils.data._utils.pin_memory
    loading.pin_memory = _pin_all


def _pin_all(data: Any, device: Any = None) -> Any:
    if isinstance(data, torch.Tensor):
        return data.pin_memory()
    if isinstance(data, dict):
        return {key: _pin_all(value) for key, value in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(_pin_all(value) for value in data))
    if isinstance(data, (list, tuple)):
        return type(data)(_pin_all(value) for value in data)
    return data.pin_memory() if hasattr(data, "pin_memory") else data


def _leave_alone() -> None:
    """Autocast, compiling, and loading to the device."""
    autocast: Any = torch.amp.autocast_mode.autocast
    make = autocast.__init__

    def make_autocast(
        self: Any, device_type: str, dtype: Any = None, enabled: bool = True, **rest: Any
    ) -> None:
        on_gpu = device_type in ("cuda", NAME)
        make(
            self, "cpu" if on_gpu else device_type, None if on_gpu else dtype, enabled and not on_gpu, **rest
        )

    autocast.__init__ = make_autocast
    public: Any = torch
    public.compile = _compile_nothing
    public.nn.Module.compile = _always(None)
    load, save, set_default = public.load, public.save, public.set_default_device

    def save_from_here(value: Any, *args: Any, **kwargs: Any) -> None:
        save(tree_map_only(DeviceTensor, lambda tensor: tensor.cpu(), value), *args, **kwargs)

    def load_here(*args: Any, map_location: Any = None, **kwargs: Any) -> Any:
        # tensors come to the host; load_state_dict and .to bring them over
        on_gpu = isinstance(map_location, (str, torch.device)) and torch.device(map_location).type == "cuda"
        return load(*args, map_location="cpu" if on_gpu else map_location, **kwargs)

    public.load, public.save = load_here, save_from_here
    public.set_default_device = lambda device: set_default(NAME if is_virtual(device) else device)
    public.Generator = _Generator


class _Generator(torch._C.Generator):
    """A generator of random numbers of any device, which is the CPU's."""

    def __new__(cls, device: Any = "cpu") -> _Generator:
        return super().__new__(cls, "cpu")  # type: ignore[call-arg]


def _compile_nothing(model: Any = None, **options: Any) -> Any:
    return model if model is not None else lambda function: function
