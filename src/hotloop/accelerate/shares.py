"""One rank's part of a list, tensor or dataset."""

from __future__ import annotations

from typing import Any

import torch

from hotloop.errors import SettingError

__all__ = ["split_share"]


def split_share(inputs: Any, world: int, rank: int, device: torch.device, apply_padding: bool) -> Any:
    """This rank's part of `inputs`; see `PartialState.split_between_processes`."""
    if world == 1:
        return inputs
    length = len(inputs)
    if isinstance(inputs, dict):
        lengths = {len(value) for value in inputs.values()}
        if len(lengths) != 1:
            raise SettingError(
                f"All values in the dictionary must have the same length, not {sorted(lengths)}"
            )
        length = lengths.pop()
    share, extras = divmod(length, world)
    start = rank * share + min(rank, extras)
    stop = start + share + (rank < extras)
    wanted = share + (extras > 0) if apply_padding else stop - start

    def take(values: Any) -> Any:
        if isinstance(values, dict):
            return {key: take(part) for key, part in values.items()}
        if isinstance(values, torch.Tensor):
            if not apply_padding:
                return values[start:stop]
            part, last = values[start:stop].to(device), values[-1:].to(device)
            return torch.cat([part, last.expand(wanted - len(part), *last.shape[1:])])
        if isinstance(values, list | tuple):
            mine = list(values[start:stop])
            mine += [values[-1]] * (wanted - len(mine))
            return tuple(mine) if isinstance(values, tuple) else mine
        if hasattr(values, "select"):  # a datasets.Dataset
            rows = list(range(start, stop))
            return values.select(rows + [length - 1] * (wanted - len(rows)))
        return values

    return take(inputs)
