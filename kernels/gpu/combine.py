"""The token's output from the experts' partial sums, in a fixed order.

out [X] = sum over ranks k of weight_k * scale_2_k * (sum over parts of partial[k, part])

partial float32 [K, P, X] as `expert_step` leaves it (output 8 * w + p stands at p * X/8 + w); weights float32 [K];
ids int32 [K]; scales_2 float32 [E, 2], down's in column 1; out float32 [X].
Traffic: 4 * K * P * X bytes read, written just before and mostly still in the L2 cache.
For each part and output the ranks are added in order, then the parts as a fixed tree: no atomics.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from nemolab.errors import EngineError
from nemolab.kernels.gpu.decode import E2M1_UNIT, E4M3_UNIT
from nemolab.kernels.gpu.launch import Prepared, check_tensor

_BLOCK = 16  # outputs a program: 64 bytes of each row of partial sums
_DOWN_UNIT = E2M1_UNIT * E4M3_UNIT


def combine_torch(partial: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, scales_2: torch.Tensor):
    """The plain twin; `partial` as the kernel has it, out in natural order."""
    factors = weights * (scales_2[ids.long(), 1] * _DOWN_UNIT)
    total = (partial * factors[:, None, None]).sum((0, 1))
    return total.unflatten(0, (8, -1)).T.flatten()


@triton.jit(do_not_specialize_on_alignment=["weights", "ids", "scales_2", "out"])
def _combine_kernel(
    partial,
    weights,
    ids,
    scales_2,
    out,
    RANKS: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS_2: tl.constexpr,
    BLOCK: tl.constexpr,
    DOWN_UNIT: tl.constexpr,
):
    # grid: (cdiv(WIDTH, BLOCK),)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    part = tl.arange(0, PARTS_2)
    inside = (part < PARTS)[:, None] & (column < WIDTH)[None, :]
    at = partial + part[:, None] * WIDTH + column[None, :]
    total = tl.zeros([PARTS_2, BLOCK], tl.float32)
    for rank in tl.static_range(RANKS):
        factor = tl.load(weights + rank) * (tl.load(scales_2 + 2 * tl.load(ids + rank).to(tl.int64) + 1) * DOWN_UNIT)
        total += tl.load(at + rank * PARTS * WIDTH, mask=inside, other=0.0) * factor
    output = column % (WIDTH // 8) * 8 + column // (WIDTH // 8)
    tl.store(out + output, tl.sum(total, 0), mask=column < WIDTH)


class Combine:
    """The sum for one shape: `ranks` K, `parts` P and `width` X, a multiple of 8, or it raises EngineError."""

    def __init__(self, ranks: int, parts: int, width: int):
        if width % 8:
            raise EngineError(f"combine: {width} outputs; a multiple of 8 is needed")
        self.shape = (ranks, parts, width)
        parts_2 = triton.next_power_of_2(parts)
        constants = {
            "RANKS": ranks,
            "PARTS": parts,
            "WIDTH": width,
            "PARTS_2": parts_2,
            "BLOCK": _BLOCK,
            "DOWN_UNIT": _DOWN_UNIT,
        }
        self._kernel = Prepared(_combine_kernel, constants, num_warps=max(1, min(8, parts_2 * _BLOCK // 128)))
        self._grid = (triton.cdiv(width, _BLOCK),)

    def bind(
        self, partial: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, scales_2: torch.Tensor, out: torch.Tensor
    ) -> Callable[[], None]:
        """The sum on these buffers, checked once: a function that launches it on torch's current stream.

        All on one device and contiguous. Raises EngineError where shapes or types do not fit.
        """
        ranks, _, width = self.shape
        wanted = {
            "partial": (partial, torch.float32, self.shape),
            "weights": (weights, torch.float32, (ranks,)),
            "ids": (ids, torch.int32, (ranks,)),
            "scales_2": (scales_2, torch.float32, (scales_2.shape[0], 2)),
            "out": (out, torch.float32, (width,)),
        }
        for name, expected in wanted.items():
            check_tensor("combine's", name, *expected, out.device)
        if partial.data_ptr() % 16:
            raise EngineError(f"combine's partial sums at {partial.data_ptr():#x}: a multiple of 16 is needed")
        tensors = [partial, weights, ids, scales_2, out]
        values = [t.data_ptr() for t in tensors]

        def launch() -> None:
            if self._kernel.ready:
                self._kernel.launch(self._grid, values, torch.cuda.current_stream().cuda_stream)
            else:
                self._kernel(self._grid, tensors)

        return launch
