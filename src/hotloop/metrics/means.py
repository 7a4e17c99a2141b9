"""Means over a whole epoch and all processes, gathered without a wait and exact when read."""

from __future__ import annotations

import math
import zlib
from typing import Any

import torch

from hotloop.errors import HotloopError, ProcessError
from hotloop.hardware.processes import Processes
from hotloop.state.ring import widest_float

__all__ = ["Means"]

Weight = float | int | bool | torch.Tensor | None


class Means:
    """Means by name: sum(weight x value) / sum(weight) over each `add` of every rank since the last read.

    Sums are kept in float64: on the device for what lies there, in Python floats for what is on the host. A
    device without float64 sums in pairs of float32 (value and rounding error, Knuth's TwoSum), which carry
    about 48 bits.

    Creating one is collective over the processes, because it opens a side group.
    """

    def __init__(self, device: torch.device, processes: Processes) -> None:
        self.device = device
        self.processes = processes
        self._host: dict[str, list[float]] = {}
        self._device: dict[str, _DeviceSums] = {}
        self._group = processes.side_group("means")

    def add(self, name: str, value: Any, weight: Weight = None) -> None:
        """Count `value` into the mean `name`; never waits for the device.

        Args:
            name: which mean.
            value: a number, or a tensor of any real dtype and shape; each of its elements counts by itself.
            weight: a number or tensor that broadcasts to `value`: how much each element counts, for
                instance how many samples or tokens it is a mean over. None is 1. Where it is 0 the value
                is not looked at: it may be NaN.

        Raises:
            HotloopError: a value or weight is no real number, or the weight does not broadcast to the
            value.
        """
        kind = type(value)
        if kind is torch.Tensor and value.is_cpu:
            if value.dim() == 0:
                value, kind = value.item(), float
            elif value.numel() == 1:
                value, kind = value.reshape(()).item(), float
        if isinstance(weight, torch.Tensor) and weight.is_cpu and weight.numel() == 1:
            weight = weight.item()
        if (kind is float or kind is int or kind is bool) and not isinstance(weight, torch.Tensor):
            self._add_number(name, value, 1.0 if weight is None else weight)
        else:
            self._add_tensor(name, value, weight)

    def read(self, name: str) -> float:
        """The mean `name` over all ranks, exactly rounded from the ranks' sums; resets it.

        Collective: every rank reads the same names in the same order, whether it added to them or not.
        Waits for the device. NaN if nothing was added anywhere.

        Raises:
            ProcessError: the ranks read different names at this point.
        """
        total, count = self._host.pop(name, (0.0, 0.0))
        sums = self._device.pop(name, None)
        if sums is not None:
            device_total, device_count = sums.read()
            total, count = total + device_total, count + device_count
        if self.processes.world > 1:
            total, count = self._sum_over_ranks(name, total, count)
        return total / count if count else math.nan

    def names(self) -> list[str]:
        """Names with something added on this rank since they were last read."""
        return list(dict.fromkeys([*self._host, *self._device]))

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """What was added and not yet read on this rank, as floats and tensors, without a wait."""
        return {
            "host": {name: list(sums) for name, sums in self._host.items()},
            "device": {name: sums.lines.clone() for name, sums in self._device.items()},
        }

    def load_state_dict(self, state: dict[str, dict[str, Any]]) -> None:
        """Continue from what `state_dict` gave, on this device."""
        self._host = {name: list(sums) for name, sums in state["host"].items()}
        self._device = {}
        for name, lines in state["device"].items():
            self._device[name] = _DeviceSums(self.device, lines)

    def _add_number(self, name: str, value: Any, weight: float) -> None:
        """A number of the host with a weight of the host."""
        if type(value) is complex:
            raise _unaddable(name, value)
        if weight == 0:
            return
        sums = self._host.get(name)
        if sums is None:
            self._host[name] = [float(value * weight), float(weight)]
        else:
            sums[0] += value * weight
            sums[1] += weight

    def _add_tensor(self, name: str, value: Any, weight: Weight) -> None:
        """A tensor, or anything that becomes one, wherever it lies."""
        if not isinstance(value, torch.Tensor):
            value = _as_tensor(name, value)
        if value.is_complex() or (isinstance(weight, torch.Tensor) and weight.is_complex()):
            raise _unaddable(name, value)
        value = value.detach()
        if isinstance(weight, torch.Tensor):
            total, count = self._weigh(name, value, weight.detach())
            if total.is_cpu:
                self._add_number(name, total.item(), 1.0)
                self._host[name][1] += count.item() - 1.0
            else:
                self._sums(name).add(total, count)
            return
        factor = 1.0 if weight is None else float(weight)
        if factor == 0 or value.numel() == 0:
            return
        total = value.sum(dtype=widest_float(value.device)) if value.dim() else value
        if total.is_cpu:
            self._add_number(name, total.item(), factor)
            self._host[name][1] += factor * (value.numel() - 1)
        else:
            # What the host knows stays there: one kernel less.
            self._sums(name).add(total, None, factor)
            self._host.setdefault(name, [0.0, 0.0])[1] += factor * value.numel()

    def _weigh(
        self, name: str, value: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum of weight x value, and of weight, over the elements of `value`, where the tensors lie."""
        try:
            weight = weight.expand_as(value)
        except RuntimeError:
            raise HotloopError(
                f"the weight of the mean {name!r} has shape {list(weight.shape)}, which does not broadcast "
                f"to the value's {list(value.shape)}; give one weight for each element, or one for all"
            ) from None
        where = weight.device if value.is_cpu else value.device
        wide = widest_float(where)
        value = value.to(where, wide, non_blocking=True)
        weight = weight.to(where, wide, non_blocking=True)
        # Not weight * value alone: that is NaN where the value is NaN and the weight 0.
        total = value.masked_fill(weight == 0, 0.0).mul_(weight)
        return (total.sum(), weight.sum()) if value.dim() else (total, weight)

    def _sums(self, name: str) -> _DeviceSums:
        """The device's sums of `name`, made when first needed."""
        sums = self._device.get(name)
        if sums is None:
            sums = self._device[name] = _DeviceSums(self.device)
        return sums

    def _sum_over_ranks(self, name: str, total: float, count: float) -> tuple[float, float]:
        """Sum of both over the ranks, rounded once, so it is the same on every rank and in any order."""
        import torch.distributed as dist

        mark = float(zlib.crc32(name.encode()))
        mine = torch.tensor([total, count, mark], dtype=torch.float64)
        everyone = [torch.empty_like(mine) for _ in range(self.processes.world)]
        dist.all_gather(everyone, mine, group=self._group)
        rows = [row.tolist() for row in everyone]
        other = next((rank for rank, row in enumerate(rows) if row[2] != mark), None)
        if other is not None:
            raise ProcessError(
                f"rank {self.processes.rank} reads the mean {name!r} while rank {other} reads another name; "
                "every rank must read the same names in the same order"
            )
        return _exact_sum([row[0] for row in rows]), _exact_sum([row[1] for row in rows])


class _DeviceSums:
    """Sum and count of one name on the device, each as value and rounding error: `lines` is [2, 2]."""

    def __init__(self, device: torch.device, lines: torch.Tensor | None = None) -> None:
        wide = widest_float(device)
        self._in_pairs = wide is not torch.float64
        # Added to long after, and in another mode than, the moment of this call.
        with torch.inference_mode(False):
            self.lines = torch.zeros(2, 2, dtype=wide, device=device)
            if lines is not None:
                self.lines.copy_(lines)
        (self._total, self._total_rest), (self._count, self._count_rest) = (
            line.unbind() for line in self.lines.unbind()
        )

    def add(self, total: torch.Tensor, count: torch.Tensor | None, factor: float = 1.0) -> None:
        """Add factor x `total` and `count` (one element each; None is 0); one kernel each in float64."""
        total = total.reshape(())
        if not self._in_pairs:
            self._total.add_(total, alpha=factor)
            if count is not None:
                self._count.add_(count.reshape(()))
            return
        _add_pair(self._total, self._total_rest, total.to(self.lines.dtype) * factor)
        if count is not None:
            _add_pair(self._count, self._count_rest, count.reshape(()).to(self.lines.dtype))

    def read(self) -> tuple[float, float]:
        """Sum and count; waits for the device."""
        (total, total_rest), (count, count_rest) = self.lines.tolist()
        return total + total_rest, count + count_rest


def _add_pair(value: torch.Tensor, rest: torch.Tensor, term: torch.Tensor) -> None:
    """`value` + `rest` += `term`, keeping in `rest` what rounding takes from `value` (Knuth's TwoSum)."""
    new = value + term
    back = new - value
    rest.add_((value - (new - back)) + (term - back))
    value.copy_(new)


def _exact_sum(numbers: list[float]) -> float:
    """The sum, rounded once; with a NaN or infinities in it, what plain addition gives."""
    return math.fsum(numbers) if all(map(math.isfinite, numbers)) else sum(numbers)


def _as_tensor(name: str, value: Any) -> torch.Tensor:
    """`value` as a tensor on the CPU."""
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise _unaddable(name, value) from None


def _unaddable(name: str, value: Any) -> HotloopError:
    """The error for a value that has no mean."""
    return HotloopError(
        f"the mean {name!r} was given {type(value).__name__} {value!r:.60}; give real numbers"
    )
