"""How fast blocks of a store come from its disk when nothing else is done: the floor of the run that needs it."""

from __future__ import annotations

import time

import numpy as np

SAMPLE_BYTES = 512 * 2**20
BUFFERS = 64  # blocks of memory that are read into in turn: more than threads


def disk_gb_s(store, repeats: int = 9) -> tuple[list[float], str]:
    """GB/s (10^9) of whole blocks in random order, as many under way at once as an engine has by itself.

    returns  a sample a repeat, and how they were read: "direct", or "buffered" where direct reads are not to be had
             (then it is in part the page cache that was measured)
    """
    from nemolab.store.arena import Arena

    random, blocks = np.random.default_rng(0), store.manifest.blocks
    count = max(1, min(blocks, SAMPLE_BYTES // store.block_bytes))
    arena, samples = Arena(min(count, BUFFERS), store.block_bytes), []
    arena.rows[:] = 0  # the memory is there before the first read
    buffers = list(arena.rows)
    with store.open_reader() as reader:
        for _ in range(repeats):
            chosen = random.permutation(blocks)[:count].tolist()
            jobs = [(block, buffers[number % len(buffers)]) for number, block in enumerate(chosen)]
            started = time.perf_counter()
            reader.read_many(jobs)
            samples.append(count * store.block_bytes / (time.perf_counter() - started) / 1e9)
        mode = reader.mode
    del buffers
    arena.close()
    return samples, mode
