"""Windows of consecutive rows cut out of one resident array, normalised and cast on the way.

A window is one stretch of memory, so the kernel reads and writes whole lines; the eager twin gathers from a strided
view, and gives the same bits.
"""

from __future__ import annotations

import torch

__all__ = ["cut_windows", "cut_windows_eager"]


def cut_windows(
    data: torch.Tensor,
    starts: torch.Tensor,
    length: int,
    *,
    mean: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    eager: bool = False,
) -> torch.Tensor:
    """`data[s : s + length]` for each s of `starts`.

    Args:
        data: [N, F] of a float type, contiguous; float32 is what it is computed in.
        starts: int64 [B] on the same device, each at most N - length (not checked: that would wait for the device).
        mean, scale: float32 [F]; the result is (x - mean) * scale. Both or none.
        dtype: of the result; data's own by default.
        eager: use the twin; it is used anyway where Triton runs no programs.

    Returns:
        [B, length, F].
    """
    if eager or not _runs_on(data.device):
        return cut_windows_eager(data, starts, length, mean=mean, scale=scale, dtype=dtype)
    from hotloop.kernels.programs.windows import windows_kernel

    B, F = len(starts), data.shape[1]
    out = torch.empty((B, length, F), device=data.device, dtype=dtype or data.dtype)
    block = 1024
    normal = mean is not None and scale is not None
    windows_kernel[(B, -(-(length * F) // block))](
        data, starts, mean if normal else data, scale if normal else data, out, length * F, F, normal, block,
        enable_fp_fusion=False,
    )  # fmt: skip
    return out


def cut_windows_eager(
    data: torch.Tensor,
    starts: torch.Tensor,
    length: int,
    *,
    mean: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`cut_windows` in torch's own operations, to the bit."""
    N, F = data.shape
    found = data.as_strided((max(N - length + 1, 0), length, F), (F, F, 1), data.storage_offset())[starts]
    if mean is not None and scale is not None:
        found = (found.float() - mean) * scale
    return found.to(dtype or data.dtype)


def _runs_on(device: torch.device) -> bool:
    from hotloop.kernels.language import runs_on  # loads Triton

    return runs_on(device)
