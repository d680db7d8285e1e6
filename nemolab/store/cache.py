"""Experts in RAM: a byte-budgeted cache for decode and a ring for prompts, filled by direct reads.

What stays is decided by `nemolab.policy`, in the same compiled code that replays traces.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from nemolab.errors import StoreError
from nemolab.policy import POLICIES, Policy
from nemolab.policy.rows import NO_ROW, Seats
from nemolab.store.arena import Arena
from nemolab.store.counts import Counts
from nemolab.store.fetch import Fetched, OnItsWay, Watcher, nothing_to_wait_for
from nemolab.store.growth import Growth
from nemolab.store.reader import DEFAULT_THREADS, BlockReader, Pending
from nemolab.store.residents import Residents

RING = 32  # experts of a prompt batch


class ExpertCache:
    """The experts of a store, resident as far as the budget goes.

    budget_bytes | slots  how much stays (one of the two); capped at what the store holds, refused below top_k blocks
    policy                what leaves: a name of `nemolab.policy.POLICIES`, or a Policy; none that must know the future
    reader                a BlockReader to use and leave open; by default one of its own with `threads` threads
    ring                  experts in a prompt batch; two such banks are kept beside the budget, once a prompt is seen
    prompt_enters         whether what a prompt reads stays, as in decode, instead of leaving no trace (see `stream`)
    .slots                blocks it may hold. Memory is taken as blocks come in, and looked after again on the way: when
                          others have taken it meanwhile, the cache stays at what it has, says so, and .slots is less
    .arena                uint8 [rows, block_bytes]; `lookup_rows` and `stream_rows` answer with its row numbers
    .missed               blocks that the last lookup, or the last stream so far, had to read
    .restarts             how often a failed read or an interrupt made the policy forget what it knew
    For one thread at a time. Close it, or use it in a `with` block.
    Raises StoreError for sizes that cannot work, ids out of range, a batch larger than the cache, a failed read.
    """

    def __init__(
        self,
        store,
        *,
        budget_bytes: int | None = None,
        slots: int | None = None,
        policy: str | Policy = "lru",
        reader: BlockReader | None = None,
        threads: int = DEFAULT_THREADS,
        ring: int = RING,
        prompt_enters: bool = False,
    ):
        if (budget_bytes is None) == (slots is None):
            raise StoreError("give the cache either budget_bytes or slots")
        if ring < 1:
            raise StoreError(f"prompt batches of {ring} experts; 1 or more are needed")
        self.policy = _find_policy(policy)
        self.store = store
        self.block_bytes = store.block_bytes
        self._n_layers, self._n_experts = store.n_layers, store.n_experts
        wanted = slots if slots is not None else budget_bytes // self.block_bytes
        top_k = store.config.top_k
        if wanted < top_k:
            raise StoreError(
                f"a cache of {wanted} blocks cannot hold the {top_k} experts a token needs in one layer; "
                f"give it {top_k} slots or {top_k * self.block_bytes:,} bytes at least"
            )
        slots = min(wanted, self._n_layers * self._n_experts)
        self.ring = min(ring, self._n_experts)
        self.prompt_enters = prompt_enters
        self._arena = Arena(slots + 2 * self.ring, self.block_bytes)
        self.arena = self._arena.rows
        self._views = list(self.arena)
        self._ring_rows = range(slots, slots + 2 * self.ring)
        self._counts: dict[str, Counts] = {}
        self._streaming = False
        self.missed = 0
        self._own_reader = reader is None
        try:
            self.reader = store.open_reader(threads=threads) if reader is None else reader
        except BaseException:
            self._release()
            raise
        growth = Growth(slots, self.block_bytes, top_k)
        self._residents = Residents((self._n_layers, self._n_experts), slots, self.policy, growth, self.reader)

    def __enter__(self) -> "ExpertCache":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    @property
    def slots(self) -> int:
        return self._residents.slots

    @property
    def restarts(self) -> int:
        return self._residents.restarts

    @property
    def watcher(self) -> Watcher | None:
        """Told what lies where: first as it is now, then whatever changes."""
        return self._residents.watcher

    @watcher.setter
    def watcher(self, watcher: Watcher | None) -> None:
        self._wait_turn("a watcher that joins")
        self._residents.watch(watcher)

    def lookup(self, layer: int, experts: Sequence[int], phase: str = "decode") -> list[np.ndarray]:
        """The blocks of a decode batch, in the order asked for, all resident on return.

        layer    MoE ordinal; experts  ids in rank order
        Returns uint8 [block_bytes] views, valid until the next lookup.
        """
        views = self._views
        return [views[row] for row in self.lookup_rows(layer, experts, phase)]

    def lookup_rows(self, layer: int, experts: Sequence[int], phase: str = "decode") -> list[int]:
        """As `lookup`, but the rows of `.arena` that hold the blocks."""
        fetched = self._fetch(layer, experts, phase, own_hands=1)
        fetched.wait()
        return fetched.rows

    def fetch(self, layer: int, experts: Sequence[int], phase: str = "decode") -> Fetched:
        """As `lookup_rows`, but returns at once, while what is missing is read.

        Until its `wait` has returned no block may be read ahead; whatever else is asked of the cache gives the fetch
        up, as if a read of it had failed (an interrupt may have come between the two).
        """
        return self._fetch(layer, experts, phase, own_hands=0)

    def _fetch(self, layer: int, experts: Sequence[int], phase: str, own_hands: int) -> Fetched:
        """own_hands: threads that come to wait for the reads at once, and so to help."""
        self._wait_turn("a lookup")
        residents, counts = self._residents, self._counts_of(phase)
        if len(experts) > residents.slots and len(set(experts)) > residents.slots:
            raise StoreError(f"a batch of {len(set(experts))} experts does not fit a cache of {residents.slots} blocks")
        begun = None
        try:
            if residents.growing:
                residents.grow(layer, experts, needed=True)
            seats = residents.book.look_up(layer, experts)
            if seats is not None:
                self.missed = len(seats.misses)
                if seats.misses or seats.useful:
                    begun = self._begin_reads(seats, counts, own_hands)
                else:
                    counts.hits += seats.distinct
        except BaseException:
            residents.forget()
            raise
        if seats is None:
            raise self._out_of_range(layer, experts)
        if begun is None:
            return Fetched(seats.rows, [], nothing_to_wait_for)
        missing = seats.missing
        if begun.late:
            base = layer * self._n_experts
            missing = [rank for rank, expert in enumerate(experts) if rank in missing or base + expert in begun.late]
        return Fetched(seats.rows, missing, begun.wait)

    def _begin_reads(self, seats: Seats, counts: Counts, own_hands: int) -> OnItsWay:
        """What the book says to be there comes: victims leave, what was read ahead is taken, misses are read."""
        residents, misses, useful, late = self._residents, seats.misses, seats.useful, []
        if misses:
            residents.vacate(seats.victims, seats.wasted, counts)
        if useful:
            late = residents.ahead.find_late(useful)
        pending = Pending(self.reader, zip(misses, map(self._views.__getitem__, seats.miss_rows), strict=True))
        begun = residents.begun = OnItsWay(counts, seats.distinct - len(misses), misses, late, pending, self._arrive)
        if len(useful) > len(late):
            residents.take([key for key in useful if key not in late], counts)
        pending.begin(len(misses) - own_hands)
        return begun

    def _arrive(self, batch: OnItsWay) -> None:
        """All of a fetch is there on return."""
        residents = self._residents
        if batch is not residents.begun:
            if batch.arrived:
                return
            raise StoreError("this fetch was given up: something else was asked of the cache before it was waited for")
        try:
            if batch.misses:
                batch.pending.wait()
                residents.tell_came(batch.misses)
            if batch.late:
                residents.take(batch.late, batch.counts, late=True)
            residents.book.note_whole()
            batch.arrived, residents.begun = True, None
        except BaseException:
            residents.forget()
            raise
        batch.counts.hits += batch.hits
        batch.counts.misses += len(batch.misses)

    def prefetch(self, layer: int, guesses: Sequence[int], phase: str = "decode") -> int:
        """Begin to read what the next layer may ask for, as far as the batch in use leaves room; returns at once.

        layer    MoE ordinal of the next layer; guesses  its ids, by rank: the absent ones are read
        Call it after a layer's lookup and before its blocks are used: those stay where they are. What is read counts as
        cached from here on; a lookup waits for a block still under way, and reads one anew whose read failed.
        Returns how many are read.
        """
        residents, counts = self._residents, self._counts_of(phase)
        if residents.begun is not None:
            raise StoreError("a prefetch while a fetch is under way would compete with it; call the fetch's wait first")
        self._wait_turn("a prefetch")
        try:
            if residents.growing:
                residents.grow(layer, guesses, needed=False)
            issue = residents.book.issue(layer, guesses)
            if issue is not None:
                if issue.victims:
                    residents.vacate(issue.victims, issue.wasted, counts)
                counts.issued += len(issue.reads)
                jobs = zip(issue.reads, map(self._views.__getitem__, issue.rows), strict=True)
                residents.ahead.start(jobs, counts)
        except BaseException:
            residents.forget()
            raise
        if issue is None:
            raise self._out_of_range(layer, guesses)
        return len(issue.reads)

    def stream(
        self, layer: int, experts: Sequence[int], phase: str = "prefill"
    ) -> Iterator[list[tuple[int, np.ndarray]]]:
        """The distinct experts of a prompt pass in batches of `ring`, each read at most once.

        Hits are used where they lie and not refreshed, misses go through the ring, nothing enters the cache. The next
        batch is read while the caller computes on this one; a batch's views are valid until the next is asked for.
        """
        views = self._views
        # Closed by name: Python 3.12.3 would keep the inner stream open until the outer one is forgotten.
        with contextlib.closing(self.stream_rows(layer, experts, phase)) as batches:
            for ids, rows in batches:
                yield [(expert, views[row]) for expert, row in zip(ids, rows, strict=True)]

    def stream_rows(
        self, layer: int, experts: Sequence[int], phase: str = "prefill"
    ) -> Iterator[tuple[list[int], list[int]]]:
        """As `stream`, but (expert ids, rows of `.arena`) for each batch."""
        if self._streaming:
            raise StoreError("one prompt stream at a time; finish or close the other first")
        self._wait_turn("a prompt")
        ids = list(dict.fromkeys(experts.tolist() if hasattr(experts, "tolist") else experts))
        if ids and not (0 <= min(ids) and max(ids) < self._n_experts and 0 <= layer < self._n_layers):
            raise self._out_of_range(layer, ids)
        base = layer * self._n_experts
        keys = [base + expert for expert in ids]
        residents, counts = self._residents, self._counts_of(phase)
        batches = [keys[start : start + self.ring] for start in range(0, len(keys), self.ring)]
        here = coming = None
        self.missed = 0
        try:
            self._streaming = True
            for number, batch in enumerate([*batches, None]):
                here, coming = coming, None
                if batch is not None:  # read ahead into the bank that the batch before last has left
                    coming = self._plan_ring(batch, number % 2)
                    coming.pending.begin(coming.misses)
                if here is not None:
                    asked = [key for key in here.keys if key in residents.ahead] if residents.ahead else []
                    late = residents.ahead.find_late(asked)
                    here.pending.wait()
                    if asked:
                        self._pass_by(asked, late, counts)
                    self.missed += here.misses
                    counts.hits += len(here.keys) - here.misses
                    counts.misses += here.misses
                    yield [key - base for key in here.keys], here.rows
        finally:
            for unfinished in (here, coming):
                if unfinished is not None:
                    unfinished.pending.cancel()
            self._streaming = False

    def _pass_by(self, asked: list[int], late: list[int], counts: Counts) -> None:
        """A prompt asks for blocks read ahead."""
        try:
            self._residents.take([key for key in asked if key not in late], counts)
            self._residents.take(late, counts, late=True)
            self._residents.book.pass_by(asked)
        except BaseException:
            self._residents.forget()
            raise

    def _plan_ring(self, keys: list[int], bank: int) -> "_RingBatch":
        """What the cache lacks is to be read into one of the two banks."""
        free = iter(self._ring_rows[bank * self.ring :])
        rows, jobs = self._residents.book.row_of[np.array(keys)].tolist(), []
        for place, key in enumerate(keys):
            if rows[place] == NO_ROW:
                rows[place] = next(free)
                jobs.append((key, self._views[rows[place]]))
        return _RingBatch(keys, rows, len(jobs), Pending(self.reader, jobs))

    def stats(self) -> dict[str, dict[str, int]]:
        """By phase: lookups, hits, misses, reads and bytes_read (whole blocks that arrived, asked for or ahead), and
        prefetch_issued, _useful (asked for while cached), _wasted (left before) and _late (waited for when asked for).

        Waits for reads under way, so that no count depends on the moment.
        """
        lost = self._residents.ahead.settle()
        return {
            phase: counts.to_dict(self.block_bytes, sum(owner is counts for owner in lost))
            for phase, counts in self._counts.items()
        }

    def clear(self) -> None:
        """Forget everything cached: what comes next begins cold. Blocks read ahead and not used count as wasted."""
        self._wait_turn("clearing")
        self._residents.clear()

    def close(self) -> None:
        """Free memory, file and threads. Closing twice is fine."""
        if self.reader is not None:
            self._residents.close()
            if self._own_reader:
                self.reader.close()
        self.reader = None
        self._release()

    def _out_of_range(self, layer: int, experts: Sequence[int]) -> StoreError:
        return StoreError(
            f"layer {layer}, experts {min(experts)} to {max(experts)}: "
            f"the store holds {self._n_layers} MoE layers of {self._n_experts} experts"
        )

    def _wait_turn(self, what: str) -> None:
        """Not when closed, nor amid a prompt batch; a fetch that nobody waited for is over."""
        if self.arena is None:
            raise StoreError("the expert cache is closed")
        if self._streaming:
            raise StoreError(f"{what} while a prompt batch is in use could evict it; finish the stream first")
        if self._residents.begun is not None:
            self._residents.forget()

    def _counts_of(self, phase: str) -> Counts:
        counts = self._counts.get(phase)
        if counts is None:
            counts = self._counts[phase] = Counts()
        return counts

    def _release(self) -> None:
        self.arena = None
        self._views = []
        self._arena.close()


class _RingBatch(NamedTuple):
    """One batch of a prompt pass: its block indices, their rows, how many are read, and the reads."""

    keys: list[int]
    rows: list[int]
    misses: int
    pending: Pending


def _find_policy(policy: str | Policy) -> Policy:
    found = POLICIES.get(policy) if isinstance(policy, str) else policy
    online = ", ".join(name for name, known in POLICIES.items() if not known.future)
    if found is None:
        raise StoreError(f"unknown policy {policy!r}; a cache runs {online}")
    if found.future:
        raise StoreError(
            f"the policy {found.name} must know all lookups in advance: it runs in a replay only; a cache runs {online}"
        )
    return found
