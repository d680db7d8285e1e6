"""Write blocks to a preallocated file, past the page cache where that works."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from nemolab.errors import StoreError
from nemolab.store import direct_io
from nemolab.units import PAGE_BYTES


class BlockWriter:
    """A file of `blocks` blocks, reserved at once and written block by block from any thread.

    .direct  whether writes were seen to bypass the page cache
    Raises StoreError, in words, when the disk cannot hold the file.
    """

    def __init__(self, path: Path, block_bytes: int, blocks: int, announce: Callable[[str], None]):
        self.path, self.block_bytes, self.total_bytes = path, block_bytes, block_bytes * blocks
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC
        self._descriptor, reason = direct_io.open_direct(path, flags)
        self.direct = self._descriptor is not None
        try:
            if self.direct:
                self._reserve()
                reason = self._find_objection()
                if reason:
                    os.close(self._descriptor)
                    self.direct = False
            if not self.direct:
                self._descriptor = None
                announce(f"{path.parent}: writing through the page cache, because {reason}")
                self._descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
                self._reserve()
        except BaseException:
            self.close()
            raise

    def write(self, block: int, buffer: np.ndarray) -> None:
        """Put one block (uint8 [block_bytes], page-aligned) in its place."""
        if direct_io.address(buffer) % PAGE_BYTES or buffer.nbytes != self.block_bytes:
            raise StoreError(f"{self.path}: a block is written from {self.block_bytes} page-aligned bytes")
        source, start, done = memoryview(buffer), block * self.block_bytes, 0
        while done < self.block_bytes:
            try:
                count = os.pwritev(self._descriptor, [source[done:]], start + done)
            except InterruptedError:
                continue
            except OSError as problem:
                raise StoreError(self._complaint(start + done, problem)) from problem
            # A direct write must start on a page: the broken page at the end of a short one is written again.
            progress = count if not self.direct else (done + count) // PAGE_BYTES * PAGE_BYTES - done
            if progress <= 0:
                raise StoreError(f"{self.path}: writing at offset {start + done}: {count} bytes went, no whole page")
            done += progress

    def flush(self) -> None:
        """Make what was written survive a power cut."""
        try:
            os.fsync(self._descriptor)
        except OSError as problem:
            raise StoreError(self._complaint(0, problem)) from problem

    def close(self) -> None:
        """Close the file. Closing twice is fine."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _reserve(self) -> None:
        if not self.total_bytes:
            return
        try:
            try:
                os.posix_fallocate(self._descriptor, 0, self.total_bytes)
            except OSError as problem:
                # Where a file system cannot reserve, libc tries to write instead, which O_DIRECT refuses.
                if problem.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENODEV):
                    raise
                os.ftruncate(self._descriptor, self.total_bytes)
        except OSError as problem:
            raise StoreError(self._complaint(0, problem)) from problem

    def _find_objection(self) -> str:
        """Why direct writes do not work here, or nothing. Tries a real one; the block is written again later."""
        if not self.total_bytes:
            return "there is nothing to write"
        try:
            os.pwritev(self._descriptor, [direct_io.aligned_buffer(self.block_bytes)], 0)
        except OSError as problem:
            if problem.errno == errno.ENOSPC:
                raise StoreError(self._complaint(0, problem)) from problem
            name = errno.errorcode.get(problem.errno, problem.errno)
            return f"an aligned write of {self.block_bytes} bytes fails ({name})"
        if direct_io.count_cached_pages(self._descriptor, 0, self.block_bytes):
            return "O_DIRECT is accepted, but the writes go through the page cache"
        return ""

    def _complaint(self, offset_bytes: int, problem: OSError) -> str:
        if problem.errno in (errno.ENOSPC, errno.EDQUOT):
            status = os.statvfs(self.path.parent)
            return (
                f"{self.path}: the disk is full: {self.total_bytes:,} bytes are needed for this file, "
                f"{status.f_bavail * status.f_frsize:,} are free ({problem.strerror})"
            )
        return f"{self.path}: writing {self.block_bytes} bytes at offset {offset_bytes} failed: {problem.strerror}"
