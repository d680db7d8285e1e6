"""Transpose matrices of 4-bit codes: plainly, and compiled for the many gigabytes of a full model."""

import functools
from collections.abc import Callable

import numpy as np

Transpose = Callable[[np.ndarray, np.ndarray], None]

# Compiling takes 2 s, once a machine; it saves half a millisecond of a core or more for each full Super expert (1.3
# against 0.7 ms, measured beside other work), and the interpreter lock, which threads of the plain one wait for.
WORTH_COMPILING_BYTES = 1 << 30
_STRIP_ROWS = 64


def transpose_nibbles(packed: np.ndarray, out: np.ndarray) -> None:
    """Transpose 4-bit codes, two to a byte along the last axis, low nibble first.

    packed  uint8 [R, C/2] holds codes [R, C], R and C even
    out     uint8 [C, R/2] receives codes [C, R]
    Doing it twice gives the first bytes back, so it is its own inverse.
    """
    # By strips of rows: what is in between stays in the cache, and in memory that malloc need not fetch each time.
    for row in range(0, packed.shape[0], _STRIP_ROWS):
        strip = packed[row : row + _STRIP_ROWS]
        even, odd, there = strip[0::2], strip[1::2], out[:, row // 2 : (row + _STRIP_ROWS) // 2]
        there[0::2] = ((even & 0x0F) | (odd << 4)).T
        there[1::2] = ((even >> 4) | (odd & 0xF0)).T


def choose_transpose(total_bytes: int) -> Transpose:
    """The compiled transposition where so many bytes repay compiling it, or where that was done already."""
    worth_it = total_bytes >= WORTH_COMPILING_BYTES or _compile.cache_info().currsize
    return transpose_nibbles_fast if worth_it else transpose_nibbles


def warm_up() -> None:
    """Compile now, or load what was compiled on this machine before."""
    transpose_nibbles_fast(np.zeros((16, 8), np.uint8), np.zeros((16, 8), np.uint8))


def transpose_nibbles_fast(packed: np.ndarray, out: np.ndarray) -> None:
    """As `transpose_nibbles`, about twice as fast and without holding the interpreter lock."""
    if packed.shape[0] % 16 or packed.shape[1] % 8:  # not whole tiles
        transpose_nibbles(packed, out)
    else:
        if not packed.view(np.uint64).flags.aligned:  # a shard's tensors may lie at any byte
            packed = packed.copy()
        _compile()(packed.view(np.uint64), out.view(np.uint64))


@functools.cache
def _compile() -> Callable:
    import numba

    return numba.njit(nogil=True, cache=True)(_transpose_tiles)


_LOW = np.uint64(0x0F0F0F0F0F0F0F0F)
_SWAPS = (  # distance in rows, in bits, and the bytes that stay: three exchanges transpose 8 x 8 bytes
    (4, np.uint64(32), np.uint64(0x00000000FFFFFFFF)),
    (2, np.uint64(16), np.uint64(0x0000FFFF0000FFFF)),
    (1, np.uint64(8), np.uint64(0x00FF00FF00FF00FF)),
)


def _transpose_tiles(packed, out):
    """Tiles of 16 rows by 8 bytes: pair the nibbles of neighbouring rows, then transpose bytes within registers."""
    four = np.uint64(4)
    tile = np.empty(8, np.uint64)
    for row in range(0, packed.shape[0], 16):
        for column in range(packed.shape[1]):
            for high in range(2):
                for i in range(8):
                    even, odd = packed[row + 2 * i, column], packed[row + 2 * i + 1, column]
                    tile[i] = (
                        ((even >> four) & _LOW) | (odd & ~_LOW) if high else (even & _LOW) | ((odd & _LOW) << four)
                    )
                for distance, bits, kept in _SWAPS:
                    for i in range(8):
                        if not i & distance:
                            moved = ((tile[i] >> bits) ^ tile[i + distance]) & kept
                            tile[i] ^= moved << bits
                            tile[i + distance] ^= moved
                for i in range(8):
                    out[16 * column + 2 * i + high, row // 16] = tile[i]
