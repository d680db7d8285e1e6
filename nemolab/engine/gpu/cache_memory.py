"""The memory of the expert cache as a card sees it."""

from __future__ import annotations

from itertools import pairwise

from nemolab.progress import say
from nemolab.store import ExpertCache
from nemolab.store.direct_io import address
from nemolab.store.page_lock import PageLock


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

    @property
    def locked_bytes(self) -> int:
        return sum(lock.locked_bytes for _, lock in self._ranges)

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
                say(f"cache: {problem}; experts beyond that are copied to the card whole")
        return end <= lock.locked_bytes

    def close(self) -> None:
        """Nothing on the card may be reading it any more."""
        for _, lock in self._ranges:
            lock.close()
