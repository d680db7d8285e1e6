"""RMS norm of each row: y = x / sqrt(mean(x^2) + eps) * weight, for one token and for prompts.

    x [rows, n] float32 -> y [rows, n] float32 or bfloat16; weight [n] float32

For Mamba mixers in equal groups of columns, each with a mean of its own, and of x * silu(gate), the gate of x's shape.
Reads x (and the gate) twice, the second time from a cache, and the weight once; writes y. The sum of a row, or of a
group of it: BLOCK columns of an accumulator, each over every BLOCK-th column, then a tree.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nemolab.kernels.gpu.launch import check_tensor
from nemolab.kernels.rms_norm import rms_norm_torch

__all__ = ["launch_norm", "rms_norm", "rms_norm_torch", "silu"]

_BLOCK = 1024


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _load(x, gate, at, inside, GATED: tl.constexpr):
    values = tl.load(x + at, mask=inside, other=0.0)
    if GATED:
        values *= silu(tl.load(gate + at, mask=inside, other=0.0))
    return values


@triton.jit
def _rms_norm_kernel(x, gate, weight, eps, y, width, GATED: tl.constexpr, BLOCK: tl.constexpr):
    # grid: (rows, groups); width of a group
    column = tl.program_id(1) * width
    start = tl.program_id(0).to(tl.int64) * tl.num_programs(1) * width + column
    place = tl.arange(0, BLOCK)
    squares = tl.zeros([BLOCK], tl.float32)
    for first in range(0, width, BLOCK):
        values = _load(x, gate, start + first + place, first + place < width, GATED)
        squares += values * values
    factor = 1.0 / tl.sqrt_rn(tl.sum(squares, 0) / width + eps)
    for first in range(0, width, BLOCK):
        inside = first + place < width
        values = _load(x, gate, start + first + place, inside, GATED)
        scaled = values * factor * tl.load(weight + column + first + place, mask=inside, other=0.0)
        tl.store(y + start + first + place, scaled.to(y.dtype.element_ty), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, y: torch.Tensor) -> None:
    """x [n] or [rows, n] float32 into y of the same shape, float32 or bfloat16; all contiguous, on one device.

    Raises EngineError for other sizes or types.
    """
    result = torch.bfloat16 if y.dtype == torch.bfloat16 else torch.float32
    check_tensor("a norm's", "x", x, torch.float32, tuple(x.shape), x.device)
    check_tensor("a norm's", "weight", weight, torch.float32, (x.shape[-1],), x.device)
    check_tensor("a norm's", "y", y, result, tuple(x.shape), x.device)
    launch_norm(x, weight, eps, y)


def launch_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, y: torch.Tensor, gate: torch.Tensor | None = None, groups=1
) -> None:
    """The norm, gated and in groups where asked for, of what the caller has checked: see the file's contract."""
    n = weight.shape[0]
    block = min(_BLOCK, triton.next_power_of_2(n // groups))
    _rms_norm_kernel[(x.numel() // n, groups)](
        x, x if gate is None else gate, weight, eps, y, n // groups,
        GATED=gate is not None, BLOCK=block, num_warps=min(8, max(1, block // 128)),
    )  # fmt: skip
