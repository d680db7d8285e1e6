"""Bytes from files by positioned reads into our own memory. Files of strangers are never mapped: a file that shrinks
under a mapping kills the process, and mapped pages count against nobody's budget."""

import os
from pathlib import Path

import numpy as np

from nemolab.errors import CheckpointError


def read_range(path: str | Path, offset_bytes: int, nbytes: int) -> np.ndarray:
    """`nbytes` bytes of a file from `offset_bytes` on: uint8 [nbytes]. CheckpointError if the file ends early."""
    buffer = np.empty(nbytes, dtype=np.uint8)
    read_range_into(path, offset_bytes, buffer)
    return buffer


def read_range_into(path: str | Path, offset_bytes: int, buffer) -> None:
    """Fill a writable buffer from a file. Short reads are continued; the end of the file is an error with numbers."""
    view = memoryview(buffer).cast("B")
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be opened: {error.strerror or error}") from error
    try:
        done = 0
        while done < len(view):
            got = os.preadv(descriptor, [view[done:]], offset_bytes + done)
            if got == 0:
                raise CheckpointError(
                    f"{path} ended early: wanted {len(view):,} bytes at offset {offset_bytes:,}, got {done:,};"
                    " was it changed while it was read?"
                )
            done += got
    except OSError as error:
        raise CheckpointError(
            f"{path}: reading {len(view):,} bytes at offset {offset_bytes:,} failed after {done:,}: {error.strerror}"
        ) from error
    finally:
        os.close(descriptor)
