"""A stored matrix times a vector, straight from its bytes: BF16, F16, F32, FP8 or NVFP4. One token of a dense layer.

y [rows] (+)= act(scale * W x + bias)   W [rows, columns], x float32 [columns], y float32

Reads every stored byte of W once and writes y; no float32 copy of W exists. From memory it is bounded by those bytes,
from a cache by decoding.

Order of a row's sum, the same for any number of threads: columns in blocks of 8 go to four running sums in turn (NVFP4:
two, one group of 16 each), which are added in a fixed order at the end; a rest of fewer than 8 columns comes last.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from nemolab.checkpoint.formats import GROUP
from nemolab.errors import EngineError
from nemolab.jit import is_cached, jit
from nemolab.kernels import simd
from nemolab.kernels.team import Team

BF16, F16, F32, FP8, NVFP4 = range(5)
FORMATS = {"bf16": BF16, "f16": F16, "f32": F32, "fp8": FP8, "nvfp4": NVFP4}
_VALUE_BITS = {BF16: 16, F16: 16, F32: 32, FP8: 8, NVFP4: 4}
_E2M1_UNIT, _E4M3_UNIT = np.float32(simd.E2M1_UNIT), np.float32(simd.E4M3_UNIT)
# One scale serves sixteen codes: there a table beat placing bits, if by little, and it keeps NaN.
E4M3_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()

# What the kernel does with a product.
PLAIN, ADD, RELU2 = range(3)


class Packed(NamedTuple):
    """A matrix as kernels take it.

    rows, columns
    table   int64 [6]: format, rows, columns, address of the values, of the scales, of the bias (0: none)
    scale   the matrix's own scale (FP8, NVFP4), else 1
    nbytes  what one product reads
    keep    the tensors behind the addresses
    """

    rows: int
    columns: int
    table: np.ndarray
    scale: np.float32
    nbytes: int
    keep: tuple


def pack(
    format: str,
    rows: int,
    columns: int,
    weight: torch.Tensor,
    scales: torch.Tensor | None = None,
    scale: float = 1.0,
    bias: torch.Tensor | None = None,
) -> Packed:
    """Describe a stored matrix [rows, columns] to the kernels, without copying it.

    weight  as stored, contiguous; scales uint8 [rows, columns / 16] for NVFP4; bias float32 [rows]
    Raises EngineError when a tensor's bytes do not match the sizes.
    """
    code = FORMATS[format]
    if code == NVFP4 and columns % GROUP:
        raise EngineError(f"NVFP4 needs columns in groups of {GROUP}, found {columns}")
    needed = [(weight, rows * columns * _VALUE_BITS[code] // 8)]
    needed += [(scales, rows * columns // GROUP)] if code == NVFP4 else []
    needed += [(bias, rows * 4)] if bias is not None else []
    for tensor, nbytes in needed:
        found = tensor.numel() * tensor.element_size()
        if found != nbytes or not tensor.is_contiguous():
            raise EngineError(
                f"a {format} matrix [{rows}, {columns}] needs {nbytes} contiguous bytes, a tensor of {found} was found"
            )
    addresses = [0 if t is None else t.data_ptr() for t in (weight, scales if code == NVFP4 else None, bias)]
    table = np.array([code, rows, columns, *addresses], np.int64)
    return Packed(rows, columns, table, np.float32(scale), sum(nbytes for _, nbytes in needed), (weight, scales, bias))


def matvec_torch(packed: Packed, x: torch.Tensor, y: torch.Tensor | None = None, mode: int = PLAIN) -> torch.Tensor:
    """The plain twin: decode in torch, then multiply."""
    from nemolab.kernels.decode_nvfp4 import decode_rows_torch

    code, rows, columns = int(packed.table[0]), packed.rows, packed.columns
    weight, scales, bias = packed.keep
    if code == NVFP4:
        decoded = decode_rows_torch(weight, scales, float(packed.scale))
    else:
        decoded = weight.float().reshape(rows, columns) * torch.tensor(packed.scale)
    product = decoded @ x
    if bias is not None:
        product = product + bias
    if mode == RELU2:
        product = torch.relu(product).square()
    return product + y if mode == ADD else product


def _make_dot(name, load, load_one, nbytes):
    """dot(address, x, columns): `columns` stored values of `nbytes` bytes each, times the float32 at address x."""

    def dot(address, x, columns):
        a, b, c, d = simd.zeros(), simd.zeros(), simd.zeros(), simd.zeros()
        k = 0
        while k + 32 <= columns:
            at, x_at = address + nbytes * k, x + 4 * k
            a = simd.fma(load(at), simd.load_f32(x_at), a)
            b = simd.fma(load(at + 8 * nbytes), simd.load_f32(x_at + 32), b)
            c = simd.fma(load(at + 16 * nbytes), simd.load_f32(x_at + 64), c)
            d = simd.fma(load(at + 24 * nbytes), simd.load_f32(x_at + 96), d)
            k += 32
        while k + 8 <= columns:
            a = simd.fma(load(address + nbytes * k), simd.load_f32(x + 4 * k), a)
            k += 8
        sum_ = simd.total(simd.add(simd.add(a, b), simd.add(c, d)))
        while k < columns:
            sum_ += load_one(address + nbytes * k) * simd.load_one_f32(x + 4 * k)
            k += 1
        return sum_

    # Compiled code finds what it calls by name. Under one name, code kept from several processes would be mixed up.
    dot.__name__ = dot.__qualname__ = name
    return jit(dot)


dot_bf16 = _make_dot("dot_bf16", simd.load_bf16, simd.load_one_bf16, 2)
dot_f16 = _make_dot("dot_f16", simd.load_f16, simd.load_one_f16, 2)
dot_f32 = _make_dot("dot_f32", simd.load_f32, simd.load_one_f32, 4)
dot_fp8 = _make_dot("dot_fp8", simd.load_e4m3, simd.load_one_e4m3, 1)  # in units of 2^-8


@jit
def dot_nvfp4(values, scales, x_even, x_odd, groups):
    """In units of 2^-14: the sum over groups of scale * (sum over the group of code * x)."""
    a, b = simd.zeros(), simd.zeros()
    g = 0
    while g + 2 <= groups:
        low, high, low_2, high_2 = simd.load_e2m1_twice(values + 8 * g)
        x = 32 * g
        first = simd.fma(low, simd.load_f32(x_even + x), simd.mul(high, simd.load_f32(x_odd + x)))
        second = simd.fma(low_2, simd.load_f32(x_even + x + 32), simd.mul(high_2, simd.load_f32(x_odd + x + 32)))
        a = simd.fma(simd.splat(E4M3_VALUES[simd.load_byte(scales + g)]), first, a)
        b = simd.fma(simd.splat(E4M3_VALUES[simd.load_byte(scales + g + 1)]), second, b)
        g += 2
    if g < groups:
        low, high = simd.load_e2m1(values + 8 * g)
        x = 32 * g
        first = simd.fma(low, simd.load_f32(x_even + x), simd.mul(high, simd.load_f32(x_odd + x)))
        a = simd.fma(simd.splat(E4M3_VALUES[simd.load_byte(scales + g)]), first, a)
    return simd.total(simd.add(a, b))


@jit
def split_even_odd(x, even, odd):
    """x [2n] -> its even and its odd places, [n] each, as packed nibbles want them."""
    for i in range(even.shape[0]):
        even[i] = x[2 * i]
        odd[i] = x[2 * i + 1]


@jit
def multiply_rows(first, last, table, scale, x, y, mode):
    """Rows first..last of one product; y as `mode` says."""
    code, columns = table[0], table[2]
    values, scales, bias = table[3], table[4], table[5]
    x_at = simd.address_of(x)
    even = odd = x
    factor = scale
    if code == NVFP4:
        even, odd = np.empty(columns // 2, np.float32), np.empty(columns // 2, np.float32)
        split_even_odd(x, even, odd)
        factor = scale * _E2M1_UNIT
    elif code == FP8:
        factor = scale * _E4M3_UNIT
    even_at, odd_at = simd.address_of(even), simd.address_of(odd)
    for row in range(first, last):
        if code == BF16:
            product = dot_bf16(values + 2 * row * columns, x_at, columns)
        elif code == FP8:
            product = dot_fp8(values + row * columns, x_at, columns)
        elif code == NVFP4:
            groups = columns // GROUP
            product = dot_nvfp4(values + row * columns // 2, scales + row * groups, even_at, odd_at, groups)
        elif code == F32:
            product = dot_f32(values + 4 * row * columns, x_at, columns)
        else:
            product = dot_f16(values + 2 * row * columns, x_at, columns)
        product *= factor
        if bias != 0:
            product += simd.load_one_f32(bias + 4 * row)
        if mode == RELU2:
            product = max(product, np.float32(0))
            product *= product
        y[row] = product + y[row] if mode == ADD else product


@jit
def _matvec_kernel(part, parts, table, scale, x, y, mode):
    rows = table[1]
    multiply_rows(rows * part // parts, rows * (part + 1) // parts, table, scale, x, y, mode)


def matvec(team: Team, packed: Packed, x: np.ndarray, y: np.ndarray, mode: int = PLAIN) -> None:
    """y = W x (PLAIN), y += W x (ADD) or y = relu(W x)^2 (RELU2); x float32 [columns], y float32 [rows].

    Raises EngineError for vectors of other lengths.
    """
    if x.shape != (packed.columns,) or y.shape != (packed.rows,):
        raise EngineError(f"a matrix [{packed.rows}, {packed.columns}] from a vector {x.shape} to one of {y.shape}")
    team.run(_matvec_kernel, packed.nbytes, packed.table, packed.scale, x, y, mode)


def kernel_is_cached() -> bool:
    """Whether the largest kernel has been compiled on this machine before."""
    return is_cached(_matvec_kernel)
