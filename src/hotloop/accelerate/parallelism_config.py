"""How ranks divide the work: replicas of the whole model, which is what there is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hotloop.accelerate.unsupported import refuse

__all__ = ["ParallelismConfig"]


@dataclass
class ParallelismConfig:
    """Degrees of parallelism; all but `dp_replicate_size` have to be 1.

    Raises:
        UnsupportedError: another degree is above 1.
    """

    dp_replicate_size: int = 1
    dp_shard_size: int = 1
    tp_size: int = 1
    cp_size: int = 1
    sp_size: int = 1
    cp_backend: str = "torch"
    cp_handler: Any = None
    tp_handler: Any = None
    sp_backend: str = "deepspeed"
    sp_handler: Any = None
    device_mesh: Any = None

    def __post_init__(self) -> None:
        for name in ("dp_shard_size", "tp_size", "cp_size", "sp_size"):
            if (getattr(self, name) or 1) > 1:
                refuse(
                    f"ParallelismConfig({name}={getattr(self, name)})",
                    "only replicas (dp_replicate_size) are built",
                )

    @property
    def total_size(self) -> int:
        """Ranks that the degrees make together."""
        return self.dp_replicate_size

    @property
    def non_data_parallel_size(self) -> int:
        """Ranks that share one batch: 1."""
        return 1

    @property
    def dp_enabled(self) -> bool:
        """Whether there is more than one replica."""
        return self.dp_replicate_size > 1

    dp_shard_enabled = fsdp_enabled = tp_enabled = cp_enabled = sp_enabled = False
