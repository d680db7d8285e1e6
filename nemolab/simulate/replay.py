"""Replay: the lookups of a trace through the cache that the engine has, under any policy and budget.

Every figure comes with its phase, its unit, and whether the cache began cold in each conversation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from nemolab.errors import TraceError, UsageError
from nemolab.policy import POLICIES, Policy, Setting
from nemolab.policy.core import FIRST, LATE, MISSED, USEFUL, start_core
from nemolab.policy.run import run_batches
from nemolab.simulate.lookups import Lookups
from nemolab.trace import PHASES

PER_LAYER = "lru-per-layer"
POLICY_NAMES = (*POLICIES, PER_LAYER)
BOTH = "all"  # the name of both phases together


@dataclass(frozen=True)
class Replay:
    """What became of every lookup.

    outcome        uint8 [lookups]: flags MISSED, FIRST, USEFUL, LATE of `nemolab.policy.core`
    issued         int64 [batches]: blocks prefetched before the batch; issued_bytes their bytes, None where unknown
    wasted         int64 [batches]: prefetched blocks that left unused since the batch before, or with a cold cache
    budget_bytes, slots   the budget, in bytes or in blocks; the other is None where block sizes differ or are unknown
    """

    lookups: Lookups
    policy: str
    budget_bytes: int | None
    slots: int | None
    prefetch: int
    cold: bool
    timed: bool
    outcome: np.ndarray
    issued: np.ndarray
    issued_bytes: np.ndarray | None
    wasted: np.ndarray

    @property
    def missed(self) -> np.ndarray:
        """bool [lookups]"""
        return self.outcome & MISSED != 0

    def misses_by_batch(self) -> np.ndarray:
        """int64 [batches]: what the engine reads on demand, layer by layer, step by step."""
        return (
            np.add.reduceat(self.missed, self.lookups.starts[:-1], dtype=np.int64) if len(self.issued) else self.issued
        )

    def rows(self) -> list[dict]:
        """One row for each phase, and one for both."""
        return [self.row(phase) for phase in (*PHASES, BOTH)]

    def row(self, phase: str) -> dict:
        """The counts of a phase: `prefill`, `decode` or `all`; None for what cannot be known.

        compulsory is what a cache of any size would miss: blocks that were never in it. Prefetches count in the phase
        they were issued or lost in; late ones only where `replay` was told how many reads end in time.
        """
        lookups = self.lookups
        number = None if phase == BOTH else PHASES.index(phase)
        batches = np.ones(lookups.n_batches, bool) if number is None else lookups.phase == number
        chosen = np.repeat(batches, np.diff(lookups.starts))
        outcome = self.outcome[chosen]
        missed = outcome & MISSED != 0
        n_lookups, misses, tokens = len(outcome), int(missed.sum()), lookups.count_tokens(number)
        issued = int(self.issued[batches].sum())
        bytes_read = None
        if lookups.size_bytes is not None and self.issued_bytes is not None:
            missed_bytes = lookups.size_bytes[lookups.keys[chosen][missed]].sum()
            bytes_read = int(missed_bytes + self.issued_bytes[batches].sum())
        first = int(np.count_nonzero(outcome & FIRST))
        return {
            "policy": self.policy,
            "phase": phase,
            "cold": self.cold,
            "budget_bytes": self.budget_bytes,
            "slots": self.slots,
            "prefetch": self.prefetch,
            "tokens": tokens,
            "lookups": n_lookups,
            "hits": n_lookups - misses,
            "misses": misses,
            "hit_rate": (n_lookups - misses) / n_lookups if n_lookups else None,
            "compulsory": first,
            "capacity": misses - first,
            "reads": misses + issued,
            "bytes_read": bytes_read,
            "reads_per_token": (misses + issued) / tokens if tokens else None,
            "bytes_per_token": bytes_read / tokens if tokens and bytes_read is not None else None,
            "prefetch_issued": issued,
            "prefetch_useful": int(np.count_nonzero(outcome & USEFUL)),
            "prefetch_wasted": int(self.wasted[batches].sum()),
            "prefetch_late": int(np.count_nonzero(outcome & LATE)) if self.timed or not self.prefetch else None,
        }


def replay(
    lookups: Lookups,
    policy: str = "lru",
    *,
    budget_bytes: int | None = None,
    slots: int | None = None,
    prefetch: int = 0,
    cold: bool = False,
    reads_in_time: int | None = None,
    seed: int = 0,
) -> Replay:
    """Feed every lookup to a cache under a policy (POLICY_NAMES) and note what became of it.

    budget_bytes | slots   the budget, one of the two; slots count blocks of any size as one
    prefetch       how many of the guesses for the next layer are read ahead, by rank
    cold           empty the cache where the conversation changes; else it is carried over
    reads_in_time  prefetch reads that end before the next layer asks, to count late ones; None: not counted
    Raises UsageError for an unknown policy or contradicting sizes, TraceError where the trace lacks what is asked for.
    """
    _check_asked(lookups, policy, budget_bytes, slots, prefetch)
    block_bytes = lookups.block_bytes
    # Blocks of one size are counted, as in the engine: a policy that keeps a tenth of the budget for something decides
    # alike however the budget was spelled.
    blocks = slots if slots is not None else block_bytes and budget_bytes // block_bytes
    capacity = budget_bytes if blocks is None else blocks
    sizes = lookups.size_bytes if blocks is None else np.ones(lookups.n_keys, np.int64)
    job = _Job(sizes, capacity, prefetch, reads_in_time, seed)
    written = _Written.of(len(lookups.keys), lookups.n_batches)
    for first, last in _split(lookups, cold):
        part = lookups.between(first, last)
        here = written.between(lookups.starts, first, last)
        if policy == PER_LAYER:
            _run_layers(job, part, here)
        else:
            _run(job, POLICIES[policy], part, False, here)
        if cold and prefetch and last > first:
            used = np.count_nonzero(here.outcome & USEFUL)
            here.wasted[-1] += here.issued.sum() - used - here.wasted.sum()  # what a cold cache still held unused
    return Replay(
        lookups=lookups,
        policy=policy,
        budget_bytes=budget_bytes if slots is None else block_bytes and slots * block_bytes,
        slots=blocks,
        prefetch=prefetch,
        cold=cold,
        timed=reads_in_time is not None,
        outcome=written.outcome,
        issued=written.issued,
        issued_bytes=written.issued_bytes if blocks is None else _bytes_of_slots(lookups, written.issued),
        wasted=written.wasted,
    )


def _check_asked(lookups: Lookups, policy: str, budget_bytes: int | None, slots: int | None, prefetch: int) -> None:
    if policy not in POLICY_NAMES:
        raise UsageError(f"unknown policy {policy!r}; known are {', '.join(POLICY_NAMES)}")
    if (budget_bytes is None) == (slots is None):
        raise UsageError("give a replay either budget_bytes or slots")
    if min(x for x in (budget_bytes, slots, prefetch) if x is not None) < 0:
        raise UsageError(
            f"a budget of {slots if slots is not None else budget_bytes} with prefetch {prefetch}; 0 or more are needed"
        )
    if budget_bytes is not None and lookups.size_bytes is None:
        raise TraceError(
            "the trace does not say how large its blocks are: give the budget in slots, or the size of a block"
        )
    if prefetch and lookups.guesses is None:
        raise TraceError(f"prefetch {prefetch}: the trace holds no guesses")


@dataclass(frozen=True)
class _Job:
    sizes: np.ndarray
    capacity: int
    prefetch: int
    reads_in_time: int | None
    seed: int


class _Written(NamedTuple):
    """What a run writes: outcome of each lookup; of each batch issued, issued_bytes (sizes as the budget counts them)
    and wasted, as in `Replay`."""

    outcome: np.ndarray
    issued: np.ndarray
    issued_bytes: np.ndarray
    wasted: np.ndarray

    @classmethod
    def of(cls, n_lookups: int, n_batches: int) -> _Written:
        return cls(np.zeros(n_lookups, np.uint8), *(np.zeros(n_batches, np.int64) for _ in range(3)))

    def between(self, starts: np.ndarray, first: int, last: int) -> _Written:
        """The places of batches first to last - 1."""
        return _Written(self.outcome[starts[first] : starts[last]], *(by_batch[first:last] for by_batch in self[1:]))


def _split(lookups: Lookups, cold: bool) -> list[tuple[int, int]]:
    """Where caches begin and end: (first, last + 1) batches."""
    ends = np.flatnonzero(np.diff(lookups.conversation)) + 1 if cold else []
    bounds = [0, *map(int, ends), lookups.n_batches]
    return list(zip(bounds[:-1], bounds[1:], strict=True))


def _run(job: _Job, policy: Policy, part: Lookups, alone: bool, written: _Written) -> None:
    """alone: the part is of one layer only."""
    core = start_core(job.sizes, job.capacity, forced=policy.forced, foresees=policy.future, ready=job.reads_in_time)
    state = policy.start(Setting(job.sizes, job.capacity, job.seed, part.keys, part.starts))
    guesses = part.guesses if job.prefetch else np.empty((part.n_batches, 0), np.int32)
    run_batches(core, state, part.keys, part.starts, part.passing, guesses, job.prefetch, alone, *written)


def _run_layers(job: _Job, part: Lookups, written: _Written) -> None:
    """An LRU of its own for each layer, with an equal share of the budget."""
    share = replace(job, capacity=job.capacity // part.n_layers)
    order = np.argsort(part.layer, kind="stable")
    by_layer, places = part.take(order)
    found = _Written.of(len(places), len(order))
    ends = np.cumsum(np.bincount(part.layer, minlength=part.n_layers)).tolist()
    for first, last in zip([0, *ends[:-1]], ends, strict=True):
        _run(share, POLICIES["lru"], by_layer.between(first, last), True, found.between(by_layer.starts, first, last))
    written.outcome[places] = found.outcome
    for target, by_batch in zip(written[1:], found[1:], strict=True):
        target[order] = by_batch


def _bytes_of_slots(lookups: Lookups, issued: np.ndarray) -> np.ndarray | None:
    """Bytes of what was prefetched where the budget counted blocks: known if the blocks of a layer are of one size."""
    if lookups.size_bytes is None:
        return None
    by_layer = lookups.size_bytes.reshape(lookups.n_layers, lookups.n_experts)
    if issued.any() and np.any(by_layer != by_layer[:, :1]):
        return None
    return issued * by_layer[lookups.layer, 0]
