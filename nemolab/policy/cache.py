"""A cache in a running engine, batch by batch: the same compiled decisions as the replay of a trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from nemolab.jit import jit
from nemolab.policy.core import (
    ABSENT,
    CAPACITY,
    ISSUED,
    MISSED,
    N_VICTIMS,
    USED,
    USEFUL,
    WASTED,
    issue,
    look_up,
    look_up_passing,
    start_core,
)
from nemolab.policy.interface import Policy, Setting, pass_by
from nemolab.policy.links import Links
from nemolab.policy.lru import LRU


class Batch(NamedTuple):
    """What a batch did to the cache, distinct keys only.

    hits, misses  in order of last occurrence
    victims       keys that left, in the order they left; one of the batch's own only if the batch exceeds the budget
    useful        hits that were prefetched and not asked for before
    """

    hits: list[int]
    misses: list[int]
    victims: list[int]
    useful: list[int]


class Round(NamedTuple):
    """What a round of prefetch did: keys to be read, by rank of the guess, and keys that left to make room."""

    reads: list[int]
    victims: list[int]


class Cache:
    """Which of `n_keys` entries are cached, and which leave, under one policy. It holds no entry itself.

    capacity_bytes  the budget
    size_bytes      bytes of every entry, or one number for all
    Raises ValueError for a negative budget and for a policy that must know the future.
    """

    def __init__(
        self,
        n_keys: int,
        capacity_bytes: int,
        size_bytes: int | np.ndarray,
        *,
        policy: Policy = LRU,
        seed: int = 0,
    ):
        if capacity_bytes < 0:
            raise ValueError(f"a cache of {capacity_bytes} bytes; 0 or more is needed")
        if policy.future:
            raise ValueError(f"the policy {policy.name} must know all lookups in advance; it runs in a replay only")
        sizes = np.broadcast_to(np.asarray(size_bytes, np.int64), n_keys)
        self.policy = policy
        self._core = start_core(sizes, capacity_bytes, forced=policy.forced)
        self._state = policy.start(Setting(self._core.entries["size_bytes"].copy(), capacity_bytes, seed))
        self._outcome = np.zeros(n_keys, np.uint8)

    def __contains__(self, key: int) -> bool:
        return bool(self._core.entries["held"][key] != ABSENT)

    def __len__(self) -> int:
        return int(np.count_nonzero(self._core.entries["held"]))

    def __iter__(self) -> Iterator[int]:
        """The cached keys: under LRU from the oldest to the most recent, else by number."""
        links = getattr(self._state, "links", None)
        if self.policy is LRU:
            return iter(_list_oldest_first(links, self._state.sentinel))
        return iter(np.flatnonzero(self._core.entries["held"]).tolist())

    @property
    def capacity_bytes(self) -> int:
        return int(self._core.numbers[CAPACITY])

    @property
    def used_bytes(self) -> int:
        return int(self._core.numbers[USED])

    @property
    def wasted(self) -> int:
        """Prefetched entries that left before anyone asked for them."""
        return int(self._core.numbers[WASTED])

    def batch(self, keys: Sequence[int]) -> Batch:
        """Look up all of a layer's experts at one step: misses enter, then victims leave until the budget holds."""
        keys = _order_by_last(keys)
        outcome = self._outcome
        _look_up_once(self._core, self._state, keys, outcome)
        missed, useful = outcome[: len(keys)] & MISSED != 0, outcome[: len(keys)] & USEFUL != 0
        return Batch(keys[~missed].tolist(), keys[missed].tolist(), self._list_victims(), keys[useful].tolist())

    def pass_by(self, keys: Sequence[int]) -> Batch:
        """Look up for a prompt pass: hits are not refreshed, misses do not enter, so there are no victims."""
        keys = _order_by_last(keys)
        _look_up_passing_once(self._core, self._state, keys, self._outcome)
        missed, useful = (self._outcome[: len(keys)] & flag != 0 for flag in (MISSED, USEFUL))
        return Batch(keys[~missed].tolist(), keys[missed].tolist(), [], keys[useful].tolist())

    def prefetch(self, guesses: Sequence[int]) -> Round:
        """Take in those of the guesses for the next layer that are absent, as far as the running batch leaves room.

        From the return on they count as cached; a later lookup that finds one still being read has to wait for it.
        """
        guesses = np.asarray(guesses, np.int32)
        _issue_once(self._core, self._state, guesses)
        reads = self._core.wanted[: self._core.numbers[ISSUED]].tolist()
        return Round(reads, self._list_victims())

    def _list_victims(self) -> list[int]:
        return self._core.victims[: self._core.numbers[N_VICTIMS]].tolist()


def _order_by_last(keys: Sequence[int]) -> np.ndarray:
    """Each key once, at its last occurrence: int32."""
    if len(set(keys)) != len(keys):
        keys = list(dict.fromkeys(reversed(keys)))[::-1]
    return np.array(keys, np.int32)


def _list_oldest_first(links: Links, sentinel: int) -> list[int]:
    keys, newer = [], links.newer.tolist()
    key = newer[sentinel]
    while key != sentinel:
        keys.append(key)
        key = newer[key]
    return keys


# The doors from Python into the rules: each compiled once a policy, called once a batch. (A bare 0 would be a type of
# its own to numba, which would compile the rules again for it.)


@jit
def _look_up_once(core, state, keys, outcome):
    look_up(core, state, keys, np.int64(0), len(keys), outcome)


@jit
def _look_up_passing_once(core, state, keys, outcome):
    look_up_passing(core, keys, np.int64(0), len(keys), outcome)
    pass_by(state, core.entries, keys, np.int64(0), len(keys))


@jit
def _issue_once(core, state, guesses):
    issue(core, state, guesses, len(guesses), np.int64(0))
