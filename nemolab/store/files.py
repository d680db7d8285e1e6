"""File names of a store, and writing files so that a half-written one never carries its final name."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from nemolab.errors import StoreError
from nemolab.system.mounts import free_bytes
from nemolab.units import show_bytes

EXPERTS = "experts.bin"
GLOBALS = "globals.safetensors"
DENSE = "dense.safetensors"
CHECKSUMS = "checksums.npy"
MANIFEST = "manifest.json"
PARTIAL = ".partial"  # ending of everything unfinished
CHUNK_BYTES = 4 << 20

try:  # ISA-L's crc32 gives the same numbers as zlib's, sooner
    from isal.isal_zlib import crc32, crc32_combine
except ImportError:
    from zlib import crc32

    crc32_combine = None  # zlib has it, Python's module does not hand it out


@contextlib.contextmanager
def finished_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write that appears under its name only when all of it is on disk.

    Written as `<name>.partial`, flushed, fsynced, renamed; removed when the block fails. The new name itself is on
    disk after `sync_folder`. Raises StoreError on a full disk or a read-only folder.
    """
    partial = path.with_name(path.name + PARTIAL)
    try:
        with open(partial, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        rename(partial, path)
    except OSError as problem:
        why = f"cannot be written ({problem.strerror or problem})"
        if problem.errno in (errno.ENOSPC, errno.EDQUOT):
            why += f": {free_bytes(path.parent):,} bytes are free"
        raise StoreError(f"{path}: {why}") from problem
    finally:
        with contextlib.suppress(OSError):  # the failure that brought us here matters more
            partial.unlink(missing_ok=True)


def rename(partial: Path, final: Path) -> None:
    """Give a file its final name. Raises StoreError."""
    try:
        os.replace(partial, final)
    except OSError as problem:
        raise StoreError(f"{final}: cannot be put in its place ({problem.strerror or problem})") from problem


def sync_folder(folder: Path) -> None:
    """Make what was renamed in a folder survive a power cut. Raises StoreError."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as problem:
        raise StoreError(f"{folder}: its names cannot be written ({problem.strerror or problem})") from problem


def allocated_bytes(path: Path) -> int:
    """Bytes of disk that a file holds, reserved ones too; 0 if it is not there."""
    try:
        return path.lstat().st_blocks * 512
    except OSError:
        return 0


def say_full(folder: Path, needed_bytes: int, held_bytes: int, problem: OSError) -> str:
    """A full disk or quota in words: what is needed, what is there, what is missing."""
    free = free_bytes(folder)
    what = "the quota is used up" if problem.errno == errno.EDQUOT else "the disk is full"
    text = f"{what}: {needed_bytes:,} bytes are needed, {held_bytes:,} of them are there, {free:,} are free"
    missing = needed_bytes - held_bytes - free
    if missing > 0:
        text += f": {missing:,} ({show_bytes(missing)}) are missing"
    return f"{text} ({problem.strerror})"


def file_crc32(path: Path) -> int:
    """crc32 of a whole file, read in pieces."""
    found = 0
    try:
        with open(path, "rb", buffering=0) as file:
            buffer = np.empty(CHUNK_BYTES, np.uint8)
            while count := file.readinto(memoryview(buffer)):
                found = crc32(buffer[:count], found)
    except OSError as problem:
        raise StoreError(f"{path}: cannot be read ({problem.strerror or problem})") from problem
    return found


def combine_crc32(first: int, second: int, second_bytes: int) -> int:
    """The crc32 of two runs of bytes, from the crc32 of each and the length of the second.

    A crc is linear over bits: feeding n zero bytes to it is a 32 x 32 matrix, squared once a bit of n.
    """
    if crc32_combine is not None:
        return crc32_combine(first, second, second_bytes)
    return combine_crc32_plain(first, second, second_bytes)


def combine_crc32_plain(first: int, second: int, second_bytes: int) -> int:
    """As `combine_crc32`, by hand."""
    if not second_bytes:
        return first
    one_zero_bit = [0xEDB88320, *(1 << bit for bit in range(31))]
    matrix = _square(_square(_square(one_zero_bit)))  # eight zero bits
    while second_bytes:
        if second_bytes & 1:
            first = _apply(matrix, first)
        matrix, second_bytes = _square(matrix), second_bytes >> 1
    return first ^ second


def _apply(matrix: list[int], vector: int) -> int:
    found = 0
    for row in matrix:
        if not vector:
            break
        if vector & 1:
            found ^= row
        vector >>= 1
    return found


def _square(matrix: list[int]) -> list[int]:
    return [_apply(matrix, row) for row in matrix]
