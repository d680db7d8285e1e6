"""The memory of the expert cache as a card sees it."""

from __future__ import annotations

import ctypes
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


class CacheMemory:
    """The memory of an ExpertCache as the card sees it: page-locked as its rows come into use."""

    def __init__(self, cache: ExpertCache, device):
        rows, self.block_bytes = cache.arena.shape
        self.address = address(cache.arena)
        # Cached blocks fill from the front, a prompt's ring lies behind them: two ranges that grow.
        borders = (0, cache.slots, rows)
        self._ranges = [
            (first, PageLock(self.address + first * self.block_bytes, (last - first) * self.block_bytes,
                             self.block_bytes, device.locker))
            for first, last in pairwise(borders)
        ]  # fmt: skip
        self._refused = False
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

    def address_of(self, row: int) -> int:
        return self.address + row * self.block_bytes

    def is_seen(self, row: int) -> bool:
        """Can the card read this row by itself? Its memory is locked now, if the driver lets it."""
        first, lock = self._ranges[-1] if row >= self._ranges[-1][0] else self._ranges[0]
        end = (row - first + 1) * self.block_bytes
        if end > lock.locked_bytes and not self._refused:
            problem = lock.grow(end)
            if problem is not None:
                self._refused = True
                say(f"cache: {problem}; experts beyond that take the way through a small ring, which is slower")
        return end <= lock.locked_bytes

    def give_back(self) -> int:
        """Unlock a chunk at the end, which nothing on the card may be reading, and lock no more. Its bytes; 0: none."""
        self._refused = True
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
        addresses = memory.address + memory.block_bytes * np.array(rows, np.int64)
        if self.keeper.behind:
            self._tell_hits(layer, experts, rows, missing)
        if max(rows) < memory.seen_rows or all([memory.is_seen(row) for row in rows]):
            return Fetch(addresses, missing, wait)
        ring = self._open_ring()
        hidden = [rank for rank, row in enumerate(rows) if not memory.is_seen(row)]
        sources = addresses[hidden].tolist()
        places = [ring.address + rank * memory.block_bytes for rank in hidden]
        addresses[hidden] = places

        def wait_and_copy() -> None:
            wait()
            for place, source in zip(places, sources, strict=True):
                ctypes.memmove(place, source, memory.block_bytes)

        return Fetch(addresses, sorted({*missing, *hidden}), wait_and_copy)

    def _tell_hits(self, layer: int, experts: list[int], rows: list[int], missing: list[int]) -> None:
        """What is there, once more: the table may have been emptied after it came."""
        first = layer * self.cache.store.n_experts
        hits = [(first + experts[rank], row) for rank, row in enumerate(rows) if rank not in missing]
        self.keeper.came([block for block, _ in hits], [row for _, row in hits])

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
                refusal = str(problem)  # alone: the error would hold what was made half
            self._device.wait()
            if not self._memory.give_back():
                raise EngineError(
                    f"the driver does not page-lock memory for {what}, and the card reaches no other: {refusal}"
                )
            self.keeper.start_over()

    def close(self) -> None:
        if self._ring is not None:
            self._ring.close()
            self._ring = None
