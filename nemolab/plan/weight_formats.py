"""What a matrix costs in a format: those of our own reader, and those that other families are published in."""

import re
from math import ceil

from nemolab.checkpoint.formats import FORMATS, matrix_bytes
from nemolab.errors import CheckpointError, UsageError

F32_BYTES = 4
# What the options offer; the formats a config states may be others, such as fp8_128x128 or int4_32.
OFFERED = ("nvfp4", "mxfp4", "fp8", "bf16")
# For experts also: as the config states, else in its dtype. Without an option, experts nobody quantised are NVFP4.
PUBLISHED = "published"
EXPERTS_AS = (*OFFERED, PUBLISHED)
DEFAULT_EXPERTS = OFFERED[0]
# Parts to whose matrices a format that is asked for all the rest does not apply: files leave them unquantised.
NOT_QUANTISED = ("router", "embeddings", "norm", "vision")
PLAIN_BYTES = {"bf16": 2, "f16": 2, "f32": 4, "f64": 8, "i64": 8, "i32": 4, "u8": 1, "bool": 1}
_ONE_SCALE = ("nvfp4", "fp8")  # one F32 factor for the matrix, kept apart from the block


def check_asked(experts_as: str | None, dense_as: str | None) -> None:
    """Raise UsageError, naming the option, for a format that is not offered; None asks for nothing."""
    for option, asked, offered in (("experts_as", experts_as, EXPERTS_AS), ("dense_as", dense_as, OFFERED)):
        if asked is not None and asked not in offered:
            raise UsageError(f"{option} is {asked!r}; one of {', '.join(offered)} was expected")


def weight_bytes(rows: int, columns: int, format: str) -> int:
    """Bytes of a matrix [rows, columns]: values and block scales, without the scalar of the matrix.

    fp8_RxC   E4M3 values and one F32 scale for each block of R x C, the last of a row or column cut off
    int4_G    4-bit integers and one BF16 scale for G of a row
    Raises CheckpointError for an unknown format, and for rows that are no whole groups.
    """
    if format in FORMATS:
        return matrix_bytes(rows, columns, format)
    if format in PLAIN_BYTES:
        return rows * columns * PLAIN_BYTES[format]
    if found := re.fullmatch(r"fp8_(\d+)x(\d+)", format):
        high, wide = int(found[1]), int(found[2])
        return rows * columns + F32_BYTES * ceil(rows / high) * ceil(columns / wide)
    if found := re.fullmatch(r"int4_(\d+)", format):
        group = int(found[1])
        if columns % group:
            raise CheckpointError(f"{format} needs rows in groups of {group} columns, found {columns} columns")
        return rows * columns // 2 + 2 * rows * (columns // group)
    raise CheckpointError(f"unknown format {format!r}; known are {', '.join(FORMATS)}, fp8_RxC, int4_G")


def fits(columns: int, format: str) -> bool:
    """Whether rows of that many columns are whole groups of a format."""
    try:
        weight_bytes(1, columns, format)
    except CheckpointError:
        return False
    return True


def matrix_scalar_bytes(format: str) -> int:
    """Bytes of the F32 factor that a matrix in a format has beside its block; inputs are taken as not calibrated."""
    return F32_BYTES if format in _ONE_SCALE else 0
