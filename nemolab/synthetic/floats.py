"""Bits of narrow floats in numpy: enough to draw them and to write single values. Nothing here needs torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np

from nemolab.checkpoint.formats import E4M3_MAX


@dataclass(frozen=True)
class FloatBits:
    """How a stored float lies in an unsigned integer: sign on top, then exponent, then `mantissa` bits."""

    dtype: str  # safetensors' name
    storage: type  # numpy's unsigned integer
    mantissa: int

    @property
    def sign(self) -> int:
        return 1 << (8 * np.dtype(self.storage).itemsize - 1)


BITS = {
    "bf16": FloatBits("BF16", np.uint16, 7),
    "f16": FloatBits("F16", np.uint16, 10),
    "f32": FloatBits("F32", np.uint32, 23),
    "fp8": FloatBits("F8_E4M3", np.uint8, 3),
}


def to_float(format: str, bits: np.ndarray) -> np.ndarray:
    """Stored bits -> float64 of the same shape."""
    if format == "fp8":
        return e4m3_values()[bits]
    if format == "bf16":
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return bits.view({"f16": np.float16, "f32": np.float32}[format]).astype(np.float64)


def to_bits(format: str, values) -> np.ndarray:
    """Floats -> stored bits, rounded to the nearest; FP8 saturates at 448."""
    values = np.asarray(values, dtype=np.float32)
    if format == "f32":
        return values.view(np.uint32)
    if format == "f16":
        return values.astype(np.float16).view(np.uint16)
    if format == "bf16":
        whole = values.reshape(-1).view(np.uint32)
        return ((whole + 0x7FFF + ((whole >> 16) & 1)) >> 16).astype(np.uint16).reshape(values.shape)
    positive = e4m3_values()[:0x7F]
    nearest = np.abs(np.abs(values).reshape(-1, 1).clip(0, E4M3_MAX) - positive).argmin(axis=1)
    return (nearest | np.where(np.signbit(values).reshape(-1), 0x80, 0)).astype(np.uint8).reshape(values.shape)


@cache
def e4m3_values() -> np.ndarray:
    """float64 [256]: what each E4M3 byte is."""
    byte = np.arange(256)
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    magnitude = np.where(exponent > 0, (1 + mantissa / 8) * 2.0 ** (exponent - 7), mantissa * 2.0**-9)
    magnitude = np.where((byte & 0x7F) == 0x7F, np.nan, magnitude)
    return np.where(byte & 0x80, -magnitude, magnitude)


@cache
def lowest_bits(format: str, spread: float) -> int:
    """The bits b for which floats drawn evenly from the bit patterns b to b + two octaves have the rms `spread`."""
    bits = BITS[format]
    width = 2 << bits.mantissa
    sample = np.arange(0, width, max(1, width // 256)).astype(bits.storage)

    def rms(low: int) -> float:
        return math.sqrt((to_float(format, (sample + bits.storage(low)).astype(bits.storage)) ** 2).mean())

    low, high = 1 << bits.mantissa, bits.sign - width - (1 << bits.mantissa)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if rms(middle) <= spread else (low, middle)
    return low


@cache
def fp8_rms(low: int) -> float:
    """rms of FP8 bytes drawn evenly from the two octaves that begin at `low`."""
    return math.sqrt((e4m3_values()[low : low + 16] ** 2).mean())
