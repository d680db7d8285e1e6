"""Memory that a CUDA card reads by itself: ranges of a mapping, page-locked by the driver piece by piece as used.

Not PyTorch's pinned allocator: it rounds every request up to a power of two (`nemolab.system.pinned`). Ordinary pages,
registered where they lie, cost what they hold, take O_DIRECT reads, and are read in place by kernels under the address
they have here.

The driver's own interface (libcuda) by ctypes: it is wherever a driver is, whatever toolkit torch was built with, and
an error it returns is over with the call. The runtime's is not: there, after one failed registration, the next call of
anybody reports it again.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import ClassVar, Protocol

import numpy as np

from nemolab.errors import StoreError
from nemolab.system.memory import read_memory
from nemolab.units import PAGE_BYTES, show_bytes

CHUNK_BYTES = 64 * 2**20
_PORTABLE_AND_MAPPED = 1 | 2
_SAME_ADDRESS_ON_THE_CARD = 91  # CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM


class Locker(Protocol):
    """What can page-lock: the driver, or a stand-in for tests. Each returns None, or why it could not."""

    def lock(self, address: int, nbytes: int) -> str | None: ...

    def unlock(self, address: int) -> str | None: ...


class Driver:
    """The CUDA driver for one card, with the context that torch uses too (the card's primary one).

    The context is retained once a card and kept until the process ends, as torch keeps it: threads go on with it.
    Raises StoreError without a driver or a card.
    """

    _contexts: ClassVar[dict[int, ctypes.c_void_p]] = {}

    def __init__(self, device: int = 0):
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as problem:
            raise StoreError(f"no CUDA driver on this machine ({problem})") from None

        def need(name: str, *arguments) -> None:
            problem = self._call(name, *arguments)
            if problem is not None:
                raise StoreError(f"CUDA card {device} cannot be used: {name} says {problem}")

        handle, context, same = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_int()
        need("cuInit", 0)
        need("cuDeviceGet", ctypes.byref(handle), device)
        if device not in self._contexts:
            need("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
            self._contexts[device] = context
        self._context = self._contexts[device]
        need("cuCtxSetCurrent", self._context)
        need("cuDeviceGetAttribute", ctypes.byref(same), _SAME_ADDRESS_ON_THE_CARD, handle)
        self._copy = self._cuda.cuMemcpyAsync  # types declared once: it is called for every expert of every layer
        self._copy.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
        self.copy_batch = getattr(self._cuda, "cuMemcpyBatchAsync_v2", None)  # from CUDA 13 on
        if self.copy_batch is not None:
            pointer, size = ctypes.c_void_p, ctypes.c_size_t
            self.copy_batch.argtypes = [pointer, pointer, pointer, size, pointer, pointer, size, pointer]
        if not same.value:
            raise StoreError(f"CUDA card {device} sees page-locked memory under other addresses than the CPU")

    def use(self) -> str | None:
        """Let the calling thread use the card: a thread that never has has no context, and no copy works without."""
        return self._call("cuCtxSetCurrent", self._context)

    def lock(self, address: int, nbytes: int) -> str | None:
        return self.use() or self._call(
            "cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _PORTABLE_AND_MAPPED
        )

    def unlock(self, address: int) -> str | None:
        return self.use() or self._call("cuMemHostUnregister", ctypes.c_void_p(address))

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        """Queue a copy between any two addresses on a stream, in a thread that does `use` the card; or StoreError."""
        status = self._copy(to, source, nbytes, stream)
        if status:
            raise StoreError(f"copying {nbytes} bytes from {source:#x} to {to:#x}: {self.name_error(status)}")

    def _call(self, name: str, *arguments) -> str | None:
        status = getattr(self._cuda, name)(*arguments)
        return self.name_error(status) if status else None

    def name_error(self, status: int) -> str:
        text = ctypes.c_char_p()
        self._cuda.cuGetErrorName(status, ctypes.byref(text))
        return text.value.decode() if text.value else f"error {status}"


class CopyBatch:
    """Copies of equally many bytes between two lists of addresses, queued many at a time.

    Between two copies of the ordinary kind the bus idles a moment; a batch, where the driver knows it, goes through
    without a pause.
    to, sources  int64 arrays of one length, looked at anew in each `run`; stream  one that is not the default
    """

    def __init__(self, driver: Driver, to: np.ndarray, sources: np.ndarray, nbytes: int, stream: int):
        self._driver, self._to, self._sources, self._nbytes, self._stream = driver, to, sources, nbytes, stream
        self._sizes = np.full(len(to), nbytes, np.uint64)
        # One set of attributes, from the first copy on: sources are read in stream order, no hints, no flags.
        self._attributes, self._start = np.array([1, 0, 0, 0, 0, 0], np.int32), np.zeros(1, np.uint64)
        self._fixed = [array.ctypes.data for array in (to, sources, self._sizes, self._attributes, self._start)]

    def run(self, first: int, count: int) -> None:
        """Queue the copies `first` to `first + count`, in any order among themselves. Raises StoreError."""
        batch = self._driver.copy_batch
        if batch is None:
            for place in range(first, first + count):
                self._driver.copy(int(self._to[place]), int(self._sources[place]), self._nbytes, self._stream)
            return
        to, sources, sizes, attributes, start = self._fixed
        status = batch(to + 8 * first, sources + 8 * first, sizes, count, attributes, start, 1, self._stream)
        if status:
            raise StoreError(f"copying {count} times {self._nbytes} bytes: {self._driver.name_error(status)}")


class NotLockable(str):
    """Why memory was not page-locked, for people. .by_driver  False: there was too little RAM for it just now"""

    by_driver: bool

    def __new__(cls, reason: str, by_driver: bool) -> NotLockable:
        made = super().__new__(cls, reason)
        made.by_driver = by_driver
        return made


class PageLock:
    """The page-locked beginning of a range of memory, grown in chunks.

    address, nbytes  a page-aligned range; row_bytes  what no chunk's border may cut (a block: a copy must not span two
                     registrations)
    .locked_bytes    so much from the start is page-locked; .chunk_bytes  in pieces of so much
    An interrupt at any moment leaves no chunk locked that `close` does not know of, and none counted that is not.
    """

    def __init__(self, address: int, nbytes: int, row_bytes: int, locker: Locker, chunk_bytes: int = CHUNK_BYTES):
        if address % PAGE_BYTES or row_bytes <= 0 or row_bytes % PAGE_BYTES or nbytes % row_bytes:
            raise StoreError(
                f"page-locking {nbytes} bytes at {address:#x} in rows of {row_bytes}: whole pages are needed"
            )
        self._address, self._nbytes, self._locker = address, nbytes, locker
        self.chunk_bytes = max(1, chunk_bytes // row_bytes) * row_bytes
        # Noted before they are locked, dropped when they are unlocked: the last may lie beyond what is locked for sure.
        self._chunks: list[int] = []
        self.locked_bytes = 0

    def grow(self, wanted_bytes: int) -> NotLockable | None:
        """Page-lock until `wanted_bytes` from the start are. None, or why it stopped: `.locked_bytes` says where.

        A chunk that cannot be locked leaves nothing behind, and the next call tries again. One that is more than the
        machine or a cgroup has left is not tried: what is locked counts like any other memory.
        """
        self._drop_unsure()
        while self.locked_bytes < min(wanted_bytes, self._nbytes):
            size = min(self.chunk_bytes, self._nbytes - self.locked_bytes)
            memory = read_memory()
            if memory.available_bytes < size:  # locking fills pages, and the kernel ends a process that has none left
                return NotLockable(
                    f"{show_bytes(self.locked_bytes)} are page-locked and no more: the next {show_bytes(size)} would "
                    f"not fit the {show_bytes(memory.available_bytes)} left (limit: {memory.tightest.name})",
                    by_driver=False,
                )
            start = self._address + self.locked_bytes
            self._chunks.append(start)
            problem = self._locker.lock(start, size)
            if problem is not None:
                self._chunks.pop()
                locked = show_bytes(self.locked_bytes)
                return NotLockable(f"the driver page-locked {locked} and no more ({problem})", by_driver=True)
            self.locked_bytes += size
        return None

    def shrink(self) -> int:
        """Unlock the last chunk, which nothing on the card may be reading any more. Its bytes; 0 where there is none.

        Raises StoreError where the driver does not unlock it.
        """
        self._drop_unsure()
        if not self._chunks:
            return 0
        size = self._address + self.locked_bytes - self._chunks[-1]
        self.locked_bytes -= size
        problem = self._locker.unlock(self._chunks[-1])
        self._chunks.pop()
        if problem is not None:
            raise StoreError(f"unlocking {size} bytes of memory failed: {problem}")
        return size

    def close(self) -> None:
        """Unlock everything; nothing on the card may be reading it any more. Closing twice is fine.

        What cannot be unlocked, or an interrupt, is raised once the rest is.
        """
        locked_to, self.locked_bytes = self._address + self.locked_bytes, 0
        problems, interrupt = [], None
        while self._chunks:
            start = self._chunks[-1]
            try:
                problem = self._locker.unlock(start)
            except BaseException as failure:
                interrupt = interrupt or failure
                problem = None
                with contextlib.suppress(BaseException):  # once more: refused, and rightly, where it had been done
                    self._locker.unlock(start)
            self._chunks.pop()
            if problem is not None and start < locked_to:
                problems.append(problem)
        if interrupt is not None:
            raise interrupt
        if problems:
            raise StoreError(f"unlocking {len(problems)} pieces of memory failed: {problems[0]}")

    def _drop_unsure(self) -> None:
        """An interrupt came while the last chunk was locked or unlocked: whether it is, the driver alone knows."""
        if self._chunks and self._chunks[-1] >= self._address + self.locked_bytes:
            self._locker.unlock(self._chunks[-1])  # refused where it is not
            self._chunks.pop()
