"""libCacheSim as a witness of its own: the same hits, one lookup at a time, for every policy that it has.

Only where it means what we mean: blocks of size 1; budgets that its segments divide and that leave its small queue
room. Its LFUDA is another rule than our lfu-ageing (a hit adds the age again and again), so it is not compared.
"""

import numpy as np
import pytest

from nemolab.simulate import from_batches, replay

witness = pytest.importorskip("libcachesim", reason="libcachesim is not installed")

KEYS, LOOKUPS = 400, 6000
WITNESSES = {
    "lru": witness.LRU,
    "lfu-incache": witness.LFU,
    "slru": witness.SLRU,
    "s3fifo": witness.S3FIFO,
    "sieve": witness.Sieve,
    "arc": witness.ARC,
    "belady": witness.Belady,
}


def draw_trace(exponent):
    """Zipf-like popularity whose favourites change half way."""
    rng = np.random.default_rng(int(10 * exponent))
    chance = 1 / np.arange(1, KEYS + 1) ** exponent
    ranks = rng.choice(KEYS, LOOKUPS, p=chance / chance.sum())
    return np.where(np.arange(LOOKUPS) < LOOKUPS // 2, ranks, (ranks + 100) % KEYS).tolist()


def ask_witness(kind, trace, slots):
    """Hit or miss of each lookup."""
    next_use, coming = [], {}
    for at in range(len(trace) - 1, -1, -1):
        next_use.append(coming.get(trace[at], 2**62))
        coming[trace[at]] = at
    cache, hits = kind(cache_size=slots, hashpower=12), []
    for key, following in zip(trace, reversed(next_use), strict=True):
        request = witness.Request()
        request.obj_id, request.obj_size, request.next_access_vtime = key + 1, 1, following
        hits.append(cache.get(request))
    return hits


@pytest.mark.parametrize("exponent", [0.6, 1.0])
@pytest.mark.parametrize("slots", [20, 40, 100, 200])
@pytest.mark.parametrize("policy", WITNESSES)
def test_every_hit_is_libcachesim_s(policy, slots, exponent):
    trace = draw_trace(exponent)
    lookups = from_batches([[key] for key in trace], n_keys=KEYS)
    assert (~replay(lookups, policy, slots=slots).missed).tolist() == ask_witness(WITNESSES[policy], trace, slots)


def test_the_witness_tells_policies_apart():
    trace = draw_trace(0.6)
    seen = {tuple(ask_witness(kind, trace, 100)) for kind in WITNESSES.values()}
    assert len(seen) == len(WITNESSES)
