"""Segmented LRU: four LRU lists of a quarter of the budget each; a hit moves an entry one list up.

A list that overflows cools: its least recent moves one list down. What enters goes to the lowest list with room, once
all are full to the lowest; victims leave from the lowest.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nemolab.policy.interface import HIT, Policy, Setting, ignore, register
from nemolab.policy.links import Links, join_list, leave_list, oldest, oldest_unmarked, start_links

SEGMENTS = 4


class SLRUState(NamedTuple):
    """where int8 [n_keys]: the list of a cached key; numbers int64 [SEGMENTS]: their bytes; limit: of each list."""

    links: Links
    first_sentinel: int
    where: np.ndarray
    numbers: np.ndarray
    limit: int
    size_bytes: np.ndarray


def start(setting: Setting) -> SLRUState:
    n_keys = setting.n_keys
    return SLRUState(
        start_links(n_keys, SEGMENTS),
        n_keys,
        np.zeros(n_keys, np.int8),
        np.zeros(SEGMENTS, np.int64),
        setting.capacity_bytes // SEGMENTS,
        setting.size_bytes,
    )


def meet(state, key, held):
    pass


def choose(state, entries, stamp):
    for segment in range(SEGMENTS):
        key = oldest_unmarked(state.links, state.first_sentinel + segment, entries, stamp)
        if key >= 0:
            return key
    return np.int64(-1)


def remove(state, key):
    leave_list(state, key)


def place(state, key, how, at):
    if how == HIT:
        segment = min(state.where[key] + 1, SEGMENTS - 1)
        leave_list(state, key)
        join_list(state, key, segment)
        while segment > 0:
            while state.numbers[segment] > state.limit:
                cooled = oldest(state.links, state.first_sentinel + segment)
                leave_list(state, cooled)
                join_list(state, cooled, segment - 1)
            segment -= 1
        return True
    for segment in range(SEGMENTS):
        if state.numbers[segment] + state.size_bytes[key] <= state.limit:
            join_list(state, key, segment)
            return True
    join_list(state, key, 0)
    return True


SLRU = register(
    SLRUState,
    Policy("slru", "four LRU lists, a hit moves one up", start, meet, choose, remove, place, ignore, divides=True),
)
