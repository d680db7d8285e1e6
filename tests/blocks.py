"""Random blocks behind what a cache needs of a store; reads that wait, free rows poisoned, interrupts at any line."""

import contextlib
import itertools
import sys
import threading
import types

import numpy as np

from nemolab.policy import POLICIES
from nemolab.policy.rows import N_FREE
from nemolab.store.reader import BlockReader

BLOCK = 4096
ONLINE = [name for name, policy in POLICIES.items() if not policy.future]  # those that an engine can run
LAYERS, EXPERTS, TOP_K = 3, 40, 4


def random_blocks():
    return np.random.default_rng(1).integers(0, 256, (LAYERS * EXPERTS, BLOCK), dtype=np.uint8)


def write_store(folder, data):
    """What the cache needs of a store, over these blocks."""
    path = folder / "experts.bin"
    path.write_bytes(data.tobytes())
    return types.SimpleNamespace(
        block_bytes=BLOCK,
        n_layers=LAYERS,
        n_experts=EXPERTS,
        config=types.SimpleNamespace(top_k=TOP_K),
        open_reader=lambda threads: BlockReader(path, BLOCK, len(data), threads=threads, direct=False),
    )


class Gate:
    """Reads of some blocks wait until they are let through; every read is noted when it begins and when it ends."""

    def __init__(self, cache, held=()):
        self._read, self._open = cache.reader.read_into, {block: threading.Event() for block in held}
        self.begun, self.ended = [], []
        cache.reader.read_into = self._pass

    def let_through(self, *blocks):
        for block in blocks or list(self._open):
            self._open[block].set()

    def _pass(self, block, buffer):
        self.begun.append(block)
        if block in self._open:
            assert self._open[block].wait(20), "nobody let this read through"
        self._read(block, buffer)
        self.ended.append(block)


def rows_of(cache):
    """{block: row} of all that has a row, whole or not."""
    row_of = cache._residents.book.row_of
    return {int(block): int(row_of[block]) for block in np.flatnonzero(row_of >= 0)}


def free_rows(cache):
    book = cache._residents.book._book
    return book.free[: book.numbers[N_FREE]].tolist()


def poison(cache):
    """Fill rows with 0x7F when they are free, or about to be read into: whoever still uses one shows."""
    residents = cache._residents
    vacate = residents.vacate

    def vacate_and_poison(*arguments):
        vacate(*arguments)
        rows, used = rows_of(cache), {*residents.book.find_whole(), *residents.ahead}
        for row in set(range(cache.slots)) - {rows[block] for block in used & rows.keys()}:
            cache.arena[row].fill(0x7F)

    residents.vacate = vacate_and_poison


@contextlib.contextmanager
def interrupt_after(lines, *modules):
    """Raise KeyboardInterrupt once so many lines of these modules have run in this thread."""
    passed, files = itertools.count(), {module.__file__ for module in modules}

    def trace(frame, event, argument):
        if frame.f_code.co_filename not in files:
            return None
        if event == "line" and next(passed) == lines:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
