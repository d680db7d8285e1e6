"""SIEVE: a queue by entry, a hand that moves from its oldest to its newest end and back to the oldest.

A hit marks the entry as visited. The hand passes over visited entries, taking the mark, and evicts the first other one.
Source: Zhang et al., "SIEVE is simpler than LRU", NSDI 2024.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nemolab.policy.interface import HIT, Policy, Setting, ignore, register
from nemolab.policy.links import Links, append, start_links, unlink


class SieveState(NamedTuple):
    """visited uint8 [n_keys]; hand int64 [1]: a key, or the sentinel when a new round begins."""

    links: Links
    sentinel: int
    visited: np.ndarray
    hand: np.ndarray


def start(setting: Setting) -> SieveState:
    n_keys = setting.n_keys
    return SieveState(start_links(n_keys), n_keys, np.zeros(n_keys, np.uint8), np.array([n_keys], np.int64))


def meet(state, key, held):
    if held:
        state.visited[key] = 1


def choose(state, entries, stamp):
    key = state.hand[0]
    while True:
        if key == state.sentinel:
            key = np.int64(state.links.newer[key])
        if entries[key].mark != stamp:  # the running batch is passed over as it is
            if state.visited[key] == 0:
                break
            state.visited[key] = 0
        key = np.int64(state.links.newer[key])
    state.hand[0] = key
    return key


def remove(state, key):
    if state.hand[0] == key:
        state.hand[0] = state.links.newer[key]
    unlink(state.links, key)


def place(state, key, how, at):
    if how != HIT:
        append(state.links, state.sentinel, key)
        state.visited[key] = 0
    return True


SIEVE = register(
    SieveState,
    Policy("sieve", "a hand evicts what was not used since it passed", start, meet, choose, remove, place, ignore),
)
