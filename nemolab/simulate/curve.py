"""The whole LRU curve in one pass: hits at every budget at once.

With recency as the order of last occurrence within a batch, the cache after a batch is always a beginning of one stack
of blocks, the most recent first, whatever the budget: as many as fit. So a lookup hits if and only if the bytes from
the top of the stack to its block, the block included, fit the budget, the stack being that at the end of the batch
before. A Fenwick tree over the stack finds the distances. No prefetch: it would make the stack depend on the budget.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nemolab.errors import TraceError
from nemolab.jit import jit, jit_inner, unowned
from nemolab.simulate.lookups import Lookups

NEVER = np.iinfo(np.int64).max  # the distance of a block that is not in the stack
RUN = 32  # neighbouring places that the tree counts as one: it then fits the first cache, the rest is a short sum


@dataclass(frozen=True)
class Curve:
    """Hits of an LRU cache at every size where they change; between two sizes the smaller one's hold.

    sizes     int64, rising: bytes, or blocks if in_slots; below the first nothing hits
    hits      int64, rising
    lookups   how many there were
    """

    sizes: np.ndarray
    hits: np.ndarray
    lookups: int
    in_slots: bool

    @property
    def hit_rates(self) -> np.ndarray:
        return self.hits / max(self.lookups, 1)

    def hits_at(self, size: int) -> int:
        place = np.searchsorted(self.sizes, size, side="right")
        return int(self.hits[place - 1]) if place else 0


def lru_curve(lookups: Lookups, *, phase: int | None = None, in_slots: bool = False, cold: bool = False) -> Curve:
    """The curve of one phase, or of both. in_slots: count blocks of any size as one; cold: as in `replay`.

    Raises TraceError where sizes are unknown and in_slots is not asked for.
    """
    distances = lru_distances(lookups, in_slots=in_slots, cold=cold)
    if phase is not None:
        distances = distances[np.repeat(lookups.phase == phase, np.diff(lookups.starts))]
    sizes, counts = _count_values(distances[distances != NEVER])
    return Curve(sizes, np.cumsum(counts), len(distances), in_slots)


def lru_distances(lookups: Lookups, *, in_slots: bool = False, cold: bool = False) -> np.ndarray:
    """int64 [lookups]: the smallest LRU cache in which each would hit, in bytes or slots; NEVER where none would."""
    if in_slots:
        sizes = np.ones(lookups.n_keys, np.int64)
    elif lookups.size_bytes is None:
        raise TraceError("the trace does not say how large its blocks are: ask for the curve in slots")
    else:
        sizes = lookups.size_bytes
    distances = np.empty(len(lookups.keys), np.int64)
    changes = np.diff(lookups.conversation, prepend=lookups.conversation[:1]) != 0
    fresh = changes if cold else np.zeros(lookups.n_batches, bool)
    largest = int(np.diff(lookups.starts).max(initial=0))
    n_runs = -(-2 * (lookups.n_keys + largest) // RUN)
    stack = np.zeros(n_runs * RUN, np.int64), np.zeros(n_runs * RUN, np.int32), np.zeros(n_runs + 1, np.int64)
    place_of = np.full(lookups.n_keys, -1, np.int64)
    _measure(lookups.keys, lookups.starts, lookups.passing, fresh, sizes, distances, place_of, *stack)
    return distances


def _count_values(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distinct values, rising, and how often each occurs."""
    values = np.sort(values)
    firsts = np.flatnonzero(np.diff(values, prepend=values[:1] - 1))
    return values[firsts], np.diff(np.append(firsts, len(values)))


@jit_inner
def _add(tree, run, size_bytes):
    """Count `size_bytes` in a run of places."""
    node = run + 1
    while node < len(tree):
        tree[node] += size_bytes
        node += node & -node


@jit_inner
def _sum_below(tree, run):
    """Bytes in the runs before `run`."""
    total = 0
    node = run
    while node > 0:
        total += tree[node]
        node &= node - 1
    return total


@jit_inner
def _close_gaps(weight, key_at, tree, place_of, used):
    """Move what is in the stack to the lowest places, in order, and count anew. Returns how many there are."""
    count = 0
    for place in range(used):
        if weight[place] > 0:
            key = key_at[place]
            size_bytes = weight[place]
            weight[place] = 0
            weight[count], key_at[count], place_of[key] = size_bytes, key, count
            count += 1
    tree[:] = 0
    for place in range(count):
        tree[place // RUN + 1] += weight[place]
    for node in range(1, len(tree)):
        parent = node + (node & -node)
        if parent < len(tree):
            tree[parent] += tree[node]
    return count


@jit
def _measure(keys, starts, passing, fresh, sizes, distances, place_of, weight, key_at, tree):
    """The stack lies in places 0 to used - 1, the most recent last, with gaps where a block has moved up.

    weight int64 [places]: bytes of the block there, 0 for a gap; key_at int32 [places]; place_of int64 [n_keys], -1 for
    none; tree int64 [runs + 1]: Fenwick sums of weight by runs of RUN places
    """
    weight, key_at, tree, place_of = unowned((weight, key_at, tree, place_of))
    used = 0
    total = 0
    for batch in range(len(starts) - 1):
        if fresh[batch]:
            weight[:used] = 0
            tree[:] = 0
            place_of[:] = -1
            used = total = 0
        for at in range(starts[batch], starts[batch + 1]):
            place = place_of[keys[at]]
            if place < 0:
                distances[at] = NEVER
                continue
            run = place // RUN
            older = _sum_below(tree, run)
            for other in range(run * RUN, place):
                older += weight[other]
            distances[at] = total - older
        if passing[batch]:
            continue
        for at in range(starts[batch], starts[batch + 1]):
            key = keys[at]
            size_bytes = sizes[key]
            if used == len(weight):
                used = _close_gaps(weight, key_at, tree, place_of, used)
            place = place_of[key]
            if place >= 0:
                weight[place] = 0
                _add(tree, place // RUN, -size_bytes)
            else:
                total += size_bytes
            weight[used], key_at[used], place_of[key] = size_bytes, key, used
            _add(tree, used // RUN, size_bytes)
            used += 1
