"""What a policy is: five small functions over a state of arrays, compiled into the rules that all policies share.

A policy file defines a NamedTuple of arrays (its state) and plain functions of the names below, and registers both.
The shared rules (`nemolab.policy.core`) call the functions declared here; when numba compiles the rules for a state, it
puts that policy's own functions in their place. So the engine's cache and the offline replay run one compiled decision.

    meet      a lookup begins; an entry that hits may be taken out of the line of victims
    choose    which entry leaves next
    remove    it leaves
    place     the lookup ends: where a hit, a miss or a prefetched entry now stands
    pass_by   a prompt pass looked the entry up: nothing enters, nothing is refreshed (only clairvoyants care)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba.extending import overload

from nemolab.jit import INNER

HIT, MISS, PREFETCHED = 0, 1, 2  # how an entry comes to be placed
ANYONE = -1  # a stamp that marks nobody


@dataclass(frozen=True)
class Setting:
    """What a policy may know when it starts.

    size_bytes      int64 [n_keys]; capacity_bytes  the budget; seed  for those that roll dice
    keys, starts    all lookups to come and where batches begin, for policies that know the future; None in an engine
    """

    size_bytes: np.ndarray
    capacity_bytes: int
    seed: int = 0
    keys: np.ndarray | None = None
    starts: np.ndarray | None = None

    @property
    def n_keys(self) -> int:
        return len(self.size_bytes)


@dataclass(frozen=True)
class Policy:
    """A policy as it is asked for by name.

    start     makes the state for a Setting
    forced    whether every miss must enter the cache; else a miss may pass it by
    future    whether it must know all lookups in advance, so that no engine can run it
    divides   whether it shares the budget out at the start, so that the budget cannot change later
    """

    name: str
    about: str
    start: Callable[[Setting], Any]
    meet: Callable
    choose: Callable
    remove: Callable
    place: Callable
    pass_by: Callable
    forced: bool = True
    future: bool = False
    divides: bool = False


def ignore(state, entries, keys, first, last):
    pass


_BY_STATE: dict[type, Policy] = {}


def register(state: type, policy: Policy) -> Policy:
    """Tell the compiler which functions belong to states of this type. Variants may share a state and its functions."""
    known = _BY_STATE.setdefault(state, policy)
    if (known.meet, known.choose, known.remove, known.place, known.pass_by) != (
        policy.meet, policy.choose, policy.remove, policy.place, policy.pass_by
    ):  # fmt: skip
        raise ValueError(f"{policy.name} and {known.name} share {state.__name__} but not its functions")
    return policy


def meet(state, key, held):
    """A lookup of `key` begins, before victims are chosen. held: whether it is cached."""
    return _BY_STATE[type(state)].meet(state, key, held)


def choose(state, entries, stamp):
    """The key that leaves next, of those cached whose mark is not `stamp`; there is one. -1: this policy keeps all."""
    return _BY_STATE[type(state)].choose(state, entries, stamp)


def remove(state, key):
    """`key` leaves the cache."""
    _BY_STATE[type(state)].remove(state, key)


def place(state, key, how, at):
    """The end of a lookup, or of the issue of a prefetch. how: HIT, MISS or PREFETCHED; at: which lookup of the trace.

    Called in the order of last occurrence within the batch, hits and misses mixed. Returns whether a miss stays.
    """
    return _BY_STATE[type(state)].place(state, key, how, at)


def pass_by(state, entries, keys, first, last):
    """A prompt pass has looked keys[first:last] up; nothing entered and nothing was refreshed."""
    _BY_STATE[type(state)].pass_by(state, entries, keys, first, last)


def _compile_by_state(stub: Callable) -> None:
    def find(state_type):
        policy = _BY_STATE.get(getattr(state_type, "instance_class", None))
        return policy and getattr(policy, stub.__name__)

    # numba matches an overload's parameters by name, so each stub needs a finder with the names of its own.
    finders = {
        "meet": lambda state, key, held: find(state),
        "choose": lambda state, entries, stamp: find(state),
        "remove": lambda state, key: find(state),
        "place": lambda state, key, how, at: find(state),
        "pass_by": lambda state, entries, keys, first, last: find(state),
    }
    overload(stub, jit_options=INNER)(finders[stub.__name__])


for _stub in (meet, choose, remove, place, pass_by):
    _compile_by_state(_stub)
