"""Which entry leaves the cache: one file a policy, one set of rules around them, the same for engine and replay.

interface     what a policy is
core          what counts: batches, budget, prompt passes, prefetch
cache         a cache in a running engine, batch by batch
run           a whole trace through one cache
links, heap   lists and heaps of keys in arrays

Nothing here reads a file or knows a model; keys are numbers from 0, sizes are bytes.
"""

from nemolab.policy.arc import ARC
from nemolab.policy.belady import BELADY, BELADY_BYPASS
from nemolab.policy.cache import Batch, Cache, Round
from nemolab.policy.interface import Policy, Setting
from nemolab.policy.lfu import LFU
from nemolab.policy.lfu_ageing import LFU_AGEING
from nemolab.policy.lfu_incache import LFU_INCACHE
from nemolab.policy.lru import LRU
from nemolab.policy.random import RANDOM
from nemolab.policy.s3fifo import S3FIFO
from nemolab.policy.sieve import SIEVE
from nemolab.policy.slru import SLRU
from nemolab.policy.static import STATIC

_ALL = (LRU, LFU, LFU_INCACHE, LFU_AGEING, SLRU, S3FIFO, SIEVE, ARC, RANDOM, STATIC, BELADY, BELADY_BYPASS)
POLICIES: dict[str, Policy] = {policy.name: policy for policy in _ALL}

__all__ = ["LRU", "POLICIES", "Batch", "Cache", "Policy", "Round", "Setting"]
