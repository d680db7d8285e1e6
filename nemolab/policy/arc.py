"""ARC: two LRU lists, of entries seen once and of those seen again, and a ghost of each that moves the line between.

A miss that the once-ghost remembers widens the room of those seen once, one that the again-ghost remembers narrows it.
Source: Megiddo and Modha, "ARC: a self-tuning, low overhead replacement cache", FAST 2003, in bytes, by batches.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nemolab.jit import jit_inner
from nemolab.policy.interface import HIT, Policy, Setting, ignore, register
from nemolab.policy.links import Links, join_list, leave_list, oldest, oldest_unmarked, start_links

ONCE, AGAIN, ONCE_GHOST, AGAIN_GHOST, NOWHERE, REMEMBERED = range(6)  # the first four are lists
FROM_AGAIN_GHOST = 4  # place in `numbers`, after the bytes of the four lists


class ARCState(NamedTuple):
    """where uint8 [n_keys]: the list of a key.

    target float64 [1]: bytes that ONCE should have
    numbers int64 [5]: bytes of each list; whether the batch has a miss of the again-ghost's
    """

    links: Links
    first_sentinel: int
    where: np.ndarray
    target: np.ndarray
    numbers: np.ndarray
    capacity_bytes: int
    size_bytes: np.ndarray


def start(setting: Setting) -> ARCState:
    n_keys = setting.n_keys
    return ARCState(
        start_links(n_keys, 4),
        n_keys,
        np.full(n_keys, NOWHERE, np.uint8),
        np.zeros(1),
        np.zeros(5, np.int64),
        setting.capacity_bytes,
        setting.size_bytes,
    )


@jit_inner
def _forget_oldest(state, ghost):
    key = oldest(state.links, state.first_sentinel + ghost)
    leave_list(state, key)
    state.where[key] = NOWHERE


@jit_inner
def _recall(state, key):
    """A miss that a ghost remembers: move the line towards where it would have been kept."""
    numbers, where = state.numbers, state.where[key]
    if where == ONCE_GHOST:
        step = max(numbers[AGAIN_GHOST] / numbers[ONCE_GHOST], 1.0) * state.size_bytes[key]
        state.target[0] = min(state.target[0] + step, float(state.capacity_bytes))
    else:
        step = max(numbers[ONCE_GHOST] / numbers[AGAIN_GHOST], 1.0) * state.size_bytes[key]
        state.target[0] = max(state.target[0] - step, 0.0)
        numbers[FROM_AGAIN_GHOST] = 1
    leave_list(state, key)
    state.where[key] = REMEMBERED


def meet(state, key, held):
    if not held and (state.where[key] == ONCE_GHOST or state.where[key] == AGAIN_GHOST):
        _recall(state, key)


def choose(state, entries, stamp):
    numbers = state.numbers
    once = oldest_unmarked(state.links, state.first_sentinel + ONCE, entries, stamp)
    again = oldest_unmarked(state.links, state.first_sentinel + AGAIN, entries, stamp)
    if once < 0:
        return again
    if again < 0:
        return once
    above = numbers[ONCE] > state.target[0]
    at_line = numbers[ONCE] == state.target[0] and numbers[FROM_AGAIN_GHOST] == 1
    return once if above or at_line else again


def remove(state, key):
    was = state.where[key]
    leave_list(state, key)
    join_list(state, key, ONCE_GHOST if was == ONCE else AGAIN_GHOST)


def place(state, key, how, at):
    numbers = state.numbers
    numbers[FROM_AGAIN_GHOST] = 0
    if how == HIT:
        leave_list(state, key)
        join_list(state, key, AGAIN)
        return True
    if state.where[key] == ONCE_GHOST or state.where[key] == AGAIN_GHOST:  # a prefetched entry was not met before
        leave_list(state, key)
        state.where[key] = REMEMBERED
    join_list(state, key, AGAIN if state.where[key] == REMEMBERED else ONCE)
    # The directory: once and its ghost at most the budget, all four at most twice the budget.
    while numbers[ONCE] + numbers[ONCE_GHOST] > state.capacity_bytes and numbers[ONCE_GHOST] > 0:
        _forget_oldest(state, ONCE_GHOST)
    total = numbers[ONCE] + numbers[AGAIN] + numbers[ONCE_GHOST] + numbers[AGAIN_GHOST]
    while total > 2 * state.capacity_bytes and numbers[AGAIN_GHOST] > 0:
        oldest_bytes = state.size_bytes[oldest(state.links, state.first_sentinel + AGAIN_GHOST)]
        _forget_oldest(state, AGAIN_GHOST)
        total -= oldest_bytes
    return True


ARC = register(
    ARCState,
    Policy(
        "arc",
        "seen once against seen again, with a moving line",
        start,
        meet,
        choose,
        remove,
        place,
        ignore,
        divides=True,
    ),
)
