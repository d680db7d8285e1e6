"""The memory of the expert cache as a card sees it."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise

import numpy as np

from nemolab.progress import say
from nemolab.store import ExpertCache
from nemolab.store.direct_io import address
from nemolab.store.page_lock import PageLock

ASK_AGAIN_S = 1.0  # after RAM was too short to lock more of it


class CacheMemory:
    """The memory of an ExpertCache as the card sees it: page-locked as its rows come into use.

    .addresses  int64, of each row
    .hidden   some rows could not be locked
    .is_late  some of those are locked now: what they hold must be told again
    """

    def __init__(self, cache: ExpertCache, device):
        rows, self.block_bytes = cache.arena.shape
        begin = address(cache.arena)
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
