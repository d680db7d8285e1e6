"""File names of a store, and writing files so that a half-written one never carries its final name."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from nemolab.errors import StoreError

EXPERTS = "experts.bin"
GLOBALS = "globals.safetensors"
DENSE = "dense.safetensors"
CHECKSUMS = "checksums.npy"
MANIFEST = "manifest.json"
PARTIAL = ".partial"  # ending of everything unfinished
CHUNK_BYTES = 8 << 20

try:  # ISA-L's crc32 gives the same numbers as zlib's, at about four times the speed
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32


@contextlib.contextmanager
def finished_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write that appears under its name only when all of it is on disk.

    Written as `<name>.partial`, flushed, fsynced, renamed; removed when the block fails. Raises StoreError on a full
    disk or a read-only folder.
    """
    partial = path.with_name(path.name + PARTIAL)
    try:
        with open(partial, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        rename_durably(partial, path)
    except OSError as problem:
        raise StoreError(f"{path}: cannot be written ({problem.strerror or problem})") from problem
    finally:
        partial.unlink(missing_ok=True)


def rename_durably(partial: Path, final: Path) -> None:
    """Rename, and make the rename itself survive a power cut."""
    os.replace(partial, final)
    folder = os.open(final.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def file_crc32(path: Path) -> int:
    """crc32 of a whole file, read in pieces."""
    found = 0
    try:
        with open(path, "rb", buffering=0) as file:
            buffer = np.empty(CHUNK_BYTES, np.uint8)
            while count := file.readinto(memoryview(buffer)):
                found = crc32(buffer[:count], found)
    except OSError as problem:
        raise StoreError(f"{path}: cannot be read ({problem.strerror})") from problem
    return found
