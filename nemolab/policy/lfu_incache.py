"""LFU in the cache: a count begins when an entry enters and is forgotten when it leaves; ties to the least recent."""

from __future__ import annotations

from nemolab.policy import lfu
from nemolab.policy.heap import take_out
from nemolab.policy.interface import Policy, Setting, ignore, register


class InCacheState(lfu.LFUState):
    """As for `lfu`; count is 0 for what is not cached."""


def start(setting: Setting) -> InCacheState:
    return InCacheState(*lfu.start(setting))


def remove(state, key):
    take_out(state.heap, key)
    state.count[key] = 0


LFU_INCACHE = register(
    InCacheState,
    Policy(
        "lfu-incache", "fewest lookups since it entered leaves", start, lfu.meet, lfu.choose, remove, lfu.place, ignore
    ),
)
