"""LFU in the cache: a count begins when an entry enters and is forgotten when it leaves; ties to the least recent."""

from __future__ import annotations

from nemolab.policy.interface import Setting
from nemolab.policy.lfu import LFUState, start_as, variant


def start(setting: Setting) -> LFUState:
    return start_as(setting, forgets=True, ages=False)


LFU_INCACHE = variant("lfu-incache", "fewest lookups since it entered leaves", start)
