"""A cache in a running engine, batch by batch: the same compiled decisions as the replay of a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numba
import numpy as np

from nemolab.jit import jit, jit_inner, unowned
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
    Keys are not checked, here or in the compiled code: 0 to n_keys - 1 is the caller's promise.
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
        self._parts = np.zeros(3 * n_keys, np.int32)  # hits, misses, useful hits, victims of the last batch, in a row

    def __contains__(self, key: int) -> bool:
        return bool(self._core.entries["held"][key] != ABSENT)

    def __len__(self) -> int:
        return int(np.count_nonzero(self._core.entries["held"]))

    def __iter__(self) -> Iterator[int]:
        """The cached keys: under LRU from the oldest to the most recent, else by number."""
        if self.policy is LRU:
            return iter(_list_oldest_first(self._state.links, self._state.sentinel))
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

    def resize(self, capacity_bytes: int) -> None:
        """Another budget from now on, above what is held: nobody leaves for it.

        Raises ValueError for less than is held, and for a policy that has shared the old budget out.
        """
        if self.policy.divides:
            raise ValueError(f"the policy {self.policy.name} shares its budget out at the start; it cannot change")
        if capacity_bytes < self.used_bytes:
            raise ValueError(f"{capacity_bytes} bytes for a cache that holds {self.used_bytes}")
        self._core.numbers[CAPACITY] = capacity_bytes

    def batch(self, keys: Sequence[int]) -> Batch:
        """Look up all of a layer's experts at one step: misses enter, then victims leave until the budget holds."""
        keys = _order_by_last(keys)
        return self._report(self._look_up(self._core, self._state, keys, self._outcome, self._parts))

    def pass_by(self, keys: Sequence[int]) -> Batch:
        """Look up for a prompt pass: hits are not refreshed, misses do not enter, so there are no victims."""
        keys = _order_by_last(keys)
        return self._report(self._look_up_passing(self._core, self._state, keys, self._outcome, self._parts))

    def prefetch(self, guesses: Sequence[int]) -> Round:
        """Take in those of the guesses for the next layer that are absent, as far as the running batch leaves room.

        From the return on they count as cached; a later lookup that finds one still being read has to wait for it.
        """
        guesses = np.asarray(guesses, np.int32)
        self._issue(self._core, self._state, guesses)
        reads = self._core.wanted[: self._core.numbers[ISSUED]].tolist()
        return Round(reads, self._core.victims[: self._core.numbers[N_VICTIMS]].tolist())

    @cached_property
    def _look_up(self) -> Callable:
        return open_door(_look_up_once, (self._core, self._state, self._parts, self._outcome, self._parts))

    @cached_property
    def _look_up_passing(self) -> Callable:
        return open_door(_look_up_passing_once, (self._core, self._state, self._parts, self._outcome, self._parts))

    @cached_property
    def _issue(self) -> Callable:
        return open_door(_issue_once, (self._core, self._state, self._parts))

    def _report(self, ends: tuple[int, int, int, int]) -> Batch:
        # One way from compiled code into a list: four would take longer than all of the lookup.
        misses, useful, victims, end = ends
        keys = self._parts[:end].tolist()
        return Batch(keys[:misses], keys[misses:useful], keys[victims:], keys[useful:victims])


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


def open_door(door, arguments: tuple) -> Callable:
    """The compiled code behind a door. Called directly, numba does not find out the types anew, which takes longer
    than to look a batch up."""
    return door.compile(tuple(numba.typeof(argument) for argument in arguments))


# The doors from Python into the rules: each compiled when first used, once a kind of state, and called once a batch.
# (A bare 0 would be a type of its own to numba, which would compile the rules again for it.)


@jit_inner
def _part(core, keys, outcome, parts):
    """Write hits, misses, useful hits and victims of a batch one behind the other. Returns where each but the first
    begins, and the end."""
    at = 0
    for place in range(len(keys)):
        if not outcome[place] & MISSED:
            parts[at] = keys[place]
            at += 1
    misses = at
    for place in range(len(keys)):
        if outcome[place] & MISSED:
            parts[at] = keys[place]
            at += 1
    useful = at
    for place in range(len(keys)):
        if outcome[place] & USEFUL:
            parts[at] = keys[place]
            at += 1
    victims = at
    for place in range(core.numbers[N_VICTIMS]):
        parts[at] = core.victims[place]
        at += 1
    return misses, useful, victims, at


@jit
def _look_up_once(core, state, keys, outcome, parts):
    core, state, keys, outcome, parts = unowned((core, state, keys, outcome, parts))
    look_up(core, state, keys, np.int64(0), len(keys), outcome)
    return _part(core, keys, outcome, parts)


@jit
def _look_up_passing_once(core, state, keys, outcome, parts):
    core, state, keys, outcome, parts = unowned((core, state, keys, outcome, parts))
    core.numbers[N_VICTIMS] = 0
    look_up_passing(core, keys, np.int64(0), len(keys), outcome)
    pass_by(state, core.entries, keys, np.int64(0), len(keys))
    return _part(core, keys, outcome, parts)


@jit
def _issue_once(core, state, guesses):
    core, state, guesses = unowned((core, state, guesses))
    issue(core, state, guesses, len(guesses), np.int64(0))
