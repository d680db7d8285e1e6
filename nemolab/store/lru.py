"""Which blocks stay: byte-budgeted LRU over batches, without any I/O.

The engine's cache and the offline replay ask the same object, so that their misses agree to the last one.
A batch is all lookups of one layer at one step. After it, recency is the order of *last* occurrence within it, hit or
miss alike: the cache is then always a prefix of one stack, which is what makes a bigger cache never worse.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple


class Batch(NamedTuple):
    """What a batch did to the cache, distinct keys only.

    hits, misses  in order of last occurrence
    victims       keys that left, oldest first; one of the batch's own only if the batch alone exceeds the budget
    """

    hits: list
    misses: list
    victims: list


class LRU:
    """Least recently used keys leave first; the budget is in bytes and keys may differ in size."""

    def __init__(self, capacity_bytes: int):
        if capacity_bytes < 0:
            raise ValueError(f"a cache of {capacity_bytes} bytes; 0 or more is needed")
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._sizes: OrderedDict[Hashable, int] = OrderedDict()  # oldest first

    def __contains__(self, key: Hashable) -> bool:
        return key in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator:
        """Keys from the oldest to the most recent."""
        return iter(self._sizes)

    def batch(self, keys: Sequence[Hashable], sizes: int | Sequence[int]) -> Batch:
        """Look a batch up: misses enter, then the oldest leave until the budget holds.

        sizes  bytes of each key, or one number for all
        The batch's own keys stand at the recent end, so they leave only when nothing else is left.
        """
        one_size = isinstance(sizes, int)
        if len(set(keys)) != len(keys):
            if not one_size:
                size_of = dict(zip(keys, sizes, strict=True))
            keys = list(dict.fromkeys(reversed(keys)))[::-1]
            if not one_size:
                sizes = [size_of[key] for key in keys]
        held = self._sizes
        hits, misses = [], []
        for place, key in enumerate(keys):
            if key in held:
                held.move_to_end(key)
                hits.append(key)
            else:
                size_bytes = sizes if one_size else sizes[place]
                held[key] = size_bytes
                self.used_bytes += size_bytes
                misses.append(key)
        return Batch(hits, misses, self._evict() if misses else [])

    def _evict(self) -> list:
        victims = []
        while self.used_bytes > self.capacity_bytes:
            key, size_bytes = self._sizes.popitem(last=False)
            self.used_bytes -= size_bytes
            victims.append(key)
        return victims
