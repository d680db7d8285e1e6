"""Segmented LRU: four LRU lists of a quarter of the budget each; a hit moves an entry one list up.

A list that overflows cools: its least recent moves one list down. What enters goes to the lowest list with room, once
all are full to the lowest; victims leave from the lowest.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nemolab.jit import jit_inner
from nemolab.policy.interface import HIT, Policy, Setting, ignore, register
from nemolab.policy.links import Links, append, oldest, oldest_unmarked, start_links, unlink

SEGMENTS = 4


class SLRUState(NamedTuple):
    """segment int8 [n_keys]: the list of a cached key; used int64 [SEGMENTS] bytes; limit: bytes a list may hold."""

    links: Links
    first_sentinel: int
    segment: np.ndarray
    used: np.ndarray
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


@jit_inner
def _leave_segment(state, key):
    unlink(state.links, key)
    state.used[state.segment[key]] -= state.size_bytes[key]


@jit_inner
def _join_segment(state, key, segment):
    append(state.links, state.first_sentinel + segment, key)
    state.segment[key] = segment
    state.used[segment] += state.size_bytes[key]


def meet(state, key, held):
    pass


def choose(state, entries, stamp):
    for segment in range(SEGMENTS):
        key = oldest_unmarked(state.links, state.first_sentinel + segment, entries, stamp)
        if key >= 0:
            return key
    return np.int64(-1)


def remove(state, key):
    _leave_segment(state, key)


def place(state, key, how, at):
    if how == HIT:
        segment = min(state.segment[key] + 1, SEGMENTS - 1)
        _leave_segment(state, key)
        _join_segment(state, key, segment)
        while segment > 0:
            while state.used[segment] > state.limit:
                cooled = oldest(state.links, state.first_sentinel + segment)
                _leave_segment(state, cooled)
                _join_segment(state, cooled, segment - 1)
            segment -= 1
        return True
    for segment in range(SEGMENTS):
        if state.used[segment] + state.size_bytes[key] <= state.limit:
            _join_segment(state, key, segment)
            return True
    _join_segment(state, key, 0)
    return True


SLRU = register(
    SLRUState,
    Policy("slru", "four LRU lists, a hit moves one up", start, meet, choose, remove, place, ignore, divides=True),
)
