"""Write a file of known size in place, from any thread, past the page cache where that works."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from nemolab.errors import StoreError
from nemolab.store import direct_io, files
from nemolab.units import PAGE_BYTES

_FULL = (errno.ENOSPC, errno.EDQUOT)
_CANNOT_RESERVE = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENODEV)


class PlacedFile:
    """A file of `total_bytes`, reserved at once, so that a full disk is met before the work and not after it.

    unit_bytes  whole pages: writes begin at multiples of it and are whole units, or reach to the end of the file; what
                the last one has beyond that end is cut off by `finish`
    keep        True: what the file holds already stays (a repack that goes on); otherwise it begins as zeros
    .direct     whether writes were seen to bypass the page cache
    Raises StoreError, in words, when the disk cannot hold the file.
    """

    def __init__(
        self, path: Path, total_bytes: int, unit_bytes: int, announce: Callable[[str], None], *, keep: bool = False
    ):
        if unit_bytes <= 0 or unit_bytes % PAGE_BYTES:
            raise StoreError(f"{path}: units of {unit_bytes} bytes; whole pages of {PAGE_BYTES} are needed")
        self.path, self.total_bytes, self._unit_bytes = path, total_bytes, unit_bytes
        self._reserved_bytes = -(-total_bytes // unit_bytes) * unit_bytes
        flags = os.O_RDWR | os.O_CREAT | (0 if keep else os.O_TRUNC)
        self._descriptor: int | None = None
        try:
            self._descriptor, reason = direct_io.open_direct(path, flags)
            self.direct = self._descriptor is not None
            if self.direct:
                self._reserve()
                reason = self._find_objection()
                if reason:
                    direct_io.close_quietly(self._descriptor)
                    self._descriptor, self.direct = None, False
            if not self.direct:
                announce(f"{path.parent}: writing through the page cache, because {reason}")
                self._descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
                self._reserve()
        except OSError as problem:
            self.close()
            raise StoreError(f"{path}: cannot be written ({problem.strerror or problem})") from problem
        except BaseException:
            self.close()
            raise

    def write(self, offset_bytes: int, buffer: np.ndarray) -> None:
        """Put bytes (uint8, page-aligned, whole units) in their place."""
        if direct_io.address(buffer) % PAGE_BYTES or offset_bytes % self._unit_bytes:
            raise StoreError(f"{self.path}: whole units of {self._unit_bytes} page-aligned bytes are written")
        source, done, wanted = memoryview(buffer), 0, buffer.nbytes
        if wanted % self._unit_bytes or offset_bytes + wanted > self._reserved_bytes:
            raise StoreError(
                f"{self.path}: {wanted} bytes at {offset_bytes} are no units of {self._unit_bytes} within "
                f"{self._reserved_bytes}"
            )
        while done < wanted:
            try:
                count = os.pwritev(self._descriptor, [source[done:]], offset_bytes + done)
            except InterruptedError:
                continue
            except OSError as problem:
                raise StoreError(self._complaint(offset_bytes + done, problem)) from problem
            # A direct write must start on a page: the broken page at the end of a short one is written again.
            progress = count if not self.direct else (done + count) // PAGE_BYTES * PAGE_BYTES - done
            if progress <= 0:
                raise StoreError(f"{self.path}: writing at offset {offset_bytes + done}: {count} bytes went, no page")
            done += progress

    def read(self, offset_bytes: int, buffer: np.ndarray) -> bool:
        """Fill `buffer` (as for `write`) with what the file holds there; False if it cannot be read."""
        view, done = memoryview(buffer), 0
        while done < buffer.nbytes:
            try:
                count = os.preadv(self._descriptor, [view[done:]], offset_bytes + done)
            except InterruptedError:
                continue
            except OSError:
                return False
            progress = count if not self.direct else (done + count) // PAGE_BYTES * PAGE_BYTES - done
            if progress <= 0:
                return False
            done += progress
        return True

    def finish(self) -> None:
        """Cut the file to its size, and make what was written survive a power cut."""
        try:
            if self._reserved_bytes != self.total_bytes:
                os.ftruncate(self._descriptor, self.total_bytes)
            os.fsync(self._descriptor)
        except OSError as problem:
            raise StoreError(self._complaint(0, problem)) from problem

    def close(self) -> None:
        """Close the file. Closing twice is fine."""
        if self._descriptor is not None:
            direct_io.close_quietly(self._descriptor)  # `finish` has seen to the bytes
            self._descriptor = None

    def _reserve(self) -> None:
        try:
            if os.fstat(self._descriptor).st_size > self._reserved_bytes:
                os.ftruncate(self._descriptor, self._reserved_bytes)
            if not self._reserved_bytes:
                return
            try:
                os.posix_fallocate(self._descriptor, 0, self._reserved_bytes)
            except OSError as problem:
                # Where a file system cannot reserve, libc tries to write instead, which O_DIRECT refuses.
                if problem.errno not in _CANNOT_RESERVE:
                    raise
                os.ftruncate(self._descriptor, self._reserved_bytes)
        except OSError as problem:
            raise StoreError(self._complaint(0, problem)) from problem

    def _find_objection(self) -> str:
        """Why direct writes do not work here, or nothing. Tries a real one, of what the file's first unit holds."""
        if not self._reserved_bytes:
            return "there is nothing to write"
        # Both ways: it is written now, and read back by whoever checks a sample or goes on with a cut-off repack.
        objection = direct_io.object_to(
            self._unit_bytes, direct_io.ask_alignment(self._descriptor), writes=True
        ) or direct_io.object_to(self._unit_bytes, direct_io.ask_alignment(self._descriptor))
        if objection:
            return objection
        buffer = direct_io.aligned_buffer(self._unit_bytes)
        if not self.read(0, buffer):
            return f"O_DIRECT opens, but an aligned read of {self._unit_bytes} bytes fails"
        try:
            os.pwritev(self._descriptor, [buffer], 0)
        except OSError as problem:
            if problem.errno in (*_FULL, errno.EIO, errno.EROFS):
                raise StoreError(self._complaint(0, problem)) from problem
            name = errno.errorcode.get(problem.errno, problem.errno)
            return f"an aligned write of {self._unit_bytes} bytes fails ({name})"
        if direct_io.count_cached_pages(self._descriptor, 0, self._unit_bytes):
            return "O_DIRECT is accepted, but the writes go through the page cache"
        return ""

    def _complaint(self, offset_bytes: int, problem: OSError) -> str:
        if problem.errno in _FULL:
            held_bytes = files.allocated_bytes(self.path)
            return f"{self.path}: " + files.say_full(self.path.parent, self.total_bytes, held_bytes, problem)
        return f"{self.path}: writing at offset {offset_bytes} failed: {problem.strerror or problem}"
