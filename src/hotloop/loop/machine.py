"""How a loop uses the machine, by its settings: threads, kernels, memory layout, how loaders are served."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from hotloop.data.serving import Serving, factor_of
from hotloop.errors import SettingError
from hotloop.loop.prepared import find_loader
from hotloop.optim.fusing import set_fused
from hotloop.settings import Settings

__all__ = ["MachineUse"]


@dataclass
class MachineUse:
    """The settings that say how the machine is used; None leaves a thing to the script.

    Attributes:
        fused: optimizers with one fused kernel. memory_format: of four-dimensional weights. threads: of the host.
        cudnn_benchmark: cuDNN tries its algorithms for each new shape. serving: of loaders.
    """

    fused: bool | None = None
    memory_format: str | None = None
    threads: int | None = None
    cudnn_benchmark: bool | None = None
    serving: Serving = field(default_factory=Serving)
    _fed: bool = False

    @classmethod
    def of(cls, settings: Settings) -> MachineUse:
        """As `settings` have it."""
        serving = Serving(*(settings[name] for name in ("workers", "prefetch", "pin_memory", "micro_batch")))
        names = ("fused", "memory_format", "threads", "cudnn_benchmark")
        return cls(**{name: settings[name] for name in names}, serving=serving)

    def begin(self, device: torch.device, say: Callable[[str], None]) -> None:
        """Set what is one for the whole process."""
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        if self.cudnn_benchmark is not None:
            torch.backends.cudnn.benchmark = self.cudnn_benchmark
            if device.type != "cuda":
                say(f"cudnn_benchmark={self.cudnn_benchmark}: nothing on {device} asks cuDNN")

    def lay_out(self, module: nn.Module, say: Callable[[str], None]) -> None:
        """Put the weights of convolutions into the memory format."""
        if self.memory_format is None:
            return
        if not any(p.dim() == 4 for p in module.parameters()):
            say(
                f"memory_format={self.memory_format}: no parameter of {type(module).__name__} has four dimensions"
            )
            return
        last = self.memory_format == "channels_last"
        # torch's stubs know no memory format alone
        module.to(memory_format=torch.channels_last if last else torch.contiguous_format)  # type: ignore[call-overload]

    def fuse(self, optimizer: Any, say: Callable[[str], None]) -> None:
        """Switch the optimizer's fused kernel."""
        if self.fused is not None and (reason := set_fused(optimizer, self.fused)) is not None:
            say(f"fused={self.fused}: {reason}, so it stays as it is")

    def window_of(self, objects: tuple[Any, ...], accumulation: int) -> int | None:
        """Micro-batches an update once the first loader of `objects` serves micro-batches; None if that is not asked.

        Raises:
            SettingError: the samples of an update are no multiple of `micro_batch`.
        """
        micro = self.serving.micro_batch
        if micro is None or self._fed:
            return None
        source = find_loader(objects)
        if source is None:
            return None
        source = getattr(source, "source", source)
        if not isinstance(source, DataLoader):
            raise SettingError(
                f"micro_batch={micro}: the first loader prepared is a {type(source).__name__}, which cannot be "
                "served in other batches; leave micro_batch out"
            )
        self._fed = True
        split, joined = factor_of(source, micro)
        if accumulation % joined:
            raise SettingError(
                f"micro_batch={micro}: an update is made of accumulation={accumulation} batches of "
                f"{source.batch_size} samples, which is no multiple of it"
            )
        return accumulation * split // joined

    def serving_of(self, first: bool) -> Serving:
        """How a loader is served; micro-batches are for the first one, which feeds training."""
        if first or self.serving.micro_batch is None:
            return self.serving
        s = self.serving
        return Serving(s.workers, s.prefetch, s.pin_memory)
