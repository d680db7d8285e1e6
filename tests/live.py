"""What a live cache did, batch by batch, to be held against a replay."""

import numpy as np

from nemolab.policy.core import USEFUL
from nemolab.simulate import replay

COUNTS = ("hits", "misses", "issued", "useful", "wasted")


def watch(cache) -> list[list[int]]:
    """A list that grows by COUNTS of each batch from now on; a prefetch belongs to the batch it is made for."""
    batches, before = [], [0] * len(COUNTS)
    look_up, stream = cache.lookup_rows, cache.stream_rows

    def note():
        now = [sum(getattr(counts, name) for counts in cache._counts.values()) for name in COUNTS]
        batches.append([after - earlier for after, earlier in zip(now, before, strict=True)])
        before[:] = now

    def lookup_rows(*arguments):
        rows = look_up(*arguments)
        note()
        return rows

    def stream_rows(*arguments):
        yield from stream(*arguments)
        note()

    cache.lookup_rows, cache.stream_rows = lookup_rows, stream_rows
    return batches


def count_batches(lookups, policy: str, **settings) -> np.ndarray:
    """The same of a replay: int64 [batches, COUNTS]."""
    result = replay(lookups, policy, **settings)
    misses = result.misses_by_batch()
    useful = np.add.reduceat(result.outcome & USEFUL != 0, lookups.starts[:-1], dtype=np.int64)
    return np.stack([np.diff(lookups.starts) - misses, misses, result.issued, useful, result.wasted], axis=1)
