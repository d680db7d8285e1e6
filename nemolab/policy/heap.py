"""A binary heap of keys by rank, the lowest first, in which any key can be found and moved."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nemolab.jit import jit_inner


class Heap(NamedTuple):
    """keys int32 and ranks int64 by place; where int32: the place of a key; size int64 [1]; aside: scratch."""

    keys: np.ndarray
    ranks: np.ndarray
    where: np.ndarray
    size: np.ndarray
    aside: np.ndarray
    aside_ranks: np.ndarray


def start_heap(n_keys: int) -> Heap:
    key_array, rank_array = (lambda: np.zeros(n_keys, np.int32)), (lambda: np.zeros(n_keys, np.int64))
    return Heap(key_array(), rank_array(), key_array(), np.zeros(1, np.int64), key_array(), rank_array())


@jit_inner
def _put(heap, place, key, rank):
    heap.keys[place] = key
    heap.ranks[place] = rank
    heap.where[key] = place


@jit_inner
def _rise(heap, place, key, rank):
    """Put `key` at `place` or above."""
    while place > 0:
        above = (place - 1) >> 1
        if heap.ranks[above] <= rank:
            break
        _put(heap, place, np.int64(heap.keys[above]), heap.ranks[above])
        place = above
    _put(heap, place, key, rank)


@jit_inner
def _sink(heap, place, key, rank):
    """Put `key` at `place` or below."""
    size = heap.size[0]
    while True:
        below = 2 * place + 1
        if below >= size:
            break
        # Which of the two is lower is a toss-up that no processor foresees: added as a number, it costs no wrong turn.
        below += np.int64(heap.ranks[min(below + 1, size - 1)] < heap.ranks[below])
        if rank <= heap.ranks[below]:
            break
        _put(heap, place, np.int64(heap.keys[below]), heap.ranks[below])
        place = below
    _put(heap, place, key, rank)


@jit_inner
def push(heap, key, rank):
    """`key` enters."""
    place = heap.size[0]
    heap.size[0] += 1
    _rise(heap, place, key, rank)


@jit_inner
def rerank(heap, key, rank):
    """`key`, in the heap, gets another rank."""
    place = np.int64(heap.where[key])
    if rank < heap.ranks[place]:
        _rise(heap, place, key, rank)
    else:
        _sink(heap, place, key, rank)


@jit_inner
def take_out(heap, key):
    """`key` leaves, wherever it stands."""
    place = np.int64(heap.where[key])
    heap.size[0] -= 1
    last = heap.size[0]
    if place != last:  # the last one takes the place, as if it had held it with the rank of who leaves
        moved = np.int64(heap.keys[last])
        heap.where[moved] = place
        rerank(heap, moved, heap.ranks[last])


@jit_inner
def lowest_unmarked(heap, entries, stamp):
    """The key of lowest rank whose mark is not `stamp`; there is one."""
    n_aside = 0
    while entries[heap.keys[0]].mark == stamp:
        key = np.int64(heap.keys[0])
        heap.aside[n_aside], heap.aside_ranks[n_aside] = key, heap.ranks[0]
        n_aside += 1
        take_out(heap, key)
    lowest = np.int64(heap.keys[0])
    for number in range(n_aside):
        push(heap, np.int64(heap.aside[number]), heap.aside_ranks[number])
    return lowest
