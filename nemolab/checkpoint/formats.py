"""NVFP4 and FP8 in plain torch: what a stored byte means, and the way back.

NVFP4 (ModelOpt's linear form) of a matrix [N, K]:
    packed   uint8 [N, K/2]   two 4-bit E2M1 codes a byte: low nibble = even column 2b, high nibble = column 2b + 1
    scales   E4M3  [N, K/16]  one block scale for each 16 consecutive columns of a row
    scale_2  float32 scalar   one factor for the matrix
    value = e2m1(code) * (float32(scale) * scale_2), the product of the scales formed in float32
FP8: value = float32(e4m3) * scale. An E4M3 byte 0x7F or 0xFF is NaN and every value under it decodes to NaN: decoding
hides nothing, `nan_scales` finds them. Everything here is the slow, readable truth the kernels are tested against.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from nemolab.errors import CheckpointError

if TYPE_CHECKING:
    import torch

GROUP = 16  # columns (or neurons) that share one block scale
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_SMALLEST = 2.0**-9

# Halfway points between neighbouring magnitudes.
_E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)

# (bits of a value, values under one scale byte or 0). The only table of what a format costs.
_BITS = {"nvfp4": (4, 16), "mxfp4": (4, 32), "fp8": (8, 0), "bf16": (16, 0), "f16": (16, 0), "f32": (32, 0)}
FORMATS = tuple(_BITS)


def matrix_bytes(rows: int, columns: int, format: str) -> int:
    """Bytes of one matrix [rows, columns]: packed values and block scales, without scalars.

    Raises CheckpointError for an unknown format and for rows that are no whole groups.
    """
    if format not in _BITS:
        raise CheckpointError(f"unknown format {format!r}; known are {', '.join(_BITS)}")
    bits, group = _BITS[format]
    if group and columns % group:
        raise CheckpointError(f"{format} needs rows in groups of {group} columns, found {columns} columns")
    return rows * columns * bits // 8 + (rows * (columns // group) if group else 0)


def decode_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """Packed codes uint8 [..., K/2] -> float32 [..., K]; the low nibble comes first."""
    pairs = _byte_pairs()[packed.reshape(-1).int()]
    return pairs.reshape(*packed.shape[:-1], packed.shape[-1] * 2)


def decode_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """E4M3 bytes (uint8 or float8_e4m3fn) -> float32 of the same shape; 0x7F and 0xFF are NaN."""
    import torch

    return codes.view(torch.float8_e4m3fn).float()


def decode_nvfp4(packed: torch.Tensor, scales: torch.Tensor, scale_2: torch.Tensor | float) -> torch.Tensor:
    """NVFP4 -> float32 [N, K] from packed uint8 [N, K/2], scales [N, K/16] (uint8 or float8), scale_2 a scalar.

    Raises CheckpointError when the shapes do not belong together.
    """
    import torch

    rows, columns = packed.shape[-2], packed.shape[-1] * 2
    if columns % GROUP or tuple(scales.shape) != (*packed.shape[:-1], columns // GROUP):
        raise CheckpointError(
            f"NVFP4: packed {list(packed.shape)} needs scales {[*packed.shape[:-1], columns // GROUP]},"
            f" found {list(scales.shape)}"
        )
    factor = decode_e4m3(scales) * torch.as_tensor(scale_2, dtype=torch.float32).reshape(())
    grouped = decode_e2m1(packed).reshape(*packed.shape[:-1], columns // GROUP, GROUP)
    return (grouped * factor.unsqueeze(-1)).reshape(*packed.shape[:-2], rows, columns)


def decode_fp8(weight: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor:
    """FP8 -> float32: weight (uint8 or float8_e4m3fn) of any shape times a scalar scale."""
    import torch

    return decode_e4m3(weight) * torch.as_tensor(scale, dtype=torch.float32).reshape(())


def encode_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Nearest E2M1 codes: uint8 of the same shape, ties to the even code, saturating at 6; the sign is kept."""
    import torch

    magnitude = values.abs().contiguous()
    midpoints = torch.tensor(_E2M1_MIDPOINTS, dtype=values.dtype)
    # right=False counts midpoints strictly below: a tie stays at the lower code, which is wrong when that code is odd.
    codes = torch.bucketize(magnitude, midpoints, right=False)
    tie_upwards = (torch.bucketize(magnitude, midpoints, right=True) > codes) & (codes % 2 == 1)
    codes = codes + tie_upwards
    return (codes | (torch.signbit(values).long() << 3)).to(torch.uint8)


def pack_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Codes uint8 [..., K] -> packed uint8 [..., K/2], the even column in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def encode_nvfp4(
    weight: torch.Tensor, scale_2: torch.Tensor | float | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A float matrix [N, K], K a multiple of 16 -> (packed uint8 [N, K/2], scales E4M3 [N, K/16], scale_2 float32 []).

    Maximum calibration unless scale_2 is given: scale_2 = amax / (6 * 448). Block scales are clamped to [2^-9, 448] and
    1.0 for a block of zeros, so a written scale is never 0, negative or NaN.
    """
    import torch

    weight = weight.float()
    if weight.shape[-1] % GROUP:
        raise CheckpointError(f"NVFP4 needs rows in groups of {GROUP}, found {weight.shape[-1]} columns")
    if scale_2 is None:
        largest = weight.abs().amax()
        scale_2 = largest / (E2M1_MAX * E4M3_MAX) if largest > 0 else 1.0
    scale_2 = torch.as_tensor(scale_2, dtype=torch.float32)
    blocks = weight.reshape(*weight.shape[:-1], -1, GROUP)
    peaks = blocks.abs().amax(-1)
    scales = (peaks / E2M1_MAX / scale_2).clamp(E4M3_SMALLEST, E4M3_MAX)
    scales = torch.where(peaks > 0, scales, torch.ones_like(scales)).to(torch.float8_e4m3fn)
    codes = encode_e2m1(blocks / (scales.float() * scale_2).unsqueeze(-1)).reshape(weight.shape)
    return pack_e2m1(codes), scales, scale_2


def encode_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A float tensor -> (float8_e4m3fn of the same shape, scale float32 []), scale = amax / 448."""
    import torch

    weight = weight.float()
    largest = weight.abs().amax()
    scale = largest / E4M3_MAX if largest > 0 else torch.tensor(1.0)
    return (weight / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale


def nan_scales(scales: np.ndarray) -> np.ndarray:
    """Places of NaN among E4M3 bytes (numpy uint8): int array [found, ndim]."""
    magnitudes = scales & 0x7F
    if magnitudes.max(initial=0) < 0x7F:  # the usual case, quicker than looking for places
        return np.empty((0, scales.ndim), dtype=np.intp)
    return np.argwhere(magnitudes == 0x7F)


@cache
def _byte_pairs() -> torch.Tensor:
    """float32 [256, 2]: what each byte of packed codes holds, low nibble first."""
    import torch

    values = torch.tensor(E2M1_VALUES, dtype=torch.float32)
    byte = torch.arange(256)
    return torch.stack([values[byte & 15], values[byte >> 4]], dim=-1)
