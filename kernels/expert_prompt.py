"""Routed experts on the tokens of a prompt, straight from their NVFP4 blocks.

    results[pair] = down(relu(up(x[pair // top_k]))^2)   for every (token, rank) pair of every expert of a batch

An expert's rows are decoded once for all its tokens (at most TOKENS at a time), four rows of up against two tokens in
registers; of down only the neurons that are active for some token are decoded, and each token adds only its own.
Reads every block of the batch once; bounded by arithmetic from a few tokens an expert on.

The order of sums does not depend on which tokens go together, on the layout or on threads:
  up    eight lanes over the row, ascending; scales are multiplied into the decoded row
  down  neurons ascending, active ones only
"""

from __future__ import annotations

import numpy as np
import torch

from nemolab.checkpoint.formats import GROUP
from nemolab.errors import EngineError
from nemolab.jit import jit
from nemolab.kernels import simd
from nemolab.kernels.decode_nvfp4 import decode_rows_torch
from nemolab.kernels.expert_step import LAYOUTS, gather_source, published_down_torch
from nemolab.kernels.team import Team

TOKENS = 64  # tokens of an expert worked on at once
DECODE_COST = 8  # decoding an expert costs about as much as this many tokens on it
_SOURCE = LAYOUTS["source"]
_UNIT = np.float32(simd.E2M1_UNIT * simd.E4M3_UNIT)
_UNWANTED = np.empty((0, 1), np.uint16)


def expert_prompt_torch(
    blocks, planes, layout: str, scales_2, starts, pairs, top_k: int, x, results, active=None
) -> None:
    """The plain twin: decode both matrices of every expert and multiply its tokens.

    blocks  uint8 arrays; planes  block -> its four planes; the other arguments as of `expert_prompt`, as tensors
    """
    for place, (block, (up_2, down_2)) in enumerate(zip(blocks, scales_2.tolist(), strict=True)):
        mine = pairs[starts[place] : starts[place + 1]]
        up_values, up_scales, down_values, down_scales = (torch.from_numpy(plane) for plane in planes(block))
        h = torch.relu(x[mine // top_k] @ decode_rows_torch(up_values, up_scales, up_2).T).square()
        if active is not None:
            bits = 1 << torch.arange(GROUP)
            active[mine] = ((h != 0).unflatten(-1, (-1, GROUP)) * bits).sum(-1).to(active.dtype)
        if layout == "neuron":
            down_values, down_scales = published_down_torch(down_values, down_scales)
        results[mine] = h @ decode_rows_torch(down_values, down_scales, down_2).T


@jit
def _decode_row(values, scales, blocks, out):
    """A row of packed codes times its block scales, sixteen values a block, in units of 2^-22."""
    for block in range(blocks):
        low, high = simd.load_e2m1(values + 8 * block)
        scale = simd.splat(simd.load_one_e4m3(scales + block))
        simd.store_pairs(out + 64 * block, simd.mul(low, scale), simd.mul(high, scale))


@jit
def _decode_neuron(values, scales, blocks, out):
    """A neuron's row of down, whose scales lie one an output, in units of 2^-22."""
    for block in range(blocks):
        low, high = simd.load_e2m1(values + 8 * block)
        even, odd = simd.load_e4m3_pairs(scales + 16 * block)
        simd.store_pairs(out + 64 * block, simd.mul(low, even), simd.mul(high, odd))


@jit
def _dots(rows, width, x, y, factor, h, h_of_y):
    """relu(factor * row . x)^2 for four rows and the tokens at x and y, into h[0:4] and h_of_y[0:4] (addresses)."""
    a, b, c, d = simd.zeros(), simd.zeros(), simd.zeros(), simd.zeros()
    e, f, g, i = simd.zeros(), simd.zeros(), simd.zeros(), simd.zeros()
    step = 4 * width
    for k in range(0, step, 32):
        left, right = simd.load_f32(x + k), simd.load_f32(y + k)
        row = simd.load_f32(rows + k)
        a, e = simd.fma(row, left, a), simd.fma(row, right, e)
        row = simd.load_f32(rows + step + k)
        b, f = simd.fma(row, left, b), simd.fma(row, right, f)
        row = simd.load_f32(rows + 2 * step + k)
        c, g = simd.fma(row, left, c), simd.fma(row, right, g)
        row = simd.load_f32(rows + 3 * step + k)
        d, i = simd.fma(row, left, d), simd.fma(row, right, i)
    for place, (mine, other) in enumerate(((a, e), (b, f), (c, g), (d, i))):
        u = factor * simd.total(mine)
        simd.store_one_f32(h + 4 * place, np.float32(0) if u <= 0 else u * u)
        u = factor * simd.total(other)
        simd.store_one_f32(h_of_y + 4 * place, np.float32(0) if u <= 0 else u * u)


@jit
def _up(block, inter, width, factor, pairs, top_k, x, rows, h):
    """h [tokens, I] of an expert's tokens."""
    groups, count = width // GROUP, pairs.shape[0]
    scales = block + inter * width // 2
    x_at, rows_at, h_at = simd.address_of(x), simd.address_of(rows), simd.address_of(h)
    for neuron in range(0, inter, 4):
        for place in range(4):
            row = neuron + place
            _decode_row(block + row * width // 2, scales + row * groups, groups, rows_at + 4 * place * width)
        for t in range(0, count, 2):
            u = min(t + 1, count - 1)  # an odd last token is its own partner
            _dots(
                rows_at,
                width,
                x_at + 4 * width * (pairs[t] // top_k),
                x_at + 4 * width * (pairs[u] // top_k),
                factor,
                h_at + 4 * (t * inter + neuron),
                h_at + 4 * (u * inter + neuron),
            )


@jit
def _add_neurons(rows, width, neurons, count, heights, y):
    """y += sum over the neurons, ascending, of height * row."""
    for k in range(0, 4 * width, 64):
        a, b = simd.load_f32(y + k), simd.load_f32(y + k + 32)
        for place in range(count):
            row = rows + 4 * width * neurons[place] + k
            height = simd.splat(heights[place])
            a = simd.fma(height, simd.load_f32(row), a)
            b = simd.fma(height, simd.load_f32(row + 32), b)
        simd.store_f32(y + k, a)
        simd.store_f32(y + k + 32, b)


@jit
def _down(block, layout, inter, width, factor, pairs, h, rows, gathered, gathered_scales, y, results, active):
    """The tokens' rows of `results` from their h [tokens, I]; and of `active`, if it has rows."""
    count = pairs.shape[0]
    values = block + inter * width // 2 + inter * width // GROUP
    scales = values + inter * width // 2
    rows_at, y_at = simd.address_of(rows), simd.address_of(y)
    y[:count] = 0
    neurons, heights = np.empty(GROUP, np.int64), np.empty(GROUP, np.float32)
    zero = np.int64(0)  # a plain 0 would be a type of its own, for which every callee is compiled again
    for group in range(inter // GROUP):
        first = group * GROUP
        found = zero
        for place in range(GROUP):
            for t in range(count):
                if h[t, first + place] != 0:
                    neurons[found] = place
                    found += 1
                    break
        if found == 0:
            continue
        scales_at = scales + group * width
        if layout == _SOURCE:
            gather_source(values, scales, inter, group, zero, width, neurons, found, gathered, gathered_scales)
            scales_at = simd.address_of(gathered_scales)
        for place in range(found):
            at = values + (first + neurons[place]) * width // 2
            if layout == _SOURCE:
                at = simd.address_of(gathered) + place * width // 2
            _decode_neuron(at, scales_at, width // GROUP, rows_at + 4 * width * neurons[place])
        for t in range(count):
            found = zero
            for place in range(GROUP):
                if h[t, first + place] != 0:
                    neurons[found], heights[found] = place, h[t, first + place]
                    found += 1
            if active.shape[0]:
                bits = np.uint32(0)
                for a in range(found):
                    bits |= np.uint32(1) << np.uint32(neurons[a])
                active[pairs[t], group] = bits
            if found:
                _add_neurons(rows_at, width, neurons, found, heights, y_at + 4 * width * t)
    for t in range(count):
        for k in range(width):
            results[pairs[t], k] = factor * y[t, k]


@jit
def _prompt_kernel(part, parts, addresses, layout, inter, scales_2, starts, pairs, top_k, x, results, active):
    experts, width = addresses.shape[0], x.shape[1]
    everything = starts[experts] - starts[0] + DECODE_COST * experts
    rows, y = np.empty((GROUP, width), np.float32), np.empty((TOKENS, width), np.float32)
    h = np.empty((TOKENS, inter), np.float32)
    gathered, gathered_scales = np.empty((GROUP, width // 2), np.uint8), np.empty(width, np.uint8)
    for e in range(experts):
        # A part takes neighbouring experts with about its share of the tokens.
        before = starts[e] - starts[0] + DECODE_COST * e
        if before * parts // everything != part:
            continue
        for first in range(starts[e], starts[e + 1], TOKENS):
            mine = pairs[first : min(first + TOKENS, starts[e + 1])]
            block = addresses[e]
            _up(block, inter, width, scales_2[e, 0] * _UNIT, mine, top_k, x, rows, h)
            factor = scales_2[e, 1] * _UNIT
            _down(block, layout, inter, width, factor, mine, h, rows, gathered, gathered_scales, y, results, active)


def expert_prompt(
    team: Team,
    addresses: np.ndarray,
    layout: str,
    inter: int,
    scales_2: np.ndarray,
    starts: np.ndarray,
    pairs: np.ndarray,
    top_k: int,
    x: np.ndarray,
    results: np.ndarray,
    active: np.ndarray | None = None,
) -> None:
    """One batch of experts on all their tokens.

    addresses  int64 [B] of blocks in `layout`; scales_2 float32 [B, 2]
    starts     int64 [B + 1]: pairs[starts[b] : starts[b + 1]] belong to expert b
    pairs      int64: token * top_k + rank
    x          float32 [tokens, X]; results float32 [tokens * top_k, X], the batch's rows are written
    active     uint16 [tokens * top_k, I/16], zeros where it begins: which neurons of each group of 16 were active for
               a pair, lowest neuron in the lowest bit; None: not wanted
    Raises EngineError where sizes do not fit.
    """
    experts, width = addresses.shape[0], x.shape[1]
    if inter % GROUP or width % GROUP or scales_2.shape != (experts, 2) or starts.shape != (experts + 1,):
        raise EngineError(f"{experts} experts [{inter}, {width}] with scales {scales_2.shape}, starts {starts.shape}")
    if results.shape != (x.shape[0] * top_k, width) or not 0 <= starts[0] <= starts[-1] <= pairs.shape[0]:
        raise EngineError(f"results {results.shape} for {x.shape[0]} tokens x {top_k} of width {width}")
    if active is None:
        active = _UNWANTED
    elif active.shape != (x.shape[0] * top_k, inter // GROUP):
        raise EngineError(f"active {active.shape} for {x.shape[0]} tokens x {top_k} of {inter // GROUP} groups")
    work = 4 * inter * width * experts
    team.run(
        _prompt_kernel, work, addresses, LAYOUTS[layout], inter, scales_2, starts, pairs, top_k, x, results, active
    )
