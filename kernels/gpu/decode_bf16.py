"""NVFP4 and FP8 -> BF16 on the card, for prompts: a matrix is decoded once, torch multiplies it with many tokens.

    nvfp4  packed [rows, columns / 2], scales [rows, columns / 16] -> bfloat16 [rows, columns], without scale_2
    fp8    [rows, columns] -> bfloat16 [rows, columns], without its scale

Exact: an E2M1 code has two significant bits and an E4M3 scale four, so their product fits into the eight of BF16; the
matrix's own scale is left to the product (`linear_prompt` hands it to the multiplication as its factor).
Traffic: 9/16 or 1 byte read and 2 bytes written a value; bounded by the writes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nemolab.checkpoint.formats import GROUP, decode_fp8, decode_nvfp4
from nemolab.errors import EngineError
from nemolab.kernels.gpu.codes import card_of, e2m1_of_word, e2m1_unit, e4m3, e4m3_of_word, e4m3_unit

_PLACES = 512  # of eight bytes, a program


def decode_bf16_torch(weight: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """The plain twin: the one that reads checkpoints, with a scale of 1 for the matrix."""
    decoded = decode_fp8(weight, 1.0) if scales is None else decode_nvfp4(weight, scales, 1.0)
    return decoded.to(torch.bfloat16)


@triton.jit
def _pair(a, b):
    """Two float32 as BF16 in one uint32, a in the lower half. Exact values only: the lower 16 bits are cut off."""
    return (a.to(tl.uint32, bitcast=True) >> 16) | (b.to(tl.uint32, bitcast=True) & 0xFFFF0000)


@triton.jit
def _two_pairs(a, b, c, d):
    """Four float32 as BF16 in one int64."""
    return (_pair(c, d).to(tl.int64) << 32) | _pair(a, b).to(tl.int64)


@triton.jit
def _decode_kernel(words, scales, out, places, NVFP4: tl.constexpr, CARD: tl.constexpr, PLACES: tl.constexpr):
    # grid: (cdiv(places, PLACES),); words and out as int64: eight bytes in, 32 (NVFP4) or 16 out
    first = tl.program_id(0).to(tl.int64) * PLACES
    place = first + tl.arange(0, PLACES)
    inside = place < places
    word = tl.load(words + place, mask=inside, other=0)
    low, high = word.to(tl.uint32), (word >> 32).to(tl.uint32)
    if NVFP4:
        factor = e4m3(tl.load(scales + place, mask=inside, other=0), CARD) * e2m1_unit(CARD)
        a, b, c, d, e, f, g, h = e2m1_of_word(low, CARD)
        q0 = _two_pairs(a * factor, b * factor, c * factor, d * factor)
        q1 = _two_pairs(e * factor, f * factor, g * factor, h * factor)
        a, b, c, d, e, f, g, h = e2m1_of_word(high, CARD)
        q2 = _two_pairs(a * factor, b * factor, c * factor, d * factor)
        q3 = _two_pairs(e * factor, f * factor, g * factor, h * factor)
        # Side by side, so that a lane writes what it made as one piece.
        made = tl.reshape(tl.join(tl.join(q0, q2), tl.join(q1, q3)), [4 * PLACES])
        at = 4 * first + tl.arange(0, 4 * PLACES)
        tl.store(out + at, made, mask=at < 4 * places)
    else:
        unit = e4m3_unit(CARD)
        a, b, c, d = e4m3_of_word(low, CARD)
        e, f, g, h = e4m3_of_word(high, CARD)
        q0 = _two_pairs(a * unit, b * unit, c * unit, d * unit)
        q1 = _two_pairs(e * unit, f * unit, g * unit, h * unit)
        at = 2 * first + tl.arange(0, 2 * PLACES)
        tl.store(out + at, tl.reshape(tl.join(q0, q1), [2 * PLACES]), mask=at < 2 * places)


def decode_bf16(weight: torch.Tensor, scales: torch.Tensor | None, out: torch.Tensor) -> None:
    """A stored matrix, or whole rows of one, into `out` bfloat16 [rows, columns].

    weight  FP8 (one byte a value) [rows, columns], scales None; or packed NVFP4 [rows, columns / 2] with its scales
    Raises EngineError for other sizes or devices and where the values do not fill whole 8 bytes.
    """
    rows, columns = out.shape
    packed = scales is not None
    wanted = (rows, columns // 2) if packed else (rows, columns)
    fits = weight.element_size() == 1 and tuple(weight.shape) == wanted and out.dtype == torch.bfloat16
    if packed:
        fits = fits and columns % GROUP == 0 and tuple(scales.shape) == (rows, columns // GROUP)
        fits = fits and scales.element_size() == 1
    tensors = [t for t in (weight, scales, out) if t is not None]
    if not fits or len({t.device for t in tensors}) > 1 or not all(t.is_contiguous() for t in tensors):
        found = [f"{t.dtype} {list(t.shape)} on {t.device}" for t in tensors]
        raise EngineError(f"to decode {', '.join(found)}: contiguous bytes of one matrix on one device are needed")
    if weight.numel() % 8 or weight.data_ptr() % 8 or out.data_ptr() % 8:
        raise EngineError(f"{weight.numel()} bytes at {weight.data_ptr():#x} are no whole 8 bytes")
    places = weight.numel() // 8
    _decode_kernel[(triton.cdiv(places, _PLACES),)](
        weight.view(torch.uint8).flatten().view(torch.int64),
        weight if scales is None else scales.view(torch.uint8),
        out.flatten().view(torch.int64),
        places,
        NVFP4=packed, CARD=card_of(out.device), PLACES=_PLACES, num_warps=4,
    )  # fmt: skip
