"""Static: a hot set chosen beforehand stays once it has been read, nothing else ever enters.

The set is chosen with the lookups of the trace itself in hand, so it bounds what any fixed set could do here; one
chosen on another trace does worse.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nemolab.policy.interface import HIT, Policy, Setting, ignore, register


class StaticState(NamedTuple):
    hot: np.ndarray  # bool [n_keys]


def start(setting: Setting) -> StaticState:
    counts = np.bincount(setting.keys, minlength=setting.n_keys)
    return StaticState(pick_hot(counts, setting.size_bytes, setting.capacity_bytes))


def pick_hot(counts: np.ndarray, size_bytes: np.ndarray, capacity_bytes: int) -> np.ndarray:
    """The keys looked up most, the lowest first where equal, as far as they fit: bool [n_keys]."""
    hot, free_bytes = np.zeros(len(counts), bool), capacity_bytes
    for key in np.argsort(-counts, kind="stable"):
        if counts[key] and size_bytes[key] <= free_bytes:
            hot[key] = True
            free_bytes -= size_bytes[key]
    return hot


def meet(state, key, held):
    pass


def choose(state, entries, stamp):
    return np.int64(-1)


def remove(state, key):
    pass


def place(state, key, how, at):
    return how == HIT or state.hot[key]


STATIC = register(
    StaticState,
    Policy(
        "static",
        "the hottest entries of the trace stay, nothing else enters",
        start,
        meet,
        choose,
        remove,
        place,
        ignore,
        future=True,
    ),
)
