"""Reads memory and adds it up, nothing else: the in-place streaming bandwidth, the floor under kernels that pull.

sums [programs] = the sums of `words` int32 words at `address`, shared out among the programs; wraps around
Traffic: 4 * words bytes read, in 16-byte loads of neighbouring lanes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nemolab.errors import EngineError


def stream_torch(words: torch.Tensor) -> torch.Tensor:
    """The plain twin: the sum of int32 words, modulo 2^32."""
    return words.sum(dtype=torch.int64).to(torch.int32)


@triton.jit
def _stream_kernel(address, words, sums, BLOCK: tl.constexpr, LOADS: tl.constexpr):
    # Program p takes blocks p, p + programs, p + 2 * programs, ...; LOADS of them before it adds any up.
    base = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16)
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int32)
    programs = tl.num_programs(0).to(tl.int64)
    step = programs * BLOCK
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, words, step * LOADS):
        for load in tl.static_range(LOADS):
            at = start + load * step + lane
            total += tl.load(base + at, mask=at < words, other=0)
    tl.store(sums + tl.program_id(0), tl.sum(total.to(tl.int64), 0).to(tl.int32))


def stream(address: int, words: int, sums: torch.Tensor, block: int = 1024, loads: int = 4, num_warps: int = 4) -> None:
    """Read `words` int32 words at a 16-byte aligned address; a program for each entry of `sums` (int32).

    Raises EngineError where they do not fit.
    """
    if address % 16 or words <= 0 or words % 4 or sums.dtype != torch.int32 or not sums.is_contiguous():
        raise EngineError(f"stream: {words} words at address {address} % 16 = {address % 16}, sums {sums.dtype}")
    _stream_kernel[(sums.numel(),)](address, words, sums, BLOCK=block, LOADS=loads, num_warps=num_warps)
