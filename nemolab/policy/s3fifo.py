"""S3-FIFO: a small queue (a tenth of the budget) sifts newcomers, a main queue keeps what was used, a ghost remembers.

Newcomers enter the small queue, those that the ghost remembers the main one; until the first eviction a full small
queue sends newcomers to the main one too. From the small queue an entry used twice moves to the main one, any other
leaves and is remembered; from the main queue an entry used since (up to 3 times counted) goes round again, any other
leaves.
Source: Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023, with libCacheSim's later refinement.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nemolab.policy.interface import HIT, Policy, Setting, ignore, register
from nemolab.policy.links import Links, append, join_list, leave_list, oldest, oldest_unmarked, start_links, unlink

SMALL, MAIN, GHOST, NOWHERE, REMEMBERED = range(5)  # the first three are lists
SMALL_SHARE, GHOST_SHARE = 0.1, 0.9  # of the budget
USES_TO_MOVE, USES_COUNTED = 2, 3
EVICTED_ONCE = 3  # place in `numbers`, after the bytes of the three lists


class S3FIFOState(NamedTuple):
    """where uint8 [n_keys]: the list of a key; uses int64 [n_keys] since it entered or went round.

    numbers int64 [4]: bytes of each list, whether anything was evicted; limits int64 [3]: what the lists may hold
    """

    links: Links
    first_sentinel: int
    where: np.ndarray
    uses: np.ndarray
    numbers: np.ndarray
    limits: np.ndarray
    size_bytes: np.ndarray


def start(setting: Setting) -> S3FIFOState:
    n_keys, capacity_bytes = setting.n_keys, setting.capacity_bytes
    small = int(capacity_bytes * SMALL_SHARE)
    return S3FIFOState(
        start_links(n_keys, 3),
        n_keys,
        np.full(n_keys, NOWHERE, np.uint8),
        np.zeros(n_keys, np.int64),
        np.zeros(4, np.int64),
        np.array([small, capacity_bytes - small, int(capacity_bytes * GHOST_SHARE)], np.int64),
        setting.size_bytes,
    )


def meet(state, key, held):
    if held:
        state.uses[key] += 1
    elif state.where[key] == GHOST:
        leave_list(state, key)
        state.where[key] = REMEMBERED


def choose(state, entries, stamp):
    numbers, links, first_sentinel = state.numbers, state.links, state.first_sentinel
    numbers[EVICTED_ONCE] = 1
    from_main = numbers[MAIN] > state.limits[MAIN] or numbers[SMALL] == 0
    while True:
        if from_main:
            key = oldest_unmarked(links, first_sentinel + MAIN, entries, stamp)
            if key < 0:
                from_main = False
            elif state.uses[key] == 0:
                return key
            else:
                state.uses[key] = min(state.uses[key], USES_COUNTED) - 1
                unlink(links, key)
                append(links, first_sentinel + MAIN, key)
        else:
            key = oldest_unmarked(links, first_sentinel + SMALL, entries, stamp)
            if key < 0:
                from_main = True
            elif state.uses[key] < USES_TO_MOVE:
                return key
            else:
                state.uses[key] = 0
                leave_list(state, key)
                join_list(state, key, MAIN)


def remove(state, key):
    was_small = state.where[key] == SMALL
    leave_list(state, key)
    state.where[key] = NOWHERE
    if was_small and state.size_bytes[key] <= state.limits[GHOST]:
        while state.numbers[GHOST] + state.size_bytes[key] > state.limits[GHOST]:
            forgotten = oldest(state.links, state.first_sentinel + GHOST)
            leave_list(state, forgotten)
            state.where[forgotten] = NOWHERE
        join_list(state, key, GHOST)


def place(state, key, how, at):
    if how == HIT:
        return True
    if state.where[key] == GHOST:  # a prefetched entry was not met before
        leave_list(state, key)
        state.where[key] = REMEMBERED
    full_at_first = state.numbers[EVICTED_ONCE] == 0 and state.numbers[SMALL] >= state.limits[SMALL]
    join_list(state, key, MAIN if state.where[key] == REMEMBERED or full_at_first else SMALL)
    state.uses[key] = 0
    return True


S3FIFO = register(
    S3FIFOState,
    Policy(
        "s3fifo",
        "a small queue sifts newcomers before the main one",
        start,
        meet,
        choose,
        remove,
        place,
        ignore,
        divides=True,
    ),
)
