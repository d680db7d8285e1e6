"""How the values of one tensor are drawn, any block of rows alone, straight as stored bytes.

A draw has `fill(out, random, first_row, rows)`: out [rows here, columns] in the tensor's storage type, the first of its
rows and how many the whole tensor has. With `in_place`, `out` comes full of random bits; without, `random` holds
`random_bytes` of them for each element, uint8 [rows here, columns * random_bytes].

Large tensors are never made as floats. Random bits are masked to a sign, a mantissa and one bit of the exponent, and
the lowest wanted bit pattern is added: magnitudes spread evenly over the patterns of two octaves, in two integer
operations a word. NVFP4 codes are the random bytes themselves.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

import numpy as np

from nemolab.checkpoint.formats import E2M1_VALUES, GROUP
from nemolab.synthetic.floats import BITS, e4m3_values, fp8_rms, lowest_bits, to_bits

CODE_RMS = math.sqrt(sum(value**2 for value in E2M1_VALUES) / len(E2M1_VALUES))  # of evenly drawn codes
ONE = 0x38  # 1.0 in E4M3; 8 steps further it is doubled
_SPREAD_STEPS = 32  # block scales lie evenly over these steps, two octaves below and two above the middle
_LARGEST, _SMALLEST = 0x7E, 0x01  # 448 and 2^-9
_LOUDEST_LOW = 0x6F  # FP8 bytes of the two octaves that end with 448
# Codes -2, -3, -4 and -6, drawn evenly: how `up` holds its neurons back.
HOLDING_CODES_MEAN = 3.75
LOUDEST_CENTRE = 4  # from this octave on a scale of 448 is no outlier that would drown its row


@cache
def scale_rms() -> float:
    """rms of the block scales, relative to the middle."""
    steps = e4m3_values()[ONE - _SPREAD_STEPS // 2 : ONE + _SPREAD_STEPS // 2]
    return math.sqrt((steps**2).mean())


def random_bytes(seed: int, name: str, block: int, shape: tuple[int, int]) -> np.ndarray:
    """uint8 [rows, columns] that depend on these four alone."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    generator = np.random.SFC64([seed, block, int.from_bytes(digest, "little")])
    count = shape[0] * shape[1]
    return generator.random_raw(-(-count // 8)).view(np.uint8)[:count].reshape(shape)


@dataclass(frozen=True)
class Plant:
    """What a matrix holds on purpose, to carry a common direction of all hidden states from the embeddings to `up`.

    zero_rows  first rows, all zero: outputs that this matrix may not write
    columns    first columns, which hold `value` in every other row
    carry      value of these columns in the first `carry_rows` rows, which hold nothing else
    """

    zero_rows: int = 0
    columns: int = 0
    value: float = 0.0
    carry_rows: int = 0
    carry: float = 0.0


NOTHING = Plant()


@dataclass(frozen=True)
class Matrix:
    """Plain floats or FP8 of a given rms. `low` decides both; see `floats.lowest_bits`."""

    format: str
    low: int
    plant: Plant = NOTHING
    unit: float = 1.0  # what the stored number 1.0 stands for: FP8's weight_scale

    in_place = True

    def fill(self, out: np.ndarray, random: np.ndarray, first_row: int, rows: int) -> None:
        bits = BITS[self.format]
        out &= bits.storage(bits.sign | ((2 << bits.mantissa) - 1))
        out += bits.storage(self.low)
        _plant_values(out, self.plant, first_row, lambda value: to_bits(self.format, value / self.unit))


@dataclass(frozen=True)
class Codes:
    """Packed NVFP4 codes [rows, K/2], all sixteen evenly; the last row's last group is zero."""

    plant: Plant = NOTHING
    octave: int = 0
    in_place = True

    def fill(self, out: np.ndarray, random: np.ndarray, first_row: int, rows: int) -> None:
        plant = self.plant
        if plant.columns:
            pairs = out[:, : plant.columns // 2]
            pairs[...] = (pairs & 0x33) | 0xCC if plant.value < 0 else 0
        _overwrite(out, first_row, plant.zero_rows, 0)
        _overwrite(out, first_row, plant.carry_rows, 0)
        _overwrite(out[:, : plant.columns // 2], first_row, plant.carry_rows, 0x77)  # 6 and 6
        last = slice(out.shape[1] - GROUP // 2, None)
        for row, what in _odd_rows(first_row, len(out), rows, plant):
            if what == "zeros":
                out[row, last] = 0
            elif what == "largest" and self.octave >= LOUDEST_CENTRE:
                out[row, last] = 0x80  # 0 and -0 ...
                out[row, -1] = 0x81  # ... but for one 0.5


@dataclass(frozen=True)
class BlockScales:
    """E4M3 scales [rows, K/16] around 2^octave; one block each of 1.0 over zeros, 2^-9 and 448."""

    octave: int
    plant: Plant = NOTHING
    carry_byte: int = ONE
    in_place = True

    def fill(self, out: np.ndarray, random: np.ndarray, first_row: int, rows: int) -> None:
        out &= np.uint8(_SPREAD_STEPS - 1)
        out += np.uint8(ONE + 8 * self.octave - _SPREAD_STEPS // 2)
        plant = self.plant
        if plant.columns and plant.value < 0:
            out[:, 0] = ONE + 8 * self.octave
        _overwrite(out, first_row, plant.zero_rows, ONE)
        _overwrite(out, first_row, plant.carry_rows, ONE)
        _overwrite(out[:, :1], first_row, plant.carry_rows, self.carry_byte)
        for row, what in _odd_rows(first_row, len(out), rows, plant):
            if what == "zeros":
                out[row, -1] = ONE
            elif what == "smallest":
                out[row, -1] = _SMALLEST
            elif self.octave >= LOUDEST_CENTRE:
                out[row, -1] = _LARGEST


@dataclass(frozen=True)
class Vector:
    """Floats around a mean; the first `marked` ones hold a value of their own."""

    format: str
    mean: float = 0.0
    spread: float = 0.0
    marked: int = 0
    mark: float = 0.0
    in_place, random_bytes = False, 4

    def fill(self, out: np.ndarray, random: np.ndarray, first_row: int, rows: int) -> None:
        # The sum of a float's four bytes is nearly normal: mean 510, variance 4 * (256^2 - 1) / 12.
        normal = (random.reshape(*out.shape, -1)[..., :4].sum(-1, dtype=np.int64) - 510.0) / 147.8
        out[...] = to_bits(self.format, self.mean + self.spread * normal)
        if self.marked:
            out[..., : self.marked] = to_bits(self.format, self.mark)


@dataclass(frozen=True)
class Numbers:
    """Given numbers, the same for every seed."""

    format: str
    values: tuple[float, ...]
    in_place, random_bytes = False, 0

    def fill(self, out: np.ndarray, random: np.ndarray, first_row: int, rows: int) -> None:
        out[...] = to_bits(self.format, self.values).reshape(out.shape)


@dataclass(frozen=True)
class Counted:
    """A vector whose values follow from their number: rule(float64 [length], length), the same for every seed."""

    format: str
    rule: Callable[[np.ndarray, int], np.ndarray]
    in_place, random_bytes = False, 0

    def fill(self, out: np.ndarray, random: np.ndarray, first_row: int, rows: int) -> None:
        out[...] = to_bits(self.format, self.rule(np.arange(out.size, dtype=float), out.size)).reshape(out.shape)


@dataclass(frozen=True)
class Integers:
    """0, 1, 2, ... as I64."""

    in_place, random_bytes = False, 0

    def fill(self, out: np.ndarray, random: np.ndarray, first_row: int, rows: int) -> None:
        out[...] = np.arange(out.size, dtype=np.int64).view(np.uint64).reshape(out.shape)


@dataclass(frozen=True)
class Popularity:
    """The router's correction bias, drawn so that expert popularity falls as rank^-skew. F32 [1, experts].

    A score is sigmoid(N(0, 1)); an expert wanted with probability p gets the bias that lifts this share of its scores
    above a common threshold. Ranks are a random order.
    """

    top_k: int
    skew: float
    in_place, random_bytes = False, 4

    def fill(self, out: np.ndarray, random: np.ndarray, first_row: int, rows: int) -> None:
        experts = out.shape[1]
        wanted = np.array(popularity(experts, self.top_k, self.skew))
        lift = -np.array([_sigmoid(NormalDist().inv_cdf(1 - share)) for share in wanted])
        order = np.argsort(random.reshape(experts, -1).view(np.uint32)[:, 0], kind="stable")
        bias = np.empty(experts)
        bias[order] = lift - lift.mean()
        out[...] = to_bits("f32", bias)


def popularity(experts: int, top_k: int, skew: float) -> list[float]:
    """Share of tokens that should choose the expert of each rank: as rank^-skew, mostly at most 0.95, sum top_k."""
    if top_k >= experts:
        return [0.5] * experts
    weights = np.arange(1, experts + 1, dtype=float) ** -skew
    most = max(0.95, (top_k / experts + 1) / 2)
    low, high = 0.0, float(experts * experts)
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if np.minimum(most, middle * weights).sum() < top_k else (low, middle)
    return np.minimum(most, high * weights).clip(1e-4, None).tolist()


@cache
def fp8_matrix(spread: float, plant: Plant = NOTHING) -> tuple[Matrix, float]:
    """(draw, weight_scale): the largest byte is 448, as maximum calibration makes it, or what is planted needs it."""
    largest = max(abs(plant.value) if plant.columns else 0, abs(plant.carry) if plant.carry_rows else 0)
    low = _LOUDEST_LOW
    if largest > 448 * spread / fp8_rms(low):
        low = lowest_bits("fp8", 448 * spread / largest)
    scale = spread / fp8_rms(low)  # bytes come in coarse steps, and the scale makes the rms exact
    return Matrix("fp8", low, plant, scale), scale


@cache
def float_matrix(format: str, spread: float, plant: Plant = NOTHING) -> Matrix:
    return Matrix(format, lowest_bits(format, spread), plant)


@cache
def nvfp4_matrix(spread: float, octave: int, plant: Plant = NOTHING) -> tuple[Codes, BlockScales, float]:
    """(codes, block scales, weight_scale_2). `octave` moves a factor from weight_scale_2 into the block scales."""
    scale_2 = spread / (CODE_RMS * scale_rms() * 2.0**octave)
    carry = int(to_bits("fp8", plant.carry / (6 * scale_2))) if plant.carry_rows else ONE
    return Codes(plant, octave), BlockScales(octave, plant, max(1, carry)), scale_2


def _plant_values(out: np.ndarray, plant: Plant, first_row: int, encode) -> None:
    if plant.columns:
        out[:, : plant.columns] = encode(plant.value)
    _overwrite(out, first_row, plant.zero_rows, 0)
    if plant.carry_rows:
        _overwrite(out, first_row, plant.carry_rows, 0)
        _overwrite(out[:, : plant.columns], first_row, plant.carry_rows, encode(plant.carry))


def _overwrite(out: np.ndarray, first_row: int, count: int, value) -> None:
    """The first `count` rows of the tensor, as far as they lie in this block."""
    if first_row < count:
        out[: count - first_row] = value


def _odd_rows(first_row: int, here: int, rows: int, plant: Plant) -> list[tuple[int, str]]:
    """Where the last groups with the rare codes and scales lie in this block of rows."""
    found = []
    for back, what in ((1, "zeros"), (2, "smallest"), (3, "largest")):
        row = rows - back
        if row >= max(plant.zero_rows, plant.carry_rows) and first_row <= row < first_row + here:
            found.append((row - first_row, what))
    return found


def _sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))
