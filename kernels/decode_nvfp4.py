"""NVFP4 -> float32, for prompts: a matrix is decoded once and multiplied with many tokens by torch.

    decode_rows     packed [rows, columns / 2], scales [rows, columns / 16] -> float32 [rows, columns]
    decode_columns  the same stored bytes -> float32 [columns, rows], transposed on the way

A value is code * (scale * scale_2), both products in float32, so both give the same bits. Traffic: 9/16 byte read and 4
bytes written a value; bounded by the writes.
"""

from __future__ import annotations

import numpy as np
import torch

from nemolab.errors import EngineError
from nemolab.kernels import simd
from nemolab.kernels.jit import jit
from nemolab.kernels.team import Team

_E2M1_UNIT, _E4M3_UNIT = np.float32(simd.E2M1_UNIT), np.float32(simd.E4M3_UNIT)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def decode_rows_torch(packed: torch.Tensor, scales: torch.Tensor, scale_2: float) -> torch.Tensor:
    """The plain twin: a table for the codes, torch's own E4M3 for the scales."""
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).long()
    factor = scales.view(torch.float8_e4m3fn).float() * torch.tensor(scale_2, dtype=torch.float32)
    values = torch.tensor(_E2M1)[codes].reshape(packed.shape[0], -1, 16) * factor.unsqueeze(-1)
    return values.reshape(packed.shape[0], -1)


@jit
def _decode_rows_kernel(part, parts, values, scales, scale_2, out):
    rows, columns = out.shape
    groups = columns // 16
    one = simd.address_of(out)
    for row in range(rows * part // parts, rows * (part + 1) // parts):
        at, scale_at, out_at = values + row * columns // 2, scales + row * groups, one + 4 * row * columns
        for g in range(groups):
            # Powers of two, exact: the product of the scales is rounded once, as the twin's.
            factor = (simd.load_one_e4m3(scale_at + g) * _E4M3_UNIT) * scale_2
            low, high = simd.load_e2m1(at + 8 * g)
            unit, factor_ = simd.splat(_E2M1_UNIT), simd.splat(factor)
            simd.store_pairs(out_at + 64 * g, simd.mul(simd.mul(low, unit), factor_), simd.mul(simd.mul(high, unit), factor_))


@jit
def _decode_columns_kernel(part, parts, values, scales, scale_2, out):
    columns, rows = out.shape
    groups = columns // 16
    tile = np.empty(16, np.float32)
    tile_at = simd.address_of(tile)
    for g in range(groups * part // parts, groups * (part + 1) // parts):
        for row in range(rows):
            factor = (simd.load_one_e4m3(scales + row * groups + g) * _E4M3_UNIT) * scale_2
            low, high = simd.load_e2m1(values + row * columns // 2 + 8 * g)
            unit, factor_ = simd.splat(_E2M1_UNIT), simd.splat(factor)
            simd.store_pairs(tile_at, simd.mul(simd.mul(low, unit), factor_), simd.mul(simd.mul(high, unit), factor_))
            for k in range(16):
                out[16 * g + k, row] = tile[k]


@jit
def _decode_neurons_kernel(part, parts, values, scales, scale_2, out):
    neurons, width = out.shape
    one = simd.address_of(out)
    unit, scale_unit, scale_2_ = simd.splat(_E2M1_UNIT), simd.splat(_E4M3_UNIT), simd.splat(scale_2)
    for neuron in range(neurons * part // parts, neurons * (part + 1) // parts):
        at, scale_at, out_at = values + neuron * width // 2, scales + (neuron // 16) * width, one + 4 * neuron * width
        for block in range(width // 16):
            low, high = simd.load_e2m1(at + 8 * block)
            even, odd = simd.load_e4m3_pairs(scale_at + 16 * block)
            even = simd.mul(simd.mul(even, scale_unit), scale_2_)
            odd = simd.mul(simd.mul(odd, scale_unit), scale_2_)
            simd.store_pairs(out_at + 64 * block, simd.mul(simd.mul(low, unit), even), simd.mul(simd.mul(high, unit), odd))


def decode_rows(team: Team, packed: torch.Tensor, scales: torch.Tensor, scale_2: float) -> torch.Tensor:
    """packed uint8 [rows, columns / 2], scales (one byte each) [rows, columns / 16] -> float32 [rows, columns]."""
    rows, columns = packed.shape[0], packed.shape[1] * 2
    _check(packed, scales, (rows, columns // 16), columns)
    out = torch.empty(rows, columns)
    _run(team, _decode_rows_kernel, packed, scales, scale_2, out)
    return out


def decode_columns(team: Team, packed: torch.Tensor, scales: torch.Tensor, scale_2: float) -> torch.Tensor:
    """The same arguments -> float32 [columns, rows]: what `decode_rows` gives, transposed, contiguous, bit for bit."""
    rows, columns = packed.shape[0], packed.shape[1] * 2
    _check(packed, scales, (rows, columns // 16), columns)
    out = torch.empty(columns, rows)
    _run(team, _decode_columns_kernel, packed, scales, scale_2, out)
    return out


def decode_neurons(team: Team, packed: torch.Tensor, scales: torch.Tensor, scale_2: float) -> torch.Tensor:
    """Down of a block in layout `neuron`: packed uint8 [I, X / 2], scales [I / 16, X] -> float32 [I, X].

    Bit for bit what `decode_columns` makes of the published planes.
    """
    neurons, width = packed.shape[0], packed.shape[1] * 2
    _check(packed, scales, (neurons // 16, width), width)
    out = torch.empty(neurons, width)
    _run(team, _decode_neurons_kernel, packed, scales, scale_2, out)
    return out


def _run(team: Team, kernel, packed, scales, scale_2: float, out: torch.Tensor) -> None:
    team.run(kernel, 4 * out.numel(), packed.data_ptr(), scales.data_ptr(), np.float32(scale_2), out.numpy())


def _check(packed: torch.Tensor, scales: torch.Tensor, scales_shape: tuple[int, int], width: int) -> None:
    fits = packed.is_contiguous() and scales.is_contiguous() and packed.element_size() == scales.element_size() == 1
    if not fits or width % 16 or tuple(scales.shape) != scales_shape:
        raise EngineError(
            f"NVFP4 bytes {list(packed.shape)} with scales {list(scales.shape)}: contiguous bytes, {list(scales_shape)} "
            f"scales and a width that is a multiple of 16 are needed"
        )
