"""Stored values nobody can use, found while the bytes pass: NaN, impossible factors, block scales in another order.

Headers cannot show these, so they are looked for where the bytes are read anyway, at repack:
    scalars        weight_scale_2, FP8's weight_scale: finite and not negative; 0.0 is legal and makes zeros
    block scales   E4M3 [N, K/16]: no NaN (bytes 0x7F, 0xFF), none below zero (0x81 to 0xFE): hardware reads the sign
                   bit of a scale or ignores it, so two readers would disagree; 0x00 and 0x80 are zero to both
    weights        FP8, BF16, F16, F32: no NaN; infinities are left alone (a routing bias of -inf is a choice)
    their order    a swizzled layout has the linear one's shape where rows fill tiles of 128 and groups tiles of 4
"""

from __future__ import annotations

from functools import cache

import numpy as np

from nemolab.checkpoint.formats import E2M1_VALUES, GROUP
from nemolab.checkpoint.modules import UNUSED_SCALES
from nemolab.checkpoint.safetensors_header import TensorEntry, place_of
from nemolab.errors import CheckpointError

# dtype -> (unsigned integers of its width, mask of all but the sign, bits of infinity or of the largest number)
_FLOATS = {
    "F8_E4M3": (np.dtype("u1"), 0x7F, 0x7E),
    "BF16": (np.dtype("<u2"), 0x7FFF, 0x7F80),
    "F16": (np.dtype("<u2"), 0x7FFF, 0x7C00),
    "F32": (np.dtype("<u4"), 0x7FFFFFFF, 0x7F800000),
}
_PIECE = 1 << 16  # elements looked at together: they stay in the core's cache

_TILE_ROWS, _TILE_GROUPS = 128, 4  # the tile of the swizzled layout, 512 scales
_JUDGED_ROWS = 512  # of the rest: tens of thousands of blocks, more say nothing more
_SAMPLED_GROUPS = 8  # columns of scales that the order is judged by at first: 1,024 blocks, soon done
# Of scales in the right order: -0.55 and below for weights of any kind measured, trained ones -0.45 at their weakest.
_FITS = -0.4
_SAYS_NOTHING = 0.5  # of what the swizzled order says; up to 0.4 was measured for trained weights that were swizzled
_OTHER_ORDERS = (1, 2, 5, 32)
_MOST_SQUARES = 300.0  # of 16 codes at most 6.0: 170 for normal weights, 190 for uniform ones, 576 for equal ones


def check_piece(entry: TensorEntry, start_bytes: int, raw: np.ndarray) -> None:
    """Judge a piece of a tensor by what it is of: uint8 `raw`, whole elements, from byte `start_bytes` on."""
    suffix = entry.name.rpartition(".")[2]
    if suffix in UNUSED_SCALES or entry.dtype not in _FLOATS:
        return
    if suffix in ("weight_scale", "weight_scale_2") and entry.dtype == "F32":
        check_factor(entry, float(raw.view("<f4")[0]))
    elif suffix == "weight_scale":
        check_block_scales(raw, place_of(entry), entry.shape, start_bytes)
    else:
        _check_numbers(entry, start_bytes, raw)


def check_factor(entry: TensorEntry, value: float) -> None:
    """Raise CheckpointError unless a scalar that values are multiplied by is finite and not negative."""
    if not 0 <= value < np.inf:
        raise CheckpointError(f"{place_of(entry)} is {value}; a finite factor >= 0 was expected")


def check_block_scales(
    scales: np.ndarray, where: str, shape: tuple[int, ...] | None = None, start_bytes: int = 0
) -> None:
    """Raise CheckpointError for the first NaN or negative byte of E4M3 block scales: uint8 [N, K/16].

    shape, start_bytes  of the whole, and the place in it where a piece of it begins
    """
    # The usual case in one pass: 0x00 to 0x7E. Looking for places takes longer.
    if scales.max(initial=0) < 0x7F:
        return
    flat = scales.reshape(-1)
    for bad, what in (((flat & 0x7F) == 0x7F, "NaN"), ((flat > 0x80) & (flat != 0xFF), "negative")):
        places = np.flatnonzero(bad)
        if len(places):
            row, group = (int(index) for index in np.unravel_index(start_bytes + places[0], shape or scales.shape))
            more = f" (and {len(places) - 1:,} more)" if len(places) > 1 else ""
            raise CheckpointError(
                f"{where} has the {what} byte {flat[places[0]]:#04x} at row {row}, group {group}{more};"
                " scales from 0 to 448 (0x00 to 0x7e) were expected"
            )


def _check_numbers(entry: TensorEntry, start_bytes: int, raw: np.ndarray) -> None:
    kind, mask, largest = _FLOATS[entry.dtype]
    values = raw.view(kind)
    for start in range(0, len(values), _PIECE):
        magnitudes = values[start : start + _PIECE] & mask
        if magnitudes.max(initial=0) > largest:
            at = start + int(np.argmax(magnitudes > largest))
            place = np.unravel_index(start_bytes // values.itemsize + at, entry.shape)
            raise CheckpointError(
                f"{place_of(entry)} is NaN ({values[at]:#0{2 + 2 * values.itemsize}x} in {entry.dtype}) at"
                f" {[int(index) for index in place]}; a number was expected"
            )


def check_order(packed: np.ndarray, scales: np.ndarray, where: str) -> None:
    """Raise CheckpointError where block scales fit their blocks in the swizzled order and not in the linear one.

    packed uint8 [N, K/2], scales uint8 [N, K/16]. Both orders have one shape where N fills tiles of 128 and K/16 tiles
    of 4; elsewhere nothing is said. Weights tell the orders apart: a block's scale is its largest value / 6, and the
    larger the largest of 16 values, the smaller the others beside it, so log(scale) and log(rms of the codes) fall
    together: their correlation is about -0.6 for normal weights, and 0 for scales that belong to other blocks.

    A sample of the linear order settles nearly every matrix. The rest is judged by its first rows, and refused only
    where the swizzled order stands out alone: weights with a pattern of their own (sorted, banded) fit a little in
    every order, so orders a few rows off are tried as well and must say as little as the linear one does.
    """
    rows, groups = scales.shape
    if rows % _TILE_ROWS or groups % _TILE_GROUPS:
        return
    taken = min(groups, _SAMPLED_GROUPS)
    sums = _square_sums_of(packed[:_TILE_ROWS, : taken * GROUP // 2])
    if _correlation(scales[:_TILE_ROWS, :taken], sums) < _FITS:  # nearly always
        return
    if _correlation(_unswizzled(scales[:_TILE_ROWS])[:, :taken], sums) > _FITS:
        return
    packed, scales = packed[:_JUDGED_ROWS], scales[:_JUDGED_ROWS]
    sums, unswizzled = _square_sums_of(packed), _unswizzled(scales)
    linear, swizzled = _correlation(scales, sums), _correlation(unswizzled, sums)
    if swizzled > _FITS or abs(linear) > _SAYS_NOTHING * abs(swizzled) or sums.mean() > _MOST_SQUARES:
        return
    others = (np.roll(order, shift, axis=0) for order in (scales, unswizzled) for shift in _OTHER_ORDERS)
    if all(abs(_correlation(other, sums)) < _SAYS_NOTHING * abs(swizzled) for other in others):
        raise CheckpointError(
            f"{where} is in a swizzled order (tiles of 128 x 4): its scales fit the blocks there (correlation"
            f" {swizzled:.2f}) and not in the linear order that was expected ({linear:.2f}): export the scales as"
            " ModelOpt writes them, row by row"
        )


def _unswizzled(scales: np.ndarray) -> np.ndarray:
    """Scales [N, K/16] stored in tiles of 32 x 4 x 4, in the order in which their blocks lie."""
    rows, groups = scales.shape
    tiles = scales.reshape(rows // _TILE_ROWS, groups // _TILE_GROUPS, 32, 4, _TILE_GROUPS)
    return tiles.transpose(0, 3, 2, 1, 4).reshape(rows, groups)


def _square_sums_of(packed: np.ndarray) -> np.ndarray:
    """float32 [N, K/16]: the sum of the squares of the codes of each block."""
    squares = np.take(_square_sums(), packed.reshape(-1), mode="clip").reshape(-1, GROUP // 2)
    return (squares @ np.ones(GROUP // 2, np.float32)).reshape(len(packed), -1)  # quicker than .sum(-1)


def _correlation(scales: np.ndarray, square_sums: np.ndarray) -> float:
    """Of log(scale) and log(sum of squares of the codes), both [rows, groups], beyond what whole rows and whole groups
    have in common; 0.0 where there is nothing to go by. A zero counts as the smallest number: it is rare."""
    a = _without_common(_log_scales()[scales])
    b = _without_common(np.log2(np.maximum(square_sums, 0.25)))
    scale = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / scale if scale > 1e-6 * a.size else 0.0


def _without_common(values: np.ndarray) -> np.ndarray:
    # Sums, not .mean(): its checks in Python take longer than these few numbers, and hold the interpreter lock.
    rows, columns = values.shape
    of_rows = np.add.reduce(values, 1, keepdims=True) / np.float32(columns)
    of_columns = np.add.reduce(values, 0) / np.float32(rows)
    of_columns -= np.add.reduce(of_columns) / np.float32(columns)
    return (values - of_rows - of_columns).reshape(-1)


@cache
def _square_sums() -> np.ndarray:
    """float32 [256]: the sum of the squares of the two codes in a byte."""
    squares = np.square(np.array(E2M1_VALUES, np.float32))
    return (squares[:, None] + squares[None, :]).reshape(-1)


@cache
def _log_scales() -> np.ndarray:
    """float32 [256]: log2 of each E4M3 byte, its sign ignored; zero as if it were the smallest, 2^-9."""
    exponent, mantissa = np.divmod(np.arange(128), 8)
    values = np.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9)
    return np.tile(np.log2(np.maximum(values, 2.0**-9)), 2).astype(np.float32)
