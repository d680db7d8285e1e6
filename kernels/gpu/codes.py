"""What whole words of stored codes are worth, inside Triton kernels that multiply faster than they can decode.

Portable: the bit placing of `decode`, two codes a register at a time, which halves its integer instructions.
Hardware: conversions of two codes an instruction, E4M3 from sm_89 on, E2M1 from sm_100 on; their unit is 1.
Which of them a launcher takes is a constexpr. Results do not depend on it: all units are powers of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nemolab.errors import EngineError
from nemolab.kernels.gpu.decode import decode_e4m3, halves_to_float, place_e2m1

# How codes are decoded: the constexpr CARD of every kernel that decodes. A later one can do all that those before can.
PLAIN_TRITON, SM_80, SM_89, SM_100 = 0, 1, 2, 3


def card_of(device: torch.device) -> int:
    """Which instructions kernels on this device may use; a CPU (Triton's interpreter) has none of its own."""
    if device.type != "cuda":
        return PLAIN_TRITON
    return card_of_capability(torch.cuda.get_device_capability(device))


def card_of_capability(capability: tuple[int, int]) -> int:
    """The same from a compute capability. Raises EngineError below 8.0: no BF16 there."""
    if capability < (8, 0):
        raise EngineError(f"a card of compute capability {capability[0]}.{capability[1]}; 8.0 or newer is needed")
    if capability >= (10, 0):
        return SM_100
    return SM_89 if capability >= (8, 9) else SM_80


@triton.jit
def halves(pair, CARD: tl.constexpr):
    """The lower and the upper half float of a uint32, as float32."""
    if CARD >= 1:
        # Left to itself LLVM pairs halves of different registers for these conversions, at an instruction each.
        return tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }",
            "=r,=r,r",
            [pair],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        return halves_to_float(pair)


@triton.jit
def e4m3(code, CARD: tl.constexpr):
    """uint8 -> float32, exactly, NaN included."""
    if CARD >= 2:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        return decode_e4m3(code.to(tl.int32)) * 256.0


@triton.jit
def e4m3_unit(CARD: tl.constexpr):
    """What `e4m3_of_word`'s results have to be multiplied by."""
    return 1.0 if CARD >= 2 else 256.0


@triton.jit
def e4m3_of_word(word, CARD: tl.constexpr):
    """Four codes of a uint32, lowest byte first -> four float32 in units of `e4m3_unit`."""
    if CARD >= 2:
        first, second = tl.inline_asm_elementwise(
            """
            {
            .reg .b16 low, high;
            mov.b32 {low, high}, $2;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
            }
            """,
            "=r,=r,r",
            [word],
            dtype=(tl.uint32, tl.uint32),
            is_pure=True,
            pack=1,
        )
        a, b = halves(first, CARD)
        c, d = halves(second, CARD)
    else:
        even, odd = word & 0x00FF00FF, (word >> 8) & 0x00FF00FF
        even_low, odd_low = even & 0x007F007F, odd & 0x007F007F
        even = (even_low << 7) | (((even_low + 0x00010001) & 0x00800080) << 7) | ((even & 0x00800080) << 8)
        odd = (odd_low << 7) | (((odd_low + 0x00010001) & 0x00800080) << 7) | ((odd & 0x00800080) << 8)
        a, c = halves(even, CARD)
        b, d = halves(odd, CARD)
    return a, b, c, d


@triton.jit
def e2m1_of_byte(byte, CARD: tl.constexpr):
    """Both codes of a uint8, the low nibble first -> two float32 in units of 2^-14. For tiles; words go faster."""
    bits = byte.to(tl.uint32)
    return halves(((bits & 0x7) << 9) | ((bits & 0x8) << 12) | ((bits & 0x70) << 21) | ((bits & 0x80) << 24), CARD)


@triton.jit
def e2m1_unit(CARD: tl.constexpr):
    """What `e2m1_of_word`'s results have to be multiplied by."""
    return 1.0 if CARD >= 3 else 16384.0


@triton.jit
def e2m1_of_word(word, CARD: tl.constexpr):
    """Eight codes of a uint32, lowest nibble first -> eight float32 in units of `e2m1_unit`."""
    if CARD >= 3:
        a, b, c, d = tl.inline_asm_elementwise(
            """
            {
            .reg .b8 a, b, c, d;
            mov.b32 {a, b, c, d}, $4;
            cvt.rn.f16x2.e2m1x2 $0, a;
            cvt.rn.f16x2.e2m1x2 $1, b;
            cvt.rn.f16x2.e2m1x2 $2, c;
            cvt.rn.f16x2.e2m1x2 $3, d;
            }
            """,
            "=r,=r,=r,=r,r",
            [word],
            dtype=(tl.uint32, tl.uint32, tl.uint32, tl.uint32),
            is_pure=True,
            pack=1,
        )
        c0, c1 = halves(a, CARD)
        c2, c3 = halves(b, CARD)
        c4, c5 = halves(c, CARD)
        c6, c7 = halves(d, CARD)
    else:
        a, b, c, d = place_e2m1(word, 0), place_e2m1(word, 1), place_e2m1(word, 2), place_e2m1(word, 3)
        c0, c4 = halves(a, CARD)
        c1, c5 = halves(b, CARD)
        c2, c6 = halves(c, CARD)
        c3, c7 = halves(d, CARD)
    return c0, c1, c2, c3, c4, c5, c6, c7
