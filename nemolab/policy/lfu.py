"""LFU as published: an expert counts once a batch, keeps its count after eviction; ties go to the least recent.

A prompt pass and a prefetch count nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nemolab.jit import jit
from nemolab.policy.heap import Heap, lowest_unmarked, push, rerank, start_heap, take_out
from nemolab.policy.interface import HIT, PREFETCHED, Policy, Setting, ignore, register

CLOCK_BITS = 36  # of a rank: counts above, the time of placing below (6.9e10 placements, counts to 1.3e8)


class LFUState(NamedTuple):
    """heap of what is cached; count int64 [n_keys]; clock int64 [1]: placements so far."""

    heap: Heap
    count: np.ndarray
    clock: np.ndarray


def start(setting: Setting) -> LFUState:
    return LFUState(start_heap(setting.n_keys), np.zeros(setting.n_keys, np.int64), np.zeros(1, np.int64))


@jit
def rank_by(clock, count):
    """Lower leaves first: fewer counts, then less recent."""
    clock[0] += 1
    return (count << CLOCK_BITS) + clock[0]


@jit
def move_up(heap, key, how, rank):
    """A hit keeps its place in the heap until it has counted: from there it sinks a little, seldom to the bottom."""
    if how == HIT:
        rerank(heap, key, rank)
    else:
        push(heap, key, rank)


def meet(state, key, held):
    pass


def choose(state, entries, stamp):
    return lowest_unmarked(state.heap, entries, stamp)


def remove(state, key):
    take_out(state.heap, key)


def place(state, key, how, at):
    if how != PREFETCHED:
        state.count[key] += 1
    move_up(state.heap, key, how, rank_by(state.clock, state.count[key]))
    return True


LFU = register(
    LFUState,
    Policy(
        "lfu", "fewest lookups so far leaves, counts kept after eviction", start, meet, choose, remove, place, ignore
    ),
)
