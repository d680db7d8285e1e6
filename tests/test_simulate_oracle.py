"""libCacheSim as a witness: the same hits, one lookup at a time, for every policy that it has.

Only where it means what we mean: blocks of size 1; budgets that its segments divide and that leave its small queue
room. Its LFUDA is another rule than our lfu-ageing (a hit adds the age again and again), so it is not compared.
Its counts are kept here; where `pip install libcachesim` has been run it is asked itself, lookup by lookup. It is no
dependency of the tests: it has no wheel for every Python we run on and would hold back other packages.
"""

import importlib.util

import numpy as np
import pytest
from small_lookups import from_batches

from nemolab.simulate import replay

KEYS, LOOKUPS = 400, 6000
EXPONENTS, SLOTS = (0.6, 1.0), (20, 40, 100, 200)
CASES = [(exponent, slots) for exponent in EXPONENTS for slots in SLOTS]
HITS = {  # what libcachesim 0.3.5 gave for each of CASES
    "lru": (655, 1207, 2367, 3796, 2361, 3111, 4137, 4960),
    "lfu-incache": (487, 1067, 2200, 3701, 1710, 2404, 3564, 4779),
    "slru": (1125, 1642, 2690, 3923, 2888, 3526, 4303, 4953),
    "s3fifo": (1149, 1697, 2693, 3878, 3016, 3586, 4305, 4928),
    "sieve": (1111, 1543, 2627, 3853, 2974, 3544, 4287, 4847),
    "arc": (1014, 1566, 2528, 3808, 2854, 3494, 4253, 4977),
    "belady": (2151, 2904, 4051, 4965, 3623, 4248, 4984, 5420),
}
NAMES = {"lru": "LRU", "lfu-incache": "LFU", "slru": "SLRU", "s3fifo": "S3FIFO", "sieve": "Sieve", "arc": "ARC"}
NAMES["belady"] = "Belady"
installed = pytest.mark.skipif(importlib.util.find_spec("libcachesim") is None, reason="libcachesim is not installed")


def draw_trace(exponent):
    """Zipf-like popularity whose favourites change half way."""
    rng = np.random.default_rng(int(10 * exponent))
    chance = 1 / np.arange(1, KEYS + 1) ** exponent
    ranks = rng.choice(KEYS, LOOKUPS, p=chance / chance.sum())
    return np.where(np.arange(LOOKUPS) < LOOKUPS // 2, ranks, (ranks + 100) % KEYS).tolist()


def ask_witness(policy, trace, slots):
    """Hit or miss of each lookup."""
    import libcachesim

    next_use, coming = [], {}
    for at in range(len(trace) - 1, -1, -1):
        next_use.append(coming.get(trace[at], 2**62))
        coming[trace[at]] = at
    cache, hits = getattr(libcachesim, NAMES[policy])(cache_size=slots, hashpower=12), []
    for key, following in zip(trace, reversed(next_use), strict=True):
        request = libcachesim.Request()
        request.obj_id, request.obj_size, request.next_access_vtime = key + 1, 1, following
        hits.append(cache.get(request))
    return hits


def ask_replay(policy, trace, slots):
    return (~replay(from_batches([[key] for key in trace], n_keys=KEYS), policy, slots=slots).missed).tolist()


@pytest.mark.parametrize("policy", HITS)
def test_hits_are_as_many_as_libcachesim_s(policy):
    assert tuple(sum(ask_replay(policy, draw_trace(exponent), slots)) for exponent, slots in CASES) == HITS[policy]


def test_the_counts_tell_policies_apart():
    assert len(set(HITS.values())) == len(HITS)


@installed
@pytest.mark.parametrize("exponent, slots", CASES)
@pytest.mark.parametrize("policy", HITS)
def test_every_hit_is_libcachesim_s(policy, exponent, slots):
    trace = draw_trace(exponent)
    assert ask_replay(policy, trace, slots) == ask_witness(policy, trace, slots)


@installed
@pytest.mark.parametrize("policy", HITS)
def test_the_counts_are_those_that_libcachesim_gives(policy):
    assert tuple(sum(ask_witness(policy, draw_trace(exponent), slots)) for exponent, slots in CASES) == HITS[policy]
