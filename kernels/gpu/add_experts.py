"""Adds what routed experts made of a prompt's tokens to their sums, a span of pairs at a time, in a fixed order.

    out[token] += share * results[place - begin]    for the token's places within begin to end, ascending

results  float32 [end - begin, X] as `expert_prompt` leaves it; shares float32 [pairs], by place, a position in them
places   int32 [tokens, K], ascending for each token: pairs lie by expert, so that is ascending expert id
out      float32 [tokens, X]
Traffic: 4 * X bytes a pair read; 8 * X bytes a token that has a place in the span read and written; the places.
One float32 multiply-add a place, one after the other, across spans too: a token's sum does not depend on where the
pairs are cut. No atomics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nemolab.errors import EngineError
from nemolab.kernels.gpu.launch import check_tensor

_BLOCK = 1024  # columns a program


def add_experts_torch(results: torch.Tensor, span: tuple[int, int], places, shares, out: torch.Tensor) -> None:
    """The plain twin."""
    begin, end = span
    for column in places.long().unbind(1):
        mine = ((column >= begin) & (column < end)).nonzero()[:, 0]
        at = column[mine]
        out[mine] += shares[at, None] * results[at - begin]


@triton.jit(do_not_specialize=["begin", "end"])
def _add_kernel(results, begin, end, places, shares, out, width, K: tl.constexpr, BLOCK: tl.constexpr):
    # grid: (tokens, cdiv(X, BLOCK))
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    first = places + token * K
    # Most spans have nothing for most tokens of a long prompt: its least and largest place tell.
    if (tl.load(first) < end) & (tl.load(first + K - 1) >= begin):
        total = tl.load(out + token * width + column, mask=inside, other=0.0)
        for rank in range(K):
            place = tl.load(first + rank)
            mine = (place >= begin) & (place < end)
            share = tl.load(shares + place, mask=mine, other=0.0)
            row = (place - begin).to(tl.int64) * width
            values = tl.load(results + row + column, mask=inside & mine, other=0.0)
            total = tl.where(mine, tl.fma(values, tl.zeros_like(values) + share, total), total)
        tl.store(out + token * width + column, total, mask=inside)


def add_experts(
    results: torch.Tensor, span: tuple[int, int], places: torch.Tensor, shares: torch.Tensor, out: torch.Tensor
) -> None:
    """Add the span (begin, end) of places; see the file's contract. All contiguous and on one device.

    Raises EngineError where sizes, types or devices do not fit.
    """
    (begin, end), (tokens, width) = span, out.shape
    wanted = {
        "results": (results, torch.float32, (results.shape[0], width)),
        "places": (places, torch.int32, (tokens, places.shape[-1])),
        "shares": (shares, torch.float32, (places.numel(),)),
        "out": (out, torch.float32, (tokens, width)),
    }
    for name, expected in wanted.items():
        check_tensor("adding experts:", name, *expected, out.device)
    if not 0 <= begin <= end <= places.numel() or end - begin > results.shape[0]:
        raise EngineError(f"adding experts: places {begin} to {end} of {places.numel()}, {results.shape[0]} results")
    if begin == end:
        return
    block = min(_BLOCK, triton.next_power_of_2(width))
    _add_kernel[(tokens, triton.cdiv(width, block))](
        results, begin, end, places, shares, out, width,
        K=places.shape[1], BLOCK=block, num_warps=max(1, min(4, block // 256)),
    )  # fmt: skip
