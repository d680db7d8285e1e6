"""How fast blocks of a store come from its disk when nothing else is done, in the run that is held against it."""

from __future__ import annotations

import time

import numpy as np

SAMPLE_BYTES = 2 * 2**30  # so much that the last reads, when fewer are under way, weigh little
BUFFERS = 64  # blocks of memory that are read into in turn: more than threads


class DiskFloor:
    """Direct reads of a store's blocks, as many under way at once as an engine has by itself; a sample a call.

    in_order  blocks one behind the other, as a prompt's pass asks for them; else in random order
    .mode     "direct", or "buffered" where direct reads are not to be had: then it is in part the page cache that was
              measured
    Close it, or use it in a `with` block.
    """

    def __init__(self, store, in_order: bool = False):
        from nemolab.store.arena import Arena

        self._block_bytes, self._blocks, self._in_order = store.block_bytes, store.manifest.blocks, in_order
        self._count, self._begin = max(1, min(self._blocks, SAMPLE_BYTES // store.block_bytes)), 0
        self._random = np.random.default_rng(0)
        self._arena = Arena(min(self._count, BUFFERS), store.block_bytes)
        self._arena.rows[:] = 0  # the memory is there before the first read
        self._reader = store.open_reader()
        self.mode = self._reader.mode

    def __enter__(self) -> DiskFloor:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def gb_s(self) -> float:
        """GB/s (10^9) of SAMPLE_BYTES, or of all there is."""
        if self._in_order:
            chosen = [(self._begin + place) % self._blocks for place in range(self._count)]
            self._begin = chosen[-1] + 1
        else:
            chosen = self._random.permutation(self._blocks)[: self._count].tolist()
        rows = self._arena.rows
        jobs = [(block, rows[number % len(rows)]) for number, block in enumerate(chosen)]
        started = time.perf_counter()
        self._reader.read_many(jobs)
        return self._count * self._block_bytes / (time.perf_counter() - started) / 1e9

    def close(self) -> None:
        """Closing twice is fine."""
        self._reader.close()
        self._arena.close()
