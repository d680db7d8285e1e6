"""Experts in RAM: a byte-budgeted cache for decode and a ring for prompts, filled by direct reads.

What stays is decided by `nemolab.policy`, in the same compiled code that replays traces.
"""

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np

from nemolab.errors import StoreError
from nemolab.policy import POLICIES, Policy
from nemolab.policy.rows import Seats
from nemolab.store.arena import Arena
from nemolab.store.counts import Counts
from nemolab.store.fetch import Fetched, OnItsWay, Watcher, nothing_to_wait_for
from nemolab.store.growth import Growth
from nemolab.store.prompt_ring import PromptRing
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
        ring_rows = range(slots, slots + 2 * self.ring)
        self._ring = PromptRing(self._residents, self.reader, self._views, ring_rows, self.ring)

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
        if watcher is not None:
            self._wait_turn("a watcher that joins")
        self._residents.watch(watcher)

    def retell(self) -> None:
        """Tell the watcher what lies where once more, whether a fetch is under way or not."""
        self._residents.watch(self._residents.watcher)

    def lookup(self, layer: int, experts: Sequence[int], phase: str = "decode") -> list[np.ndarray]:
        """The blocks of a decode batch, in the order asked for, all resident on return.

        layer    MoE ordinal; experts  ids in rank order
        Returns uint8 [block_bytes] views, valid until the next lookup.
        """
        views = self._views
        return [views[row] for row in self.lookup_rows(layer, experts, phase)]

    def lookup_rows(self, layer: int, experts: Sequence[int], phase: str = "decode") -> list[int]:
        """As `lookup`, but the rows of `.arena` that hold the blocks."""
        self._wait_turn("a lookup")
        residents, counts = self._residents, self._counts_of(phase)
        try:
            seats = self._look_up(layer, experts, counts)
            if seats is not None:
                late = len(residents.ahead.find_late(seats.useful)) if seats.useful else 0
                if seats.misses:
                    self.reader.read_many(self._jobs(seats.misses, seats.miss_rows))
                    residents.tell_came(seats.misses)
                residents.take(seats.useful, late, counts)
                residents.book.note_whole()
        except BaseException:
            residents.forget()
            raise
        if seats is None:
            raise self._refusal(layer, experts)
        counts.hits += seats.distinct - self.missed
        counts.misses += self.missed
        return seats.rows

    def fetch(self, layer: int, experts: Sequence[int], phase: str = "decode") -> Fetched:
        """As `lookup_rows`, but returns at once, while what is missing is read.

        Until its `wait` has returned no block may be read ahead; whatever else is asked of the cache gives the fetch
        up, as if a read of it had failed (an interrupt may have come between the two).
        """
        self._wait_turn("a lookup")
        residents, counts, late = self._residents, self._counts_of(phase), []
        try:
            seats = self._look_up(layer, experts, counts)
            if seats is not None and (seats.misses or seats.useful):
                if seats.useful:
                    late = residents.ahead.find_late(seats.useful)
                pending = Pending(self.reader, self._jobs(seats.misses, seats.miss_rows))
                hits = seats.distinct - self.missed
                begun = residents.begun = OnItsWay(counts, hits, seats.misses, late, pending, self._arrive)
                if seats.useful:
                    residents.take([key for key in seats.useful if key not in late], 0, counts)
                pending.begin(self.missed)
        except BaseException:
            residents.forget()
            raise
        if seats is None:
            raise self._refusal(layer, experts)
        if residents.begun is None:
            counts.hits += seats.distinct
            return Fetched(seats.rows, [], nothing_to_wait_for)
        missing = seats.missing
        if late:
            base = layer * self._n_experts
            missing = [rank for rank, expert in enumerate(experts) if rank in missing or base + expert in late]
        if not missing:  # what was read ahead has come: nobody need wait, and so nobody will
            begun.wait()
        return Fetched(seats.rows, missing, begun.wait)

    def _look_up(self, layer: int, experts: Sequence[int], counts: Counts) -> Seats | None:
        """What the book says of a batch, whose victims have left. None: it is refused."""
        residents = self._residents
        if len(experts) > residents.slots and len(set(experts)) > residents.slots:
            return None
        if residents.growing:
            residents.grow(layer, experts, needed=True)
        seats = residents.book.look_up(layer, experts)
        if seats is not None:
            self.missed = len(seats.misses)
            if seats.victims:
                residents.vacate(seats.victims, seats.wasted, counts)
        return seats

    def _jobs(self, keys: Sequence[int], rows: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
        """What a reader is told."""
        return zip(keys, map(self._views.__getitem__, rows), strict=True)

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
            residents.take(batch.late, len(batch.late), batch.counts)
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
                if issue.reads:
                    counts.issued += len(issue.reads)
                    residents.ahead.start(self._jobs(issue.reads, issue.rows), counts)
        except BaseException:
            residents.forget()
            raise
        if issue is None:
            raise self._refusal(layer, guesses)
        return len(issue.reads)

    def stream(
        self, layer: int, experts: Sequence[int], phase: str = "prefill", lookups: Sequence[int] | None = None
    ) -> Iterator[list[tuple[int, np.ndarray]]]:
        """The distinct experts of a prompt pass in batches of `ring`, each read at most once.

        Hits are used where they lie and not refreshed, misses go through the ring, nothing enters the cache. The next
        batch is read while the caller computes on this one; a batch's views are valid until the next is asked for.

        With `prompt_enters` it is one batch as in decode instead, by the rules of a replay with `prefill_warms`: hits
        are refreshed and misses stay. lookups: the ids as tokens asked for them, for the order of recency (by default
        that of `experts`).
        """
        views = self._views
        # Closed by name: Python 3.12.3 would keep the inner stream open until the outer one is forgotten.
        with contextlib.closing(self.stream_rows(layer, experts, phase, lookups)) as batches:
            for ids, rows in batches:
                yield [(expert, views[row]) for expert, row in zip(ids, rows, strict=True)]

    def stream_rows(
        self, layer: int, experts: Sequence[int], phase: str = "prefill", lookups: Sequence[int] | None = None
    ) -> Iterator[tuple[list[int], list[int]]]:
        """As `stream`, but (expert ids, rows of `.arena`) for each batch."""
        if self._streaming:
            raise StoreError("one prompt stream at a time; finish or close the other first")
        self._wait_turn("a prompt")
        ids = list(dict.fromkeys(experts.tolist() if hasattr(experts, "tolist") else experts))
        if ids and not self._are_known(layer, ids):
            raise self._refusal(layer, ids)
        base, counts, self.missed = layer * self._n_experts, self._counts_of(phase), 0
        keys = [base + expert for expert in ids]
        if self.prompt_enters and ids:
            by_last_use = _order_by_last_use(ids if lookups is None else lookups)
            batches = self._ring.stream_entering(keys, counts, layer, by_last_use)
        else:
            batches = self._ring.stream(keys, counts)
        try:
            self._streaming = True
            with contextlib.closing(batches):
                for batch in batches:
                    self.missed += batch.misses
                    yield [key - base for key in batch.keys], batch.rows
        finally:
            self._streaming = False

    def stats(self) -> dict[str, dict[str, int]]:
        """By phase: lookups, hits, misses, reads and bytes_read (whole blocks that arrived, asked for or ahead), and
        prefetch_issued, _useful (asked for while cached), _wasted (left before) and _late (waited for when asked for).

        Waits for reads under way, so that no count depends on the moment.
        """
        lost = self._residents.ahead.settle()
        return {
            phase: counts.to_dict(self.block_bytes, sum(owner is counts for owner in lost))
            for phase, counts in list(self._counts.items())  # another thread's lookup may begin a phase
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

    def _refusal(self, layer: int, experts: Sequence[int]) -> StoreError:
        """Why nothing was done."""
        distinct = len(set(experts))
        if distinct > self.slots and self._are_known(layer, experts):
            return StoreError(f"a batch of {distinct} experts does not fit a cache of {self.slots} blocks")
        return StoreError(
            f"layer {layer}, experts {min(experts)} to {max(experts)}: "
            f"the store holds {self._n_layers} MoE layers of {self._n_experts} experts"
        )

    def _are_known(self, layer: int, experts: Sequence[int]) -> bool:
        """Where not, an id would silently be another layer's expert."""
        return 0 <= min(experts) and max(experts) < self._n_experts and 0 <= layer < self._n_layers

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
        self._views.clear()
        self._arena.close()


def _order_by_last_use(ids: Sequence[int]) -> list[int]:
    """Each once, in order of last occurrence."""
    backwards = np.asarray(ids).ravel()[::-1]
    _, first = np.unique(backwards, return_index=True)
    return backwards[np.sort(first)[::-1]].tolist()


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
