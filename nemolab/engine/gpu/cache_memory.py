"""The memory of the expert cache as a card sees it."""

from __future__ import annotations

import ctypes
import math
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import TypeVar

import numpy as np

from nemolab.engine.gpu.moe_step import Fetch
from nemolab.engine.gpu.pinned import NotLocked, PinnedArray
from nemolab.errors import EngineError
from nemolab.progress import say
from nemolab.store import ExpertCache
from nemolab.store.direct_io import address
from nemolab.store.page_lock import PageLock

Made = TypeVar("Made")
ASK_AGAIN_S = 1.0  # after RAM was too short to lock more of it


class CacheMemory:
    """The memory of an ExpertCache as the card sees it: page-locked as its rows come into use.

    .addresses  int64, of each row
    .hidden   some rows could not be locked; .is_late  some of those are now, so that what they hold is to be told again
    """

    def __init__(self, cache: ExpertCache, device):
        rows, self.block_bytes = cache.arena.shape
        begin, self._slots = address(cache.arena), cache.slots
        self.addresses = begin + self.block_bytes * np.arange(rows, dtype=np.int64)
        # Cached blocks fill from the front, a prompt's ring lies behind them: two ranges that grow.
        borders = (0, cache.slots, rows)
        self._ranges = [
            (first, PageLock(begin + first * self.block_bytes, (last - first) * self.block_bytes,
                             self.block_bytes, device.locker))
            for first, last in pairwise(borders)
        ]  # fmt: skip
        self._ask_at = -math.inf  # no memory is locked before
        self.hidden = self.is_late = False
        # It holds the memory: closed late, or never but forgotten, that stays until it is unlocked. Unmapped before, it
        # would stay locked with nothing in it, and the driver would refuse what comes to lie there next.
        self._forgotten = weakref.finalize(self, _unlock, [lock for _, lock in self._ranges], cache.arena)
        self._forgotten.atexit = False  # by then the driver may be gone, and with the process all of it goes

    @property
    def locked_bytes(self) -> int:
        return sum(lock.locked_bytes for _, lock in self._ranges)

    @property
    def seen_rows(self) -> int:
        """So many rows from the first on can the card read by itself by now."""
        return self._ranges[0][1].locked_bytes // self.block_bytes

    def addresses_seen(self, rows: np.ndarray) -> np.ndarray:
        """Of rows [n], int64; 0 for those that the card does not read by itself, whatever was tried."""
        addresses = self.addresses[rows]
        if self.seen_rows < self._slots and rows.max() >= self.seen_rows:
            addresses[[not self.lock_row(row) for row in rows.tolist()]] = 0
        return addresses

    def lock_row(self, row: int) -> bool:
        """Can the card read this row by itself? Its memory is locked now, where it is not yet and if that may be."""
        first, lock = self._ranges[-1] if row >= self._ranges[-1][0] else self._ranges[0]
        end = (row - first + 1) * self.block_bytes
        if end > lock.locked_bytes and time.monotonic() >= self._ask_at:
            problem = lock.grow(end)
            if problem is None:
                self.hidden, self.is_late = False, self.hidden or self.is_late
            elif not self.hidden:
                self.hidden = True
                say(f"cache: {problem}; experts beyond that take the way through a small ring, which is slower")
            if problem is not None:  # the driver's word stands, RAM may be there again
                self._ask_at = math.inf if problem.by_driver else time.monotonic() + ASK_AGAIN_S
        return end <= lock.locked_bytes

    def give_back(self) -> int:
        """Unlock a chunk at the end, which nothing on the card may be reading, and lock no more. Its bytes; 0: none."""
        self._ask_at, self.hidden = math.inf, True
        return next((size for _, lock in self._ranges if (size := lock.shrink())), 0)

    def close(self) -> None:
        """Nothing on the card may be reading it any more. Closing twice is fine."""
        _unlock([lock for _, lock in self._ranges])
        self._forgotten.detach()  # not before: what an interrupt leaves locked is unlocked the next time


def _unlock(locks: Sequence[PageLock], memory: np.ndarray | None = None) -> None:
    """memory  what they lock of, held until it is not locked any more"""
    with ExitStack() as stack:  # each whatever the others raise
        for lock in reversed(locks):
            stack.callback(lock.close)


class Finder:
    """Fetches the experts that a layer chose, and says where the card can read them.

    Rows that the driver did not lock are copied by the CPU into a ring of page-locked memory with a place for each rank
    (the card is done with a layer's experts once the next layer's choice is known), taken when the first one turns up.
    keeper  told of what the card sees no longer, should locked memory have to be given back for the ring
    """

    def __init__(self, cache: ExpertCache, memory: CacheMemory, keeper, device):
        self.cache, self.keeper, self._memory, self._device = cache, keeper, memory, device
        self._top_k = cache.store.config.top_k
        self._ring: PinnedArray | None = None

    def fetch(self, layer: int, experts: list[int]) -> Fetch:
        """Where the chosen experts of a layer are, or will be; by rank. Raises StoreError, EngineError."""
        memory = self._memory
        rows, missing, wait = self.cache.fetch(layer, experts)
        addresses = memory.addresses[rows]
        if max(rows) < memory.seen_rows:
            return Fetch(addresses, missing, wait)
        for row in rows:
            memory.lock_row(row)
        if memory.is_late:
            memory.is_late = False
            self.cache.retell()
        if max(rows) < memory.seen_rows:
            return Fetch(addresses, missing, wait)
        ring = self._open_ring()
        hidden = [rank for rank, row in enumerate(rows) if row >= memory.seen_rows]
        sources = addresses[hidden].tolist()
        places = [ring.address + rank * memory.block_bytes for rank in hidden]
        addresses[hidden] = places

        def wait_and_copy() -> None:
            wait()
            for place, source in zip(places, sources, strict=True):
                ctypes.memmove(place, source, memory.block_bytes)

        return Fetch(addresses, sorted({*missing, *hidden}), wait_and_copy)

    def _open_ring(self) -> PinnedArray:
        if self._ring is None:
            shape, locker = (self._top_k, self._memory.block_bytes), self._device.locker
            what = f"the {self._top_k} experts of a layer"
            self._ring = self.make_room(what, lambda: PinnedArray(shape, np.uint8, locker))
        return self._ring

    def make_room(self, what: str, make: Callable[[], Made]) -> Made:
        """What `make` returns, which page-locks memory for `what`: where the cache has taken all, it gives some back.

        Between tokens, or once a layer's choice is known and before it is said where its experts lie, as in `fetch`:
        what the card reads by then is waited for, no graph is being recorded, and whether it sees a row is asked again
        afterwards. Raises EngineError where that does not suffice.
        """
        while True:
            try:
                return make()
            except NotLocked as problem:
                # Alone: the error would hold what was made half. Where RAM is short, unlocking some of it frees none.
                refusal, may_help = str(problem), problem.by_driver
            self._device.wait()
            if not may_help or not self._memory.give_back():
                raise EngineError(f"no memory is page-locked for {what}, and the card reaches no other: {refusal}")
            self.start_over()

    def start_over(self) -> None:
        """Let the card know anew what is where, from nothing. It must be done with all that was queued."""
        self.keeper.start_over()
        self.cache.retell()

    def close(self) -> None:
        if self._ring is not None:
            self._ring.close()
            self._ring = None
