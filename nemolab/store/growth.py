"""Memory for a cache that fills: taken as blocks come in, and asked after again on the way."""

from __future__ import annotations

from nemolab.progress import say
from nemolab.system.memory import read_memory
from nemolab.units import show_bytes

STEP_BYTES = 64 * 2**20  # memory is asked after again each time the cache has grown by so much


class Growth:
    """How many rows of a cache memory was found for.

    rows   that it may have at most; least  that it needs whatever memory says
    .open  whether memory must be asked after before more blocks come in
    """

    def __init__(self, rows: int, block_bytes: int, least: int):
        self._rows, self._block_bytes, self._least = rows, block_bytes, least
        self._granted = 0
        self.open = True

    def admit(self, wanted: int, batch: int) -> int:
        """Before blocks come into rows that were never filled: is the memory still there? Else stay at what is filled.

        wanted  blocks held if nothing left; batch  those of this lookup, which need rows whatever memory says
        Returns how many rows the cache may have from now on; less than before was said.
        """
        while self._granted < min(wanted, self._rows):
            step = min(max(1, STEP_BYTES // self._block_bytes), self._rows - self._granted)
            memory = read_memory()
            if memory.room_bytes >= step * self._block_bytes:
                self._granted += step
                continue
            stay = min(max(self._granted, batch, self._least), self._rows)
            say(
                f"cache: stays at {stay:,} of {self._rows:,} blocks: {show_bytes(memory.available_bytes)} are left "
                f"(limit: {memory.tightest.name}), {show_bytes(memory.reserve_bytes)} must stay free"
            )
            self._granted = self._rows = stay
        self.open = self._granted < self._rows
        return self._rows
