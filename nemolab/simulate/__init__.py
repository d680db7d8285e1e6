"""What a cache would have done: lookups of a trace replayed under any policy and budget, and what they are like.

lookups     batches of keys as a cache sees them, made from recorded routing
asked       budgets, policies and prefetch depths in words
replay      under one policy and budget: what hit, what was read, in which phase
sweep       under many, as rows
curve       LRU at all budgets at once
floor       the budget below which an LRU hits nothing
measures    how concentrated, repetitive and predictable a routing is

Exact and offline: no files, no clocks. The decisions are those of `nemolab.policy`, which the engine runs too.
"""

from nemolab.simulate.asked import read_budgets, read_policies, read_prefetches
from nemolab.simulate.curve import Curve, lru_curve
from nemolab.simulate.floor import lru_floor, warn_below_floor
from nemolab.simulate.lookups import DECODE, PREFILL, Lookups, from_batches, from_routing, from_trace
from nemolab.simulate.replay import POLICY_NAMES, Replay, replay
from nemolab.simulate.sweep import default_budgets, sweep

__all__ = [
    "DECODE",
    "POLICY_NAMES",
    "PREFILL",
    "Curve",
    "Lookups",
    "Replay",
    "default_budgets",
    "from_batches",
    "from_routing",
    "from_trace",
    "lru_curve",
    "lru_floor",
    "read_budgets",
    "read_policies",
    "read_prefetches",
    "replay",
    "sweep",
    "warn_below_floor",
]
