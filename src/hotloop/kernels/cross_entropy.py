"""Cross-entropy of a linear layer's outputs, a piece at a time: head and loss of a language model."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from hotloop.errors import KernelError

__all__ = ["cross_entropy_eager", "linear_cross_entropy"]

# Logits held at a time. Smaller chunks repeat the pass over the weight's gradient, larger ones save nothing more.
_CHUNK_BYTES = 256 << 20


def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    chunk_bytes: int = _CHUNK_BYTES,
) -> torch.Tensor:
    """`F.cross_entropy(F.linear(x, weight, bias).float(), targets)` in pieces of rows, gradients made on the way.

    The logits [N, V] are never held at once: at most `chunk_bytes` of them, in the type of `x` (bfloat16 under
    autocast). Under "mean" and "sum" each piece of logits is turned into its gradient in place and multiplied with
    the weight and `x` straight away, so backward only scales what is there: memory N * D + V * D numbers instead of
    several times N * V. Under "none" backward computes the logits again.

    Args:
        x: [..., D] floating point.
        weight: [V, D]. bias: [V] or None.
        targets: [...] int64, class numbers or `ignore_index`.
        label_smoothing: as in `F.cross_entropy`.
        reduction: "mean" (over targets that are not ignored), "sum" or "none".
        chunk_bytes: the most bytes of logits at a time.

    Returns:
        float32 0-d, or [...] under "none" (float64 for float64 inputs). NaN where nothing is counted under "mean".
    """
    if reduction not in ("mean", "sum", "none"):
        raise KernelError(
            f'linear_cross_entropy: reduction={reduction!r}; it is one of "mean", "sum", "none"'
        )
    if x.shape[:-1] != targets.shape or x.shape[-1] != weight.shape[-1]:
        raise KernelError(
            f"linear_cross_entropy: x {tuple(x.shape)}, weight {tuple(weight.shape)} and targets "
            f"{tuple(targets.shape)} do not fit: x is [..., D], weight [V, D], targets [...]"
        )
    if targets.dtype != torch.int64:
        raise KernelError(
            f"linear_cross_entropy: targets are {targets.dtype}, class numbers have to be int64: targets.long()"
        )
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    rows = x.reshape(-1, x.shape[-1])
    wanted = targets.reshape(-1)
    learning = torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    )
    if reduction == "none":
        losses: torch.Tensor = _rows(rows, weight, bias, wanted, label_smoothing, ignore_index, chunk_bytes)
        return losses.view(targets.shape)
    loss: torch.Tensor = _reduced(
        rows, weight, bias, wanted, label_smoothing, ignore_index, reduction == "mean", learning, chunk_bytes
    )[0]
    return loss


def cross_entropy_eager(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> torch.Tensor:
    """The twin of `linear_cross_entropy` by torch's own functions, holding all logits; see there."""
    logits = F.linear(x, weight, bias)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    losses = F.cross_entropy(
        logits.flatten(0, -2),
        targets.flatten(),
        reduction=reduction,
        label_smoothing=label_smoothing,
        ignore_index=ignore_index,
    )
    return losses.view(targets.shape) if reduction == "none" else losses


def _turn(
    logits: torch.Tensor,
    targets: torch.Tensor,
    losses: torch.Tensor,
    scales: torch.Tensor | None,
    smoothing: float,
    ignore_index: int,
) -> None:
    """Write the rows' losses; with `scales` (0-d, or one a row) turn `logits` [n, V] into gradients, in place."""
    from hotloop.kernels.language import runs_on

    count, classes = logits.shape
    if runs_on(logits.device) and logits.dtype != torch.float64:
        from hotloop.kernels.language import triton
        from hotloop.kernels.programs.softmax import cross_entropy

        columns = min(4096, triton.next_power_of_2(classes))
        rows = max(1, min(16, 2048 // columns))
        cross_entropy[(triton.cdiv(count, rows),)](
            logits,
            targets,
            losses,
            losses if scales is None else scales,
            count,
            classes,
            logits.stride(0),
            ignore_index,
            smoothing,
            with_gradient=scales is not None,
            each_row_scaled=scales is not None and scales.dim() == 1,
            rows=rows,
            columns=columns,
            num_warps=8 if rows * columns >= 4096 else 4,
        )
        return
    z = logits if logits.dtype == torch.float64 else logits.float()
    counted = targets != ignore_index
    safe = targets.where(counted, 0)
    log_p = torch.log_softmax(z, 1)
    loss = -(1.0 - smoothing) * log_p.gather(1, safe[:, None])[:, 0] - smoothing * log_p.mean(1)
    losses.copy_(loss.where(counted, 0.0))
    if scales is not None:
        slope = log_p.exp() - smoothing / classes
        slope.scatter_add_(1, safe[:, None], torch.full_like(slope[:, :1], smoothing - 1.0))
        factor = scales.to(z.dtype).expand(count)
        logits.copy_((slope * factor[:, None]).where(counted[:, None], 0.0))


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _pieces(x: torch.Tensor, weight: torch.Tensor, chunk_bytes: int) -> int:
    """Rows at a time: pieces of equal size, none above `chunk_bytes` of logits."""
    rows = max(1, chunk_bytes // max(1, weight.shape[0] * x.element_size()))
    pieces = max(1, -(-x.shape[0] // rows))
    return max(1, -(-x.shape[0] // pieces))


@torch.library.custom_op("hotloop::linear_cross_entropy", mutates_args=())
def _reduced(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    smoothing: float,
    ignore_index: int,
    mean: bool,
    learning: bool,
    chunk_bytes: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    wide = _wide(x)
    scale = torch.ones((), dtype=wide, device=x.device)
    if mean:
        scale = (targets != ignore_index).sum().to(wide).reciprocal()
    losses = torch.empty(x.shape[0], dtype=wide, device=x.device)
    step = _pieces(x, weight, chunk_bytes)
    once = 0 < x.shape[0] <= step
    grad_x = torch.empty_like(x) if learning else x.new_empty(0)
    grad_w = weight.new_zeros(weight.shape, dtype=wide) if learning and not once else x.new_empty(0)
    grad_b = x.new_zeros(weight.shape[0], dtype=wide) if learning and bias is not None else x.new_empty(0)
    for start in range(0, x.shape[0], step):
        part = slice(start, start + step)
        logits = F.linear(x[part], weight, bias)
        _turn(logits, targets[part], losses[part], scale if learning else None, smoothing, ignore_index)
        if learning:
            torch.mm(logits, weight, out=grad_x[part])
            if once:
                grad_w = logits.t() @ x
            else:
                grad_w += logits.t() @ x[part]
            if bias is not None:
                grad_b += logits.sum(0, dtype=wide)
    loss = losses.sum() * scale
    return loss, grad_x, grad_w.to(weight.dtype), grad_b.to(x.dtype)


@_reduced.register_fake
def _(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    smoothing: float,
    ignore_index: int,
    mean: bool,
    learning: bool,
    chunk_bytes: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    loss = x.new_empty((), dtype=_wide(x))
    if not learning:
        return loss, x.new_empty(0), x.new_empty(0), x.new_empty(0)
    grad_b = x.new_empty(weight.shape[0] if bias is not None else 0)
    return loss, torch.empty_like(x), torch.empty_like(weight), grad_b


def _keep_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.with_bias = inputs[2] is not None
    ctx.save_for_backward(*output[1:])


def _scale(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[Any, ...]:
    grad_x, grad_w, grad_b = ctx.saved_tensors
    scaled = [
        (g * grad.to(g.dtype)) if need else None
        for g, need in zip((grad_x, grad_w, grad_b), (*ctx.needs_input_grad[:2], ctx.with_bias), strict=True)
    ]
    return (*scaled, None, None, None, None, None, None)


_reduced.register_autograd(_scale, setup_context=_keep_gradients)


@torch.library.custom_op("hotloop::linear_cross_entropy_rows", mutates_args=())
def _rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    smoothing: float,
    ignore_index: int,
    chunk_bytes: int,
) -> torch.Tensor:
    losses = torch.empty(x.shape[0], dtype=_wide(x), device=x.device)
    step = _pieces(x, weight, chunk_bytes)
    for start in range(0, x.shape[0], step):
        part = slice(start, start + step)
        logits = F.linear(x[part], weight, bias)
        _turn(logits, targets[part], losses[part], None, smoothing, ignore_index)
    return losses


@_rows.register_fake
def _(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    smoothing: float,
    ignore_index: int,
    chunk_bytes: int,
) -> torch.Tensor:
    return x.new_empty(x.shape[0], dtype=_wide(x))


@torch.library.custom_op("hotloop::linear_cross_entropy_rows_backward", mutates_args=())
def _rows_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    smoothing: float,
    ignore_index: int,
    chunk_bytes: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    wide = _wide(x)
    losses = torch.empty(x.shape[0], dtype=wide, device=x.device)
    grad_x = torch.empty_like(x)
    grad_w = weight.new_zeros(weight.shape, dtype=wide)
    grad_b = x.new_zeros(weight.shape[0] if bias is not None else 0, dtype=wide)
    step = _pieces(x, weight, chunk_bytes)
    grad = grad.contiguous()
    for start in range(0, x.shape[0], step):
        part = slice(start, start + step)
        logits = F.linear(x[part], weight, bias)
        _turn(logits, targets[part], losses[part], grad[part], smoothing, ignore_index)
        torch.mm(logits, weight, out=grad_x[part])
        grad_w += logits.t() @ x[part]
        if bias is not None:
            grad_b += logits.sum(0, dtype=wide)
    return grad_x, grad_w.to(weight.dtype), grad_b.to(x.dtype)


@_rows_backward.register_fake
def _(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    smoothing: float,
    ignore_index: int,
    chunk_bytes: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.empty_like(x),
        torch.empty_like(weight),
        x.new_empty(weight.shape[0] if bias is not None else 0),
    )


def _remember(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, bias, targets, *ctx.rest = inputs
    ctx.save_for_backward(x, weight, bias, targets)


def _go_back(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    x, weight, bias, targets = ctx.saved_tensors
    grad_x, grad_w, grad_b = _rows_backward(grad, x, weight, bias, targets, *ctx.rest)
    return (grad_x, grad_w, grad_b if bias is not None else None, None, None, None, None)


_rows.register_autograd(_go_back, setup_context=_remember)
