"""LRU: the least recently used leaves. Recency is the order of last occurrence within a batch, hit or miss alike.

The cache is then always a beginning of one stack, which is what makes a bigger cache never worse.
"""

from __future__ import annotations

from typing import NamedTuple

from nemolab.policy.interface import Policy, Setting, ignore, register
from nemolab.policy.links import Links, append, oldest, start_links, unlink


class LRUState(NamedTuple):
    links: Links
    sentinel: int


def start(setting: Setting) -> LRUState:
    return LRUState(start_links(setting.n_keys), setting.n_keys)


def meet(state, key, held):
    if held:
        unlink(state.links, key)


def choose(state, entries, stamp):
    # The running batch stands at the recent end, or outside the list while it is looked up: no need to ask for marks.
    return oldest(state.links, state.sentinel)


def remove(state, key):
    unlink(state.links, key)


def place(state, key, how, at):
    append(state.links, state.sentinel, key)
    return True


LRU = register(LRUState, Policy("lru", "least recently used leaves", start, meet, choose, remove, place, ignore))
