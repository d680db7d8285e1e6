"""Belady's optimum: the entry whose next batch use is farthest leaves; never is farthest; ties to the least recent.

`belady` must insert every miss, as an engine that needs the block in its cache does; `belady-bypass` may let a miss
pass the cache by, which is the lower bound. Both are optimal for lookups one by one and blocks of one size; with
batches or sizes that differ they are the usual yardstick, not a proof. A prompt pass counts as a use.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nemolab.jit import jit, jit_inner
from nemolab.policy.heap import Heap, lowest_unmarked, push, rerank, start_heap, take_out
from nemolab.policy.interface import HIT, PREFETCHED, Policy, Setting, register

CLOCK_BITS = 36  # of a rank: batches until the end at the next use above, the time of placing below


class BeladyState(NamedTuple):
    """next_use int32 [lookups]: the batch of the same key's next lookup; coming int32 [n_keys]: each key's, now."""

    heap: Heap
    next_use: np.ndarray
    coming: np.ndarray
    never: int
    clock: np.ndarray


def start(setting: Setting) -> BeladyState:
    never = len(setting.starts) - 1
    coming = np.full(setting.n_keys, never, np.int32)
    next_use = np.empty(len(setting.keys), np.int32)
    find_next_use(setting.keys, setting.starts, next_use, coming)
    return BeladyState(start_heap(setting.n_keys), next_use, coming, never, np.zeros(1, np.int64))


@jit
def find_next_use(keys, starts, next_use, coming):
    """From the end to the beginning: after it, `coming` holds the first use of every key."""
    for batch in range(len(starts) - 2, -1, -1):
        for at in range(starts[batch], starts[batch + 1]):
            next_use[at] = coming[keys[at]]
            coming[keys[at]] = batch


@jit_inner
def _rank(state, key, placed):
    """Lower leaves first: the farther the next use, then the less recent. placed: the time of placing."""
    return (np.int64(state.never - state.coming[key]) << CLOCK_BITS) + placed


def meet(state, key, held):
    pass


def choose(state, entries, stamp):
    return lowest_unmarked(state.heap, entries, stamp)


def remove(state, key):
    take_out(state.heap, key)


def place(state, key, how, at):
    if how != PREFETCHED:
        state.coming[key] = state.next_use[at]
    state.clock[0] += 1
    rank = _rank(state, key, state.clock[0])
    if how == HIT:
        rerank(state.heap, key, rank)
    else:
        push(state.heap, key, rank)
    return True


def pass_by(state, entries, keys, first, last):
    for at in range(first, last):
        key = np.int64(keys[at])
        state.coming[key] = state.next_use[at]
        if entries[key].held:
            placed = state.heap.ranks[state.heap.where[key]] & ((1 << CLOCK_BITS) - 1)  # nothing is refreshed
            rerank(state.heap, key, _rank(state, key, placed))


def _variant(name: str, about: str, forced: bool) -> Policy:
    policy = Policy(name, about, start, meet, choose, remove, place, pass_by, forced=forced, future=True)
    return register(BeladyState, policy)


BELADY = _variant("belady", "farthest next use leaves, every miss enters", forced=True)
BELADY_BYPASS = _variant("belady-bypass", "farthest next use leaves, a miss may pass by", forced=False)
