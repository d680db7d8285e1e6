"""Read experts from `experts.bin`: one aligned pread each, straight into the caller's memory."""

import errno
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from nemolab.errors import StoreError
from nemolab.progress import say
from nemolab.store import direct_io
from nemolab.store.pool import Pool
from nemolab.store.task import Task
from nemolab.units import PAGE_BYTES

DEFAULT_THREADS = 32

_announced: set[tuple[str, str]] = set()  # a fallback is said once per file and reason, not per reader


class BlockReader:
    """Blocks of one file, by index, into memory the caller owns.

    .mode       "direct" or "buffered": what was proven at open, not what was asked for
    .reason     how that is known, or why direct I/O was not possible
    .threads    reads in flight at most in `read_many` and `start`
    Safe to use from several threads at once. Close it, or use it in a `with` block.
    """

    def __init__(
        self,
        path: str | Path,
        block_bytes: int,
        blocks: int,
        *,
        threads: int = DEFAULT_THREADS,
        direct: bool | None = None,
        announce: Callable[[str], None] = say,
    ):
        """Open `path` and find out how it can be read.

        direct  True: direct I/O or a StoreError; False: buffered; None: direct where it works, else buffered, said
                once through `announce`
        """
        if threads < 1:
            raise StoreError(f"{threads} reader threads; 1 or more are needed")
        if block_bytes <= 0 or block_bytes % PAGE_BYTES:
            raise StoreError(f"{path}: blocks of {block_bytes} bytes cannot be read directly; whole pages are needed")
        self.path, self.block_bytes, self.blocks, self.threads = Path(path), block_bytes, blocks, threads
        self._descriptor, self.mode, self.reason = _open(self.path, block_bytes, blocks, direct)
        if direct is None and self.mode == "buffered" and (str(self.path), self.reason) not in _announced:
            _announced.add((str(self.path), self.reason))
            with _closed_if_this_fails(self._descriptor):
                announce(f"{self.path}: reading through the page cache, because {self.reason}")
        # Once, when it is closed or, by who never does that, forgotten: later its number may be another file's.
        self._close_file = weakref.finalize(self, direct_io.close_quietly, self._descriptor)
        self._must_be_direct, self._announce = bool(direct), announce
        self._lock, self._gave_up = threading.Lock(), False
        self._pool = Pool(threads, "nemolab-read")

    def __enter__(self) -> "BlockReader":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def read_into(self, block: int, buffer: np.ndarray) -> None:
        """Fill `buffer` (uint8 [block_bytes], page-aligned, writable) with one block.

        Raises StoreError for an unfit buffer, a block outside the file, a failed read (with path, offset, wanted and
        got) and a closed reader.
        """
        self._check(block, buffer)
        target = memoryview(buffer)
        start, wanted, got = block * self.block_bytes, self.block_bytes, 0
        while got < wanted:
            try:
                count = os.preadv(self._descriptor, [target[got:]], start + got)
            except InterruptedError:
                continue
            except OSError as problem:
                if problem.errno == errno.EINVAL and self._give_up_direct():
                    continue
                raise StoreError(self._complaint(start, got, problem.strerror or str(problem))) from problem
            if count == 0:
                raise StoreError(self._complaint(start, got, "the file ends there"))
            # A direct read must start on a page: what came of a broken page is read again.
            progress = count if self.mode == "buffered" else (got + count) // PAGE_BYTES * PAGE_BYTES - got
            if progress <= 0 and got + count < wanted:
                raise StoreError(self._complaint(start, got + count, "less than a page came back"))
            got = got + count if got + count == wanted else got + progress

    def read_many(self, jobs: Iterable[tuple[int, np.ndarray]]) -> None:
        """Read several (block, buffer) pairs, `threads` at a time; returns when all have arrived.

        Raises the first StoreError, after every read under way has ended: no buffer is written to afterwards.
        """
        jobs = list(jobs)
        if len(jobs) == 1:
            self.read_into(*jobs[0])
        elif jobs:
            self._start(jobs, helpers=len(jobs) - 1).wait()

    def start(self, jobs: Iterable[tuple[int, np.ndarray]]) -> "Pending":
        """Begin to read several (block, buffer) pairs and return at once; the buffers are the reader's until `wait`."""
        jobs = list(jobs)
        return self._start(jobs, helpers=len(jobs))

    def _start(self, jobs: list, helpers: int) -> "Pending":
        pending = Pending(self, jobs)
        try:
            pending.begin(helpers)
        except BaseException:  # an interrupt: the caller would not know of the reads under way
            pending.cancel()
            raise
        return pending

    def submit(self, task: Callable[[], None]) -> None:
        """Run a task of the caller's, which calls `read_into`, on one of the threads."""
        if self._descriptor is None:
            raise StoreError(f"{self.path}: the reader is closed")
        self._pool.submit(task)

    def close(self) -> None:
        """Let what was begun come to its end, then the threads, and close the file. Closing twice is fine."""
        self._pool.close()
        self._descriptor = None
        self._close_file()

    def _check(self, block: int, buffer: np.ndarray) -> None:
        if self._descriptor is None:
            raise StoreError(f"{self.path}: the reader is closed")
        if not 0 <= block < self.blocks:
            raise StoreError(f"{self.path}: no block {block}; it holds 0 to {self.blocks - 1}")
        if buffer.dtype != np.uint8 or buffer.shape != (self.block_bytes,) or not buffer.flags.c_contiguous:
            raise StoreError(
                f"{self.path}: a buffer of {buffer.dtype} {list(buffer.shape)}; "
                f"contiguous uint8 [{self.block_bytes}] is needed"
            )
        if not buffer.flags.writeable:
            raise StoreError(f"{self.path}: the buffer is read-only")
        if direct_io.address(buffer) % PAGE_BYTES:
            raise StoreError(
                f"{self.path}: the buffer starts {direct_io.address(buffer) % PAGE_BYTES} bytes into a page; "
                f"direct reads need memory aligned to {PAGE_BYTES} (see direct_io.aligned_buffer)"
            )

    def _give_up_direct(self) -> bool:
        """An aligned read was refused after the probe at open went well (overlay over several file systems does so):
        go on through the page cache and say so. False where that is no way out.
        """
        with self._lock:
            if self.mode == "buffered":
                return self._gave_up  # a thread that began while the mode was another
            if self._must_be_direct:
                return False
            plain = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            os.dup2(plain, self._descriptor, inheritable=False)  # other threads go on with the same descriptor
            os.close(plain)
            self.mode, self.reason, self._gave_up = "buffered", "a later aligned read was refused (EINVAL)", True
            self._announce(f"{self.path}: reading through the page cache from now on, because {self.reason}")
            return True

    def _complaint(self, start: int, got: int, why: str) -> str:
        return f"{self.path}: reading {self.block_bytes} bytes at offset {start} got {got}: {why}"


class _Helper(Task):
    """One of the reader's threads at work on reads that somebody waits for."""

    __slots__ = ("_pending",)

    def __init__(self, pending: "Pending"):
        super().__init__()
        self._pending = pending

    def work(self) -> None:
        self._pending.drain()


class Pending:
    """Reads of one reader. `wait` ends when all have arrived, and raises the first failure.

    None is begun before `begin`: who must not lose sight of reads under way when an interrupt comes notes them first.
    """

    def __init__(self, reader: BlockReader, jobs: Iterable[tuple[int, np.ndarray]]):
        self._reader = reader
        self._jobs = iter(list(jobs))  # next() on it is atomic, so every job is taken once
        self._failure: BaseException | None = None
        self._helpers: list[_Helper] = []

    def begin(self, helpers: int) -> None:
        """Let so many of the reader's threads at it, and return at once."""
        # The threads share one iterator: a task per thread, not per read, keeps Python out of the way.
        for _ in range(min(helpers, self._reader.threads)):
            helper = _Helper(self)
            self._helpers.append(helper)
            self._reader.submit(helper.run)

    def wait(self) -> None:
        """Help until nothing is left, then let the others finish."""
        try:
            self.drain()
        finally:
            if self._helpers:
                self.settle()
        if self._failure is not None:
            raise self._failure

    def cancel(self) -> None:
        """Start no further read, and return once those under way have ended."""
        self._failure = self._failure or StoreError("the reads were cancelled")
        self.settle()

    def drain(self) -> None:
        for block, buffer in self._jobs:
            if self._failure is not None:
                return
            try:
                self._reader.read_into(block, buffer)
            except BaseException as failure:  # handed to the thread that waits
                self._failure = failure
                return

    def settle(self) -> None:
        # An interrupt must not leave a thread writing into memory that the caller is about to reuse.
        try:
            self._let_helpers_end()
        except BaseException as interrupt:
            self._failure = self._failure or interrupt
            self._let_helpers_end()
            raise

    def _let_helpers_end(self) -> None:
        for helper in self._helpers:  # those that stand in line behind other work have come too late to help
            helper.call_off()
        for helper in self._helpers:
            helper.wait()


def _open(path: Path, block_bytes: int, blocks: int, direct: bool | None) -> tuple[int, str, str]:
    """Descriptor, mode and reason."""
    try:
        reason = "buffered reads were asked for"
        if direct is not False:
            descriptor, reason = direct_io.open_direct(path, os.O_RDONLY)
            if descriptor is not None:
                with _closed_if_this_fails(descriptor):
                    proof = direct_io.prove_direct(descriptor, block_bytes, blocks)
                if proof.direct:
                    return descriptor, "direct", proof.reason
                direct_io.close_quietly(descriptor)
                reason = proof.reason
            if direct:
                raise StoreError(f"{path}: direct I/O was asked for and is not to be had: {reason}")
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as problem:
        raise StoreError(f"{path}: cannot be opened ({problem.strerror})") from problem
    with _closed_if_this_fails(descriptor):
        # Blocks are read whole and in no order: reading ahead would fetch what nobody asked for.
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    return descriptor, "buffered", reason


@contextmanager
def _closed_if_this_fails(descriptor: int) -> Iterator[None]:
    try:
        yield
    except BaseException:
        direct_io.close_quietly(descriptor)
        raise
