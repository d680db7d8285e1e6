"""A stored matrix times a vector on the card, straight from its bytes: one token of a dense layer.

y [rows] (+)= act(scale * W x + bias)   W [rows, columns] as `nemolab.kernels.matvec.pack` describes it, x, y float32

Reads every stored byte of W once and writes y; x [columns] comes from a cache, once a program of ROWS rows.

| format | columns in 8 bytes | decoding, instructions a weight                                             |
|--------|--------------------|-----------------------------------------------------------------------------|
| nvfp4  | 16, one group      | 2 to place bits, 1 half -> float, 1 multiply and add; its scale 1/16 of that |
| fp8    | 8                  | 1/2 conversion (by bit placing: 2), 1 half -> float, 1 multiply and add      |
| bf16, f16, f32 | 4, 4, 2    | 1 shift or conversion, 1 multiply and add                                    |

Loads and the loop come on top; all of it, as compiled, is counted in `nemolab.measure.bench_linear`.

Order of a row's sum, the same on every card: each of an accumulator's PLACES columns adds the 8 bytes of every
PLACESth place in a row, ascending (NVFP4: a group by itself, then times its scale); these are added as a tree. PLACES
is 32 times the warps, which depend on the columns of W alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nemolab.errors import EngineError
from nemolab.kernels.gpu.codes import card_of, e2m1_of_word, e2m1_unit, e4m3, e4m3_of_word, e4m3_unit
from nemolab.kernels.gpu.launch import check_tensor
from nemolab.kernels.matvec import ADD, BF16, F16, F32, FP8, NVFP4, PLAIN, RELU2, Packed, matvec_torch

__all__ = ["ADD", "PLAIN", "RELU2", "matvec", "matvec_torch"]

_COLUMNS = {NVFP4: 16, FP8: 8, BF16: 4, F16: 4, F32: 2}  # in eight bytes


@triton.jit
def _four(x, column, inside):
    """x at column .. column + 3, [W] each."""
    v = tl.load(x + column[:, None] + tl.arange(0, 4)[None, :], mask=inside[:, None], other=0.0)
    even, odd = tl.split(tl.reshape(v, [column.shape[0], 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a[None, :], b[None, :], c[None, :], d[None, :]


@triton.jit
def _matvec_kernel(
    w, scales, x, bias, y, scale, rows, places,
    FORMAT: tl.constexpr, MODE: tl.constexpr, BIAS: tl.constexpr, CARD: tl.constexpr,
    ROWS: tl.constexpr, PLACES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # grid: (cdiv(rows, ROWS),); places: of eight bytes in a row
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    within = row < rows
    start = row.to(tl.int64) * places
    sums = tl.zeros([ROWS, PLACES], tl.float32)
    for first in tl.range(0, places, PLACES, num_stages=STAGES):
        place = first + tl.arange(0, PLACES)
        inside = place < places
        both = within[:, None] & inside[None, :]
        # Claiming no alignment keeps one place a lane, so that lanes of W and of x agree without an exchange.
        at = start[:, None] + tl.multiple_of(place, 1)[None, :]
        if FORMAT == 4:
            words = tl.load(w + at, mask=both, other=0)
            code = tl.load(scales + at, mask=both, other=0)
            x0, x1, x2, x3 = _four(x, place * 16, inside)
            x4, x5, x6, x7 = _four(x, place * 16 + 4, inside)
            x8, x9, x10, x11 = _four(x, place * 16 + 8, inside)
            x12, x13, x14, x15 = _four(x, place * 16 + 12, inside)
            c0, c1, c2, c3, c4, c5, c6, c7 = e2m1_of_word(words.to(tl.uint32), CARD)
            group = c0 * x0 + c1 * x1 + c2 * x2 + c3 * x3 + c4 * x4 + c5 * x5 + c6 * x6 + c7 * x7
            c0, c1, c2, c3, c4, c5, c6, c7 = e2m1_of_word((words >> 32).to(tl.uint32), CARD)
            group += c0 * x8
            group += c1 * x9
            group += c2 * x10
            group += c3 * x11
            group += c4 * x12
            group += c5 * x13
            group += c6 * x14
            group += c7 * x15
            sums += group * e4m3(code, CARD)
        elif FORMAT == 3:
            words = tl.load(w + at, mask=both, other=0)
            x0, x1, x2, x3 = _four(x, place * 8, inside)
            x4, x5, x6, x7 = _four(x, place * 8 + 4, inside)
            c0, c1, c2, c3 = e4m3_of_word(words.to(tl.uint32), CARD)
            c4, c5, c6, c7 = e4m3_of_word((words >> 32).to(tl.uint32), CARD)
            sums += c0 * x0
            sums += c1 * x1
            sums += c2 * x2
            sums += c3 * x3
            sums += c4 * x4
            sums += c5 * x5
            sums += c6 * x6
            sums += c7 * x7
        elif FORMAT == 2:
            words = tl.load(w + at, mask=both, other=0)
            pair = tl.load(x + place[:, None] * 2 + tl.arange(0, 2)[None, :], mask=inside[:, None], other=0.0)
            x0, x1 = tl.split(pair)
            sums += words.to(tl.uint32).to(tl.float32, bitcast=True) * x0[None, :]
            sums += (words >> 32).to(tl.uint32).to(tl.float32, bitcast=True) * x1[None, :]
        else:
            words = tl.load(w + at, mask=both, other=0)
            x0, x1, x2, x3 = _four(x, place * 4, inside)
            low, high = words.to(tl.uint32), (words >> 32).to(tl.uint32)
            if FORMAT == 0:
                sums += (low << 16).to(tl.float32, bitcast=True) * x0
                sums += (low & 0xFFFF0000).to(tl.float32, bitcast=True) * x1
                sums += (high << 16).to(tl.float32, bitcast=True) * x2
                sums += (high & 0xFFFF0000).to(tl.float32, bitcast=True) * x3
            else:
                sums += low.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * x0
                sums += (low >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * x1
                sums += high.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * x2
                sums += (high >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * x3
    if FORMAT == 4:
        product = tl.sum(sums, 1) * (scale * e2m1_unit(CARD))
    elif FORMAT == 3:
        product = tl.sum(sums, 1) * (scale * e4m3_unit(CARD))
    else:
        product = tl.sum(sums, 1)
    if BIAS:
        product += tl.load(bias + row, mask=within, other=0.0)
    if MODE == 2:
        product = tl.where(product <= 0, 0.0, product * product)
    if MODE == 1:
        product += tl.load(y + row, mask=within, other=0.0)
    tl.store(y + row, product, mask=within)


def _shape(code: int, places: int, rows: int) -> tuple[int, int]:
    """Warps of a program, which decide the order of sums, and its rows, which do not.

    Few rows keep many programs in flight; many read x less often, which pays where decoding is dear.
    """
    warps = next((w for w in (4, 2) if triton.cdiv(places, 32 * w) * 32 * w < 1.25 * places), 1)
    if rows < 2048:
        return warps, 2
    return warps, 8 if code == NVFP4 and rows >= 16384 else 4


def matvec(packed: Packed, x: torch.Tensor, y: torch.Tensor, mode: int = PLAIN) -> None:
    """y = W x (PLAIN), y += W x (ADD) or y = relu(W x)^2 (RELU2), all on one device; nothing waits for the card.

    packed  from `nemolab.kernels.matvec.pack` with tensors on the card
    x       float32 [columns], y float32 [rows], contiguous
    Raises EngineError for other sizes, types or devices, and for rows that are no whole 8 bytes.
    """
    code, rows, columns = int(packed.table[0]), packed.rows, packed.columns
    weight, scales, bias = packed.keep
    for name, vector, length in (("x", x, columns), ("y", y, rows)):
        check_tensor(f"for a matrix [{rows}, {columns}],", name, vector, torch.float32, (length,), weight.device)
    devices = {tensor.device for tensor in (weight, scales, bias) if tensor is not None}
    if len(devices) > 1:
        raise EngineError(f"a matrix, its scales and its bias lie on {sorted(map(str, devices))}; one is needed")
    if columns % _COLUMNS[code] or weight.data_ptr() % 8:
        raise EngineError(
            f"rows of {columns} columns at {weight.data_ptr():#x}: whole 8 bytes, {_COLUMNS[code]} columns, are needed"
        )
    places = columns // _COLUMNS[code]
    warps, rows_each = _shape(code, places, rows)
    _matvec_kernel[(triton.cdiv(rows, rows_each),)](
        weight.view(torch.uint8).view(torch.int64),
        x if scales is None else scales.view(torch.uint8),
        x, x if bias is None else bias, y, float(packed.scale), rows, places,
        FORMAT=code, MODE=mode, BIAS=bias is not None, CARD=card_of(x.device),
        ROWS=rows_each, PLACES=32 * warps, STAGES=1, num_warps=warps,
    )  # fmt: skip
