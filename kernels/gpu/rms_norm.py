"""RMS norm of each row: y = x / sqrt(mean(x^2) + eps) * weight, for one token and for prompts.

    x [rows, n] float32 -> y [rows, n] float32 or bfloat16; weight [n] float32

Reads x twice (the second time from a cache) and the weight once, writes y. A row's sum: BLOCK lanes, each over every
BLOCK-th column, then a tree.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nemolab.errors import EngineError
from nemolab.kernels.rms_norm import rms_norm_torch

__all__ = ["rms_norm", "rms_norm_torch"]

_BLOCK = 1024


@triton.jit
def _rms_norm_kernel(x, weight, eps, y, n, BLOCK: tl.constexpr):
    # grid: (rows,)
    row = tl.program_id(0).to(tl.int64) * n
    lane = tl.arange(0, BLOCK)
    squares = tl.zeros([BLOCK], tl.float32)
    for first in range(0, n, BLOCK):
        values = tl.load(x + row + first + lane, mask=first + lane < n, other=0.0)
        squares += values * values
    factor = 1.0 / tl.sqrt_rn(tl.sum(squares, 0) / n + eps)
    for first in range(0, n, BLOCK):
        inside = first + lane < n
        values = tl.load(x + row + first + lane, mask=inside, other=0.0)
        scaled = values * factor * tl.load(weight + first + lane, mask=inside, other=0.0)
        tl.store(y + row + first + lane, scaled.to(y.dtype.element_ty), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, y: torch.Tensor) -> None:
    """x [n] or [rows, n] float32 into y of the same shape, float32 or bfloat16; all contiguous, on one device.

    Raises EngineError for other sizes or types.
    """
    n = x.shape[-1]
    fits = x.dtype == weight.dtype == torch.float32 and y.dtype in (torch.float32, torch.bfloat16)
    if not fits or y.shape != x.shape or weight.shape != (n,) or x.device != y.device or x.device != weight.device:
        raise EngineError(
            f"a norm of {x.dtype} {list(x.shape)} into {y.dtype} {list(y.shape)} with weights {weight.dtype} "
            f"{list(weight.shape)} on {x.device}, {y.device}, {weight.device}"
        )
    if not (x.is_contiguous() and y.is_contiguous()):
        raise EngineError("a norm needs contiguous rows")
    block = min(_BLOCK, triton.next_power_of_2(n))
    _rms_norm_kernel[(x.numel() // n,)](x, weight, eps, y, n, BLOCK=block, num_warps=min(8, max(1, block // 128)))
