"""A script for a GPU, real or virtual: lines that wait for it are marked. Not a test itself."""

import torch
import torch.nn.functional as F

x = torch.randn(64, device="cuda")
square = torch.eye(4, device="cuda")
index = torch.arange(3, device="cuda")
mask = x > 0
host = torch.randn(64)
pinned = torch.randn(64).pin_memory()


def lines() -> None:
    x.sum().item()  # waits
    float(x[0])  # waits
    bool(x.sum() > 1e9)  # waits
    x.tolist()  # waits
    x.cpu()  # waits
    x.to("cpu")  # waits
    x.detach().cpu().numpy()  # waits
    f"{x.sum():.3f}"  # waits
    str(x)  # waits
    x[mask]  # waits
    torch.nonzero(x)  # waits
    x.masked_select(mask)  # waits
    torch.where(mask)  # waits
    torch.unique(index)  # waits
    torch.bincount(index)  # waits
    torch.repeat_interleave(x[:3], index)  # waits
    F.one_hot(index)  # waits
    torch.linalg.inv(square)  # waits
    torch.linalg.solve(square, square)  # waits
    torch.tensor([1.0, 2.0], device="cuda")  # waits
    torch.as_tensor([1.0], device="cuda")  # waits
    host.to("cuda")  # waits
    host.cuda(non_blocking=True)  # waits
    x.copy_(host)  # waits
    x[[0, 1]]  # waits
    x[: index[1]]  # waits
    x[0] = 0.0  # waits
    x[index] = 0.0  # waits
    pinned.to("cuda", non_blocking=True)
    x.copy_(pinned, non_blocking=True)
    x[mask] = 0.0
    x[:2] = 0.0
    x.masked_fill_(mask, 0.0)
    x[index]
    x[1:3]
    (x * 2.0).half().float()
    torch.where(mask, x, 0.0)
    torch.full((2,), 3.0, device="cuda")
    torch.randperm(100, device="cuda")
    F.one_hot(index, 5)
    F.cross_entropy(torch.zeros(3, 5, device="cuda"), index)
    x.any()
    x.topk(3)
    torch.nn.utils.clip_grad_norm_([torch.nn.Parameter(x)], 1.0)


lines()
lines()
