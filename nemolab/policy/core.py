"""What counts, for every policy alike: a byte budget, batches, prompt passes that leave no trace, prefetch.

A *batch* is all lookups of one layer at one step, each key once, in the order of last occurrence.
    - Misses enter, then victims leave until the budget holds: never an entry of the running batch while another can go.
      What is evicted is decided before anything enters, since the whole batch is known; the victims are the same.
    - A batch that alone exceeds the budget loses its own oldest at its end; under a policy that knows the future, those
      that it would choose.
    - A prompt pass reads what is cached without refreshing it, and nothing enters.
    - Prefetch: of the first guesses for the next layer, those not cached are read. Slot and eviction happen at issue;
      the running batch and this round's own reads are spared, and a guess that would need their place is not read.
      Nothing is refreshed if present, so a guess that is present may be evicted by one that is not.
So misses never depend on timing. The functions are compiled, once for each kind of state (`LFUState` serves three
policies).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nemolab.jit import jit_inner
from nemolab.policy.interface import ANYONE, HIT, MISS, PREFETCHED, choose, meet, place, remove

# What became of a lookup: flags in `outcome`.
MISSED = 1
FIRST = 2  # a miss of a key that was never in the cache: a cache of any size would miss it too
USEFUL = 4  # the first use of a prefetched entry
LATE = 8  # of those, one still being read when it was asked for

# Places in Core.numbers.
CAPACITY, USED, STAMP, SPARED, FORCED, FORESEES, N_VICTIMS, WASTED, READY, ISSUED = range(10)
ABSENT, CACHED, UNUSED = 0, 1, 2  # held; UNUSED: prefetched, not asked for yet
ALL_READY = np.iinfo(np.int64).max

ENTRY = np.dtype(
    [
        ("size_bytes", np.int64),  # what it takes of the budget
        ("mark", np.int64),  # the batch that last looked it up; the stamp of the running batch spares it
        ("issued", np.int64),  # for UNUSED entries: the stamp of the round that read it,
        ("rank", np.int32),  # and its place in that round
        ("held", np.uint8),  # ABSENT, CACHED or UNUSED
        ("entered", np.uint8),  # whether it ever was in the cache
    ],
    align=True,
)


class Core(NamedTuple):
    """The state that all policies share.

    entries   ENTRY [n_keys]: one line of memory a lookup
    victims   int32 [n_keys]: keys that left in the running batch or round, the first numbers[N_VICTIMS]
    wanted    int32 [n_keys]: keys that the last round of prefetch read, the first numbers[ISSUED]
    numbers   int64 [10]: CAPACITY and USED bytes; STAMP of the running batch, its bytes held (SPARED); FORCED
              insertion; FORESEES: the policy knows the future; N_VICTIMS; WASTED prefetches so far; READY: reads that
              end before the next layer asks; ISSUED in the round
    """

    entries: np.ndarray
    victims: np.ndarray
    wanted: np.ndarray
    numbers: np.ndarray


def start_core(
    size_bytes: np.ndarray, capacity_bytes: int, *, forced: bool, foresees: bool = False, ready: int | None = None
) -> Core:
    """An empty cache. forced, foresees: of the policy; ready: prefetch reads that end before the next layer asks (None:
    all of them)."""
    n_keys = len(size_bytes)
    numbers = np.zeros(10, np.int64)
    numbers[CAPACITY], numbers[FORCED], numbers[FORESEES] = capacity_bytes, forced, foresees
    numbers[READY] = ALL_READY if ready is None else ready
    entries = np.zeros(n_keys, ENTRY)
    entries["size_bytes"] = size_bytes
    return Core(entries, np.zeros(n_keys, np.int32), np.zeros(n_keys, np.int32), numbers)


@jit_inner
def leave(core, state, key):
    """`key` leaves; who leaves is noted for the owner of the memory."""
    numbers, entry = core.numbers, core.entries[key]
    remove(state, key)
    if entry.held == UNUSED:
        numbers[WASTED] += 1
    entry.held = ABSENT
    numbers[USED] -= entry.size_bytes
    core.victims[numbers[N_VICTIMS]] = key
    numbers[N_VICTIMS] += 1


@jit_inner
def make_room(core, state, incoming_bytes, spared_bytes):
    """Victims leave until what comes fits, or until only spared entries are left."""
    numbers = core.numbers
    while numbers[USED] + incoming_bytes > numbers[CAPACITY] and numbers[USED] > spared_bytes:
        key = choose(state, core.entries, numbers[STAMP])
        if key < 0:
            return
        leave(core, state, key)


@jit_inner
def note_use(core, key):
    """The first use of a prefetched entry, as flags."""
    numbers, entry = core.numbers, core.entries[key]
    entry.held = CACHED
    next_batch = entry.issued + 1 == numbers[STAMP]
    return USEFUL | LATE if next_batch and entry.rank >= numbers[READY] else USEFUL


@jit_inner
def look_up(core, state, keys, first, last, outcome):
    """One batch: keys[first:last], each once; what became of each is written to the same places of `outcome`."""
    numbers = core.numbers
    numbers[STAMP] += 1
    numbers[N_VICTIMS] = 0
    stamp = numbers[STAMP]
    incoming_bytes = spared_bytes = np.int64(0)
    for at in range(first, last):
        key = np.int64(keys[at])
        entry = core.entries[key]
        entry.mark = stamp
        held = entry.held
        if held == ABSENT:
            outcome[at] = MISSED if entry.entered else MISSED | FIRST
            entry.entered = 1
            incoming_bytes += entry.size_bytes
        else:
            outcome[at] = note_use(core, key) if held == UNUSED else 0
            spared_bytes += entry.size_bytes
        meet(state, key, held != ABSENT)
    if numbers[FORCED] and incoming_bytes:
        make_room(core, state, incoming_bytes, spared_bytes)
    for at in range(first, last):
        key = np.int64(keys[at])
        missed = outcome[at] & MISSED
        stays = place(state, key, MISS if missed else HIT, at)
        if missed and stays:
            entry = core.entries[key]
            entry.held = CACHED
            numbers[USED] += entry.size_bytes
            spared_bytes += entry.size_bytes
    if numbers[USED] > numbers[CAPACITY]:
        spared_bytes -= shed(core, state, keys, first, last)
    numbers[SPARED] = spared_bytes


@jit_inner
def shed(core, state, keys, first, last):
    """Still above the budget: the batch's own oldest leave. Whoever the policy names, where misses may pass by and
    where it knows the future: a yardstick that dropped its oldest would be none.

    Returns how many bytes of the running batch left.
    """
    numbers = core.numbers
    shed_bytes, at = np.int64(0), first
    while numbers[USED] > numbers[CAPACITY] and at < last:
        if numbers[FORCED] and not numbers[FORESEES]:
            key = np.int64(keys[at])
            at += 1
            if core.entries[key].held == ABSENT:
                continue
        else:
            key = choose(state, core.entries, ANYONE)
        if core.entries[key].mark == numbers[STAMP]:
            shed_bytes += core.entries[key].size_bytes
        leave(core, state, key)
    return shed_bytes


@jit_inner
def look_up_passing(core, keys, first, last, outcome):
    """One layer of a prompt pass: hits are read where they lie, misses through the prompt's own ring."""
    for at in range(first, last):
        key = np.int64(keys[at])
        entry = core.entries[key]
        held = entry.held
        if held == ABSENT:
            outcome[at] = MISSED if entry.entered else MISSED | FIRST
        else:
            outcome[at] = note_use(core, key) if held == UNUSED else 0


@jit_inner
def spare_nobody(core):
    """The batch before is over."""
    core.numbers[STAMP] += 1
    core.numbers[SPARED] = 0


@jit_inner
def issue(core, state, guesses, depth, at):
    """A round of prefetch: the absent ones of guesses[:depth], by rank. at: the next lookup of the trace.

    The keys read are wanted[:numbers[ISSUED]], the victims victims[:numbers[N_VICTIMS]]. Returns the bytes read.
    """
    numbers = core.numbers
    stamp = numbers[STAMP]
    numbers[N_VICTIMS] = 0
    n_wanted = 0
    for place_in_rank in range(min(depth, len(guesses))):
        key = np.int64(guesses[place_in_rank])
        # The bound is for lists of more guesses than there are keys: whoever sends such names some of them twice.
        if key >= 0 and core.entries[key].held == ABSENT and n_wanted < len(core.wanted):
            core.wanted[n_wanted] = key
            n_wanted += 1
    n_issued = read_bytes = np.int64(0)
    for number in range(n_wanted):
        key = np.int64(core.wanted[number])
        entry = core.entries[key]
        size_bytes = entry.size_bytes
        # A guess given twice is there by now; one larger than what the running batch leaves finds no place.
        if entry.held != ABSENT or numbers[SPARED] + size_bytes > numbers[CAPACITY]:
            continue
        make_room(core, state, size_bytes, numbers[SPARED])
        if numbers[USED] + size_bytes > numbers[CAPACITY] or not place(state, key, PREFETCHED, at):
            continue
        entry.held, entry.entered = UNUSED, 1
        entry.mark, entry.issued, entry.rank = stamp, stamp, n_issued
        numbers[USED] += size_bytes
        numbers[SPARED] += size_bytes
        read_bytes += size_bytes
        core.wanted[n_issued] = key
        n_issued += 1
    numbers[ISSUED] = n_issued
    return read_bytes
