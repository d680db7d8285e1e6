"""LFU with dynamic ageing: an entry's weight is its lookups since it entered plus the age of the cache.

The age is the weight of the last victim, so that what was popular long ago leaves in the end. Ties go to the least
recent. Source: Arlitt et al., "Evaluating content management techniques for Web proxy caches", 2000 (LFU-DA).
"""

from __future__ import annotations

from nemolab.policy.interface import Setting
from nemolab.policy.lfu import LFUState, start_as, variant


def start(setting: Setting) -> LFUState:
    return start_as(setting, forgets=True, ages=True)


LFU_AGEING = variant("lfu-ageing", "LFU whose newcomers start at the last victim's weight", start)
