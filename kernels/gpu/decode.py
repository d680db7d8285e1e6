"""What a stored byte means, inside Triton kernels: the few bits of a code are placed where a half float keeps its
exponent and mantissa, and the conversion half -> float32 (exact, subnormals too) does the rest.

| format | bits placed                      | value of the half   |
|--------|----------------------------------|---------------------|
| E2M1   | eem -> exponent and mantissa msb | value * 2^-14       |
| E4M3   | eeeemmm, one place to the left   | value * 2^-8        |

The powers of two are folded into a scale by the caller. The same instructions on every card (sm_80 cannot convert E4M3,
nothing before sm_100 E2M1) and in Triton's interpreter, so the same bits everywhere. E4M3's NaN stays NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

E2M1_UNIT = 2.0**14  # undoes the placing
E4M3_UNIT = 2.0**8


@triton.jit
def halves_to_float(pairs):
    """The lower and the upper half float of uint32 words, as float32."""
    low = pairs.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return low, (pairs >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def place_e2m1(words, place: tl.constexpr):
    """The codes in nibbles `place` and `place + 4` (place 0 to 3) of uint32 words, each placed in its half of a uint32.

    Both at once: what one shift brings to the right place in the lower half of a word, it brings there in the upper.
    """
    if place == 3:
        magnitudes = words >> 3
    else:
        magnitudes = words << (9 - 4 * place)
    return (magnitudes & 0x0E000E00) | ((words << (12 - 4 * place)) & 0x80008000)


@triton.jit
def decode_e2m1(words, place: tl.constexpr):
    """The same codes -> two float32, value * 2^-14."""
    return halves_to_float(place_e2m1(words, place))


@triton.jit
def decode_e4m3(codes):
    """E4M3 in the low byte of int32 or uint32 (bits above are ignored) -> float32, value * 2^-8."""
    low = codes & 0x7F
    # 0x7F + 1 carries into bit 7: the exponent of a NaN, and of nothing else, becomes all ones.
    half = (low << 7) | (((low + 1) & 0x80) << 7) | ((codes & 0x80) << 8)
    return half.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
