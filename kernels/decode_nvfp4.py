"""NVFP4 -> float32, for the dense part of prompts: a matrix is decoded once, torch multiplies it with many tokens.

    packed [rows, columns / 2], scales [rows, columns / 16] -> float32 [rows, columns]

A value is code * (scale * scale_2), both products in float32. Traffic: 9/16 byte read and 4 bytes written a value;
bounded by the writes.
"""

from __future__ import annotations

import numpy as np
import torch

from nemolab.checkpoint.formats import GROUP, decode_nvfp4
from nemolab.errors import EngineError
from nemolab.jit import jit
from nemolab.kernels import simd
from nemolab.kernels.team import Team

_E2M1_UNIT, _E4M3_UNIT = np.float32(simd.E2M1_UNIT), np.float32(simd.E4M3_UNIT)


def decode_rows_torch(packed: torch.Tensor, scales: torch.Tensor, scale_2: float) -> torch.Tensor:
    """The plain twin: the one that reads checkpoints."""
    return decode_nvfp4(packed, scales, scale_2)


@jit
def _decode_rows_kernel(part, parts, values, scales, scale_2, out):
    rows, columns = out.shape
    groups = columns // GROUP
    one = simd.address_of(out)
    for row in range(rows * part // parts, rows * (part + 1) // parts):
        at, scale_at, out_at = values + row * columns // 2, scales + row * groups, one + 4 * row * columns
        for g in range(groups):
            # Powers of two, exact: the product of the scales is rounded once, as the twin's.
            factor = (simd.load_one_e4m3(scale_at + g) * _E4M3_UNIT) * scale_2
            low, high = simd.load_e2m1(at + 8 * g)
            # A power of two again, so code * factor is rounded once.
            whole = simd.splat(factor * _E2M1_UNIT)
            simd.store_pairs(out_at + 64 * g, simd.mul(low, whole), simd.mul(high, whole))


def decode_rows(team: Team, packed: torch.Tensor, scales: torch.Tensor, scale_2: float) -> torch.Tensor:
    """packed uint8 [rows, columns / 2], scales (one byte each) [rows, columns / 16] -> float32 [rows, columns]."""
    rows, columns = packed.shape[0], packed.shape[1] * 2
    fits = packed.is_contiguous() and scales.is_contiguous() and packed.element_size() == scales.element_size() == 1
    if not fits or columns % GROUP or tuple(scales.shape) != (rows, columns // GROUP):
        raise EngineError(
            f"NVFP4 bytes {list(packed.shape)} with scales {list(scales.shape)}: contiguous bytes, a width that is a "
            f"multiple of {GROUP} and scales {[rows, columns // GROUP]} are needed"
        )
    out = torch.empty(rows, columns)
    team.run(
        _decode_rows_kernel, 4 * out.numel(), packed.data_ptr(), scales.data_ptr(), np.float32(scale_2), out.numpy()
    )
    return out
