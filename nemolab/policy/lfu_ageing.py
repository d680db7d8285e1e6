"""LFU with dynamic ageing: an entry's weight is its lookups since it entered plus the age of the cache.

The age is the weight of the last victim, so that what was popular long ago leaves in the end. Ties go to the least
recent. Source: Arlitt et al., "Evaluating content management techniques for Web proxy caches", 2000 (LFU-DA).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nemolab.policy import lfu
from nemolab.policy.heap import Heap, lowest_unmarked, start_heap
from nemolab.policy.interface import PREFETCHED, Policy, Setting, ignore, register
from nemolab.policy.lfu import move_up, rank_by
from nemolab.policy.lfu_incache import remove


class AgeingState(NamedTuple):
    """As for `lfu-incache`; weight int64 [n_keys]: count plus age when last placed; age int64 [1]."""

    heap: Heap
    count: np.ndarray
    clock: np.ndarray
    weight: np.ndarray
    age: np.ndarray


def start(setting: Setting) -> AgeingState:
    by_key, single = (lambda: np.zeros(setting.n_keys, np.int64)), (lambda: np.zeros(1, np.int64))
    return AgeingState(start_heap(setting.n_keys), by_key(), single(), by_key(), single())


def choose(state, entries, stamp):
    key = lowest_unmarked(state.heap, entries, stamp)
    state.age[0] = state.weight[key]
    return key


def place(state, key, how, at):
    if how != PREFETCHED:
        state.count[key] += 1
    state.weight[key] = state.count[key] + state.age[0]
    move_up(state.heap, key, how, rank_by(state.clock, state.weight[key]))
    return True


LFU_AGEING = register(
    AgeingState,
    Policy(
        "lfu-ageing",
        "LFU whose newcomers start at the last victim's weight",
        start,
        lfu.meet,
        choose,
        remove,
        place,
        ignore,
    ),
)
