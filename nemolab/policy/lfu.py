"""LFU as published: an expert counts once a batch, keeps its count after eviction; ties go to the least recent.

A prompt pass and a prefetch count nothing. The two other forms of LFU differ in a switch of the state, so that all
three are compiled as one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nemolab.jit import jit_inner
from nemolab.policy.heap import Heap, lowest_unmarked, push, rerank, start_heap, take_out
from nemolab.policy.interface import HIT, PREFETCHED, Policy, Setting, ignore, register

CLOCK_BITS = 36  # of a rank: weights above, the time of placing below (6.9e10 placements, weights to 1.3e8)


class LFUState(NamedTuple):
    """heap of what is cached, by weight and then by time.

    count    int64 [n_keys]: lookups; only those since it entered, if the state `forgets`
    weight   int64 [n_keys]: count plus age when last placed
    clock    int64 [1]: placements so far
    age      int64 [1]: weight of the last victim if the state `ages`, else 0
    """

    heap: Heap
    count: np.ndarray
    weight: np.ndarray
    clock: np.ndarray
    age: np.ndarray
    forgets: bool
    ages: bool


def start(setting: Setting) -> LFUState:
    return start_as(setting, forgets=False, ages=False)


def start_as(setting: Setting, *, forgets: bool, ages: bool) -> LFUState:
    by_key, single = (lambda: np.zeros(setting.n_keys, np.int64)), (lambda: np.zeros(1, np.int64))
    return LFUState(start_heap(setting.n_keys), by_key(), by_key(), single(), single(), forgets, ages)


@jit_inner
def rank_by(clock, weight):
    """Lower leaves first: less weight, then less recent."""
    clock[0] += 1
    return (weight << CLOCK_BITS) + clock[0]


def meet(state, key, held):
    pass


def choose(state, entries, stamp):
    key = lowest_unmarked(state.heap, entries, stamp)
    if state.ages:
        state.age[0] = state.weight[key]
    return key


def remove(state, key):
    take_out(state.heap, key)
    if state.forgets:
        state.count[key] = 0


def place(state, key, how, at):
    if how != PREFETCHED:
        state.count[key] += 1
    state.weight[key] = state.count[key] + state.age[0]
    rank = rank_by(state.clock, state.weight[key])
    if how == HIT:  # it kept its place in the heap until it had counted: from there it sinks, seldom to the bottom
        rerank(state.heap, key, rank)
    else:
        push(state.heap, key, rank)
    return True


def variant(name: str, about: str, start) -> Policy:
    return register(LFUState, Policy(name, about, start, meet, choose, remove, place, ignore))


LFU = variant("lfu", "fewest lookups so far leaves, counts kept after eviction", start)
