"""Routed experts on the tokens of a prompt, on the card, from a ring of NVFP4 blocks.

    results[place - begin] = scale_2_down * down(relu(scale_2_up * up(x[pairs[place] // top_k]))^2)

for the places begin to end, positions in `pairs`: these (of a token and a rank) lie expert by expert.

    x        bfloat16 [tokens, X]; results float32 [end - begin, X]
    blocks   layout `neuron`, X and I multiples of 16; an address each, of memory on the card: a block is read once
             for every TOKENS, 64 or 128, of its tokens (later out of the cache), so it should cross the bus before

Two launches, with h (the activations, bfloat16 [end - begin, I]) between them. A block's values are decoded to BF16
tiles as code * scale, exactly (two significant bits times four); sums are float32, and the matrices' scales multiply
those. Rounded to BF16 are x and h, nothing else.
Traffic: the blocks; 2 * X bytes a pair and I/NEURONS, 2 * I bytes a pair written and read, 4 * X bytes a pair written.
With many tokens an expert the matrix units bound it, with few the decoding. E2M1 is decoded by bit placing on every
card, also where there is a conversion (sm_100): before an expert is decoded it has crossed the bus, which takes longer.

A pair's sums run over columns (neurons) in steps of K, in the order of the card's matrix unit; they do not depend on
which pairs or experts go together, nor on where a span is cut.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nemolab.checkpoint.formats import GROUP
from nemolab.errors import EngineError
from nemolab.kernels.expert_prompt import expert_prompt_torch
from nemolab.kernels.gpu.codes import card_of, e2m1_of_byte, e4m3
from nemolab.kernels.gpu.launch import check_tensor

__all__ = ["expert_prompt", "expert_prompt_torch"]

_NEURONS, _OUTPUTS, _K = 64, 128, 64


@triton.jit
def _low_high(byte, low_scale, high_scale, CARD: tl.constexpr):
    """Both codes of a uint8 times their scales, as BF16."""
    low, high = e2m1_of_byte(byte, CARD)
    return (low * (low_scale * 16384.0)).to(tl.bfloat16), (high * (high_scale * 16384.0)).to(tl.bfloat16)


@triton.jit
def _add_product(a, b, sums, CARD: tl.constexpr):
    """sums + a b, BF16 in and float32 out; the interpreter cannot multiply BF16, so it gets the same values wider."""
    if CARD == 0:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), sums, input_precision="ieee")
    else:
        return tl.dot(a, b, sums)


@triton.jit
def _tile(ids, starts, begin, end, TOKENS: tl.constexpr):
    """A program's expert, the first place of its tile, and the last + 1 of the expert's in the span."""
    expert = tl.load(ids + tl.program_id(2))
    first = tl.maximum(tl.load(starts + expert), begin) + tl.program_id(1) * TOKENS
    return expert, first, tl.minimum(tl.load(starts + expert + 1), end)


@triton.jit(do_not_specialize=["begin", "end"], do_not_specialize_on_alignment=["addresses", "ids"])
def _up_kernel(
    addresses, ids, scales_2, starts, pairs, begin, end, top_k, x, h, inter, width,
    TOKENS: tl.constexpr, NEURONS: tl.constexpr, K: tl.constexpr, CARD: tl.constexpr,
):  # fmt: skip
    # grid: (cdiv(I, NEURONS), cdiv(most pairs of an expert, TOKENS), experts)
    expert, mine, last = _tile(ids, starts, begin, end, TOKENS)
    if mine < last:
        place = mine + tl.arange(0, TOKENS)
        values = tl.load(addresses + tl.program_id(2)).to(tl.pointer_type(tl.uint8))
        scales = values + inter.to(tl.int64) * (width // 2)
        here = place < last
        token = tl.load(pairs + place, mask=here, other=0) // top_k
        neuron = tl.program_id(0) * NEURONS + tl.arange(0, NEURONS)
        in_inter = neuron < inter
        # Neurons by tokens: a decoded tile goes to the matrix unit as it lies, and x is what is turned.
        sums = tl.zeros([NEURONS, TOKENS], tl.float32)
        for first in range(0, width, K):
            column = first + tl.arange(0, K)
            byte = first // 2 + tl.arange(0, K // 2)
            mask = in_inter[:, None] & (byte < width // 2)[None, :]
            codes = tl.load(values + neuron[:, None] * (width // 2) + byte[None, :], mask=mask, other=0)
            code = tl.load(scales + neuron[:, None] * (width // 16) + (byte // 8)[None, :], mask=mask, other=0)
            scale = e4m3(code, CARD)
            low, high = _low_high(codes, scale, scale, CARD)
            w = tl.reshape(tl.join(low, high), [NEURONS, K])
            at = x + token.to(tl.int64)[None, :] * width + column[:, None]
            tokens = tl.load(at, mask=here[None, :] & (column < width)[:, None], other=0.0)
            sums = _add_product(w, tokens, sums, CARD)
        sums *= tl.load(scales_2 + 2 * expert)
        sums = tl.where(sums <= 0, 0.0, sums * sums)
        row = (place - begin).to(tl.int64)
        at = h + row[None, :] * inter + neuron[:, None]
        tl.store(at, sums.to(tl.bfloat16), mask=here[None, :] & in_inter[:, None])


@triton.jit(do_not_specialize=["begin", "end"], do_not_specialize_on_alignment=["addresses", "ids"])
def _down_kernel(
    addresses, ids, scales_2, starts, begin, end, h, results, inter, width,
    TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, K: tl.constexpr, CARD: tl.constexpr,
):  # fmt: skip
    # grid: (cdiv(X, OUTPUTS), cdiv(most pairs of an expert, TOKENS), experts)
    expert, mine, last = _tile(ids, starts, begin, end, TOKENS)
    if mine < last:
        place = mine + tl.arange(0, TOKENS)
        plane = inter.to(tl.int64) * (width // 2)
        values = tl.load(addresses + tl.program_id(2)).to(tl.pointer_type(tl.uint8)) + plane + plane // 8
        scales = values + plane
        here = place < last
        row = (place - begin).to(tl.int64)
        byte = tl.program_id(0) * (OUTPUTS // 2) + tl.arange(0, OUTPUTS // 2)
        in_width = byte < width // 2
        even = tl.zeros([TOKENS, OUTPUTS // 2], tl.float32)
        odd = tl.zeros([TOKENS, OUTPUTS // 2], tl.float32)
        for first in range(0, inter, K):
            neuron = first + tl.arange(0, K)
            mask = (neuron < inter)[:, None] & in_width[None, :]
            codes = tl.load(values + neuron[:, None] * (width // 2) + byte[None, :], mask=mask, other=0)
            # A group's scales lie one an output: a pair of bytes for the two outputs of a byte of codes.
            at = scales + (neuron // 16)[:, None] * width + 2 * byte[None, :]
            low_scale = e4m3(tl.load(at, mask=mask, other=0), CARD)
            high_scale = e4m3(tl.load(at + 1, mask=mask, other=0), CARD)
            low, high = _low_high(codes, low_scale, high_scale, CARD)
            at = h + row[:, None] * inter + neuron[None, :]
            heights = tl.load(at, mask=here[:, None] & (neuron < inter)[None, :], other=0.0)
            even = _add_product(heights, low, even, CARD)
            odd = _add_product(heights, high, odd, CARD)
        factor = tl.load(scales_2 + 2 * expert + 1)
        at = results + row[:, None] * width + 2 * byte[None, :]
        mask = here[:, None] & in_width[None, :]
        tl.store(at, even * factor, mask=mask)
        tl.store(at + 1, odd * factor, mask=mask)


def expert_prompt(
    addresses: torch.Tensor,
    ids: torch.Tensor,
    inter: int,
    scales_2: torch.Tensor,
    starts: torch.Tensor,
    pairs: torch.Tensor,
    span: tuple[int, int],
    most: int,
    top_k: int,
    x: torch.Tensor,
    h: torch.Tensor,
    results: torch.Tensor,
) -> None:
    """A few experts on those of their tokens that lie in a span of pairs; nothing waits for the card.

    addresses  int64 [B] of blocks in layout `neuron` on the card; ids int32 [B], which experts they are
    scales_2   float32 [E, 2] of all experts
    starts     int32 [E + 1]: pairs[starts[e] : starts[e + 1]] belong to expert e
    pairs      int32: token * top_k + rank
    span       (begin, end): places in `pairs`, all of them of these experts
    most       the largest number of pairs of one expert in it, which the host knows: the launch's size
    x          bfloat16 [tokens, X]
    h, results  bfloat16 [end - begin or more, I], scratch, and float32 [end - begin or more, X], written by place
    Raises EngineError where sizes, types or devices do not fit.
    """
    (begin, end), experts, width = span, addresses.shape[0], x.shape[1]
    wanted = {
        "addresses": (addresses, torch.int64, (experts,)),
        "ids": (ids, torch.int32, (experts,)),
        "scales_2": (scales_2, torch.float32, (starts.shape[0] - 1, 2)),
        "starts": (starts, torch.int32, (starts.numel(),)),
        "pairs": (pairs, torch.int32, (pairs.numel(),)),
        "x": (x, torch.bfloat16, (x.shape[0], width)),
        "h": (h, torch.bfloat16, (h.shape[0], inter)),
        "results": (results, torch.float32, (results.shape[0], width)),
    }
    for name, expected in wanted.items():
        check_tensor("experts on a prompt:", name, *expected, x.device)
    held, count = min(h.shape[0], results.shape[0]), end - begin
    if inter % GROUP or width % GROUP or not 0 <= most <= count <= held or not 0 <= begin <= end <= pairs.numel():
        raise EngineError(
            f"experts [{inter}, {width}] with up to {most} of the pairs {begin} to {end}; there are {pairs.numel()}, "
            f"and scratch for {held}"
        )
    if not most or not experts:
        return
    # A tile is decoded for so many tokens at once; both sizes go through the same instructions, to the same bits.
    tokens = 64 if most <= 64 else 128
    card, tiles = card_of(x.device), triton.cdiv(most, tokens)
    _up_kernel[(triton.cdiv(inter, _NEURONS), tiles, experts)](
        addresses, ids, scales_2, starts, pairs, begin, end, top_k, x, h, inter, width,
        TOKENS=tokens, NEURONS=_NEURONS, K=_K, CARD=card, num_warps=4,
    )  # fmt: skip
    _down_kernel[(triton.cdiv(width, _OUTPUTS), tiles, experts)](
        addresses, ids, scales_2, starts, begin, end, h, results, inter, width,
        TOKENS=tokens, OUTPUTS=_OUTPUTS, K=_K, CARD=card, num_warps=tokens // 16,
    )  # fmt: skip
