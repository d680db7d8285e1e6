"""What a cache would have done: lookups of a trace replayed under any policy and budget, and what they are like.

lookups     batches of keys as a cache sees them, made from recorded routing
replay      under one policy and budget: what hit, what was read, in which phase
asked       budgets, policies and prefetch depths in words
sweep       under many, as rows
curve       LRU at all budgets at once
floor       the budget below which an LRU hits nothing
advice      cliff, knee, and what a better policy could gain
sizes       in bytes or slots, as the trace allows; the places on a curve as rows
notes       what must be read beside a hit rate
model       whose trace it is, and how large its blocks are
live        the misses an engine recorded against those of a replay
independence   whether a routing repeats more than chance
measures    how concentrated, repetitive and predictable a routing is; summary: all of them of one trace

Exact and offline. Only `model` opens files. The decisions are those of `nemolab.policy`, which the engine runs too.
"""

from nemolab.simulate.advice import Advice, advise, find_gaps, list_points, main_curve, point_at
from nemolab.simulate.asked import read_budgets, read_policies, read_prefetches
from nemolab.simulate.curve import Curve, lru_curve
from nemolab.simulate.floor import lru_floor, token_cycle, warn_below_floor
from nemolab.simulate.live import LiveCheck, check_live
from nemolab.simulate.lookups import Lookups, from_routing, from_trace
from nemolab.simulate.model import join_model
from nemolab.simulate.notes import list_notes
from nemolab.simulate.replay import POLICY_NAMES, Replay, replay
from nemolab.simulate.sizes import Scale, list_places, read_scale
from nemolab.simulate.summary import list_facts, measure_trace
from nemolab.simulate.sweep import DEFAULT_POLICIES, DEFAULT_SHARES, default_budgets, sweep
from nemolab.trace import DECODE, PREFILL

__all__ = [
    "DECODE",
    "DEFAULT_POLICIES",
    "DEFAULT_SHARES",
    "POLICY_NAMES",
    "PREFILL",
    "Advice",
    "Curve",
    "LiveCheck",
    "Lookups",
    "Replay",
    "Scale",
    "advise",
    "check_live",
    "default_budgets",
    "find_gaps",
    "from_routing",
    "from_trace",
    "join_model",
    "list_facts",
    "list_notes",
    "list_places",
    "list_points",
    "lru_curve",
    "lru_floor",
    "main_curve",
    "measure_trace",
    "point_at",
    "read_budgets",
    "read_policies",
    "read_prefetches",
    "read_scale",
    "replay",
    "sweep",
    "token_cycle",
    "warn_below_floor",
]
