"""Experts in RAM: a byte-budgeted cache for decode and a ring for prompts, filled by direct reads.

What stays is decided by `nemolab.policy`, in the same compiled code that replays traces.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from nemolab.errors import StoreError
from nemolab.policy import POLICIES, Cache, Policy
from nemolab.progress import say
from nemolab.store.arena import Arena
from nemolab.store.counts import Counts
from nemolab.store.read_ahead import ReadAhead
from nemolab.store.reader import DEFAULT_THREADS, BlockReader, Pending
from nemolab.system.memory import read_memory
from nemolab.units import show_bytes

RING = 32  # experts of a prompt batch
STEP_BYTES = 64 * 2**20  # memory is asked after again each time the cache has grown by so much


class Watcher(Protocol):
    """Told which blocks lie whole in which rows of a cache's arena. Blocks are layer * n_experts + expert.

    What was said of a block last holds: one may be said to come or to leave that has done so before, or never came.
    """

    def came(self, blocks: list[int], rows: list[int]) -> None:
        """They are whole, and stay until they are said to have left."""

    def left(self, blocks: list[int]) -> None:
        """Their rows may be written to once this returns."""


class Fetched(NamedTuple):
    """A decode batch on its way.

    rows     of `.arena`, in the order asked for
    missing  ranks whose blocks are not there yet; the other rows may be read at once
    wait     returns when all are there. Raises StoreError where one cannot be read, or the fetch was given up
    """

    rows: list[int]
    missing: list[int]
    wait: Callable[[], None]


class ExpertCache:
    """The experts of a store, resident as far as the budget goes.

    budget_bytes | slots  how much stays (one of the two); capped at what the store holds, refused below top_k blocks
    policy                what leaves: a name of `nemolab.policy.POLICIES`, or a Policy; none that must know the future
    reader                a BlockReader to use and leave open; by default one of its own with `threads` threads
    ring                  experts in a prompt batch; two such banks are kept beside the budget, once a prompt is seen
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
        self.slots = min(wanted, self._n_layers * self._n_experts)
        self.ring = min(ring, self._n_experts)
        self._decisions = self._start_decisions()
        self._arena = Arena(self.slots + 2 * self.ring, self.block_bytes)
        self.arena = self._arena.rows
        self._views = list(self.arena)
        self._row_of: dict[int, int] = {}  # block index -> row, once the block is there whole or noted as read ahead
        self._free_rows = list(range(self.slots - 1, -1, -1))  # low rows first: untouched memory is not taken
        self._granted = 0  # rows that memory was found for
        self._counts: dict[str, Counts] = {}
        self._streaming = False
        self._on_its_way: _OnItsWay | None = None
        self._watcher: Watcher | None = None
        self.missed = self.restarts = 0
        self._own_reader = reader is None
        try:
            self.reader = store.open_reader(threads=threads) if reader is None else reader
        except BaseException:
            self._release()
            raise
        self._ahead = ReadAhead(self.reader)

    def __enter__(self) -> "ExpertCache":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    @property
    def watcher(self) -> Watcher | None:
        """Told what lies where, from now on and, first, as it is now."""
        return self._watcher

    @watcher.setter
    def watcher(self, watcher: Watcher | None) -> None:
        self._watcher = watcher
        begun = set() if self._on_its_way is None else set(self._on_its_way.late)
        self._tell_came({key: row for key, row in self._row_of.items() if key not in self._ahead and key not in begun})

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
        keys = self._keys(layer, experts)
        if self._streaming:
            raise StoreError("a lookup while a prompt batch is in use could evict it; finish the stream first")
        self._give_up()
        if len(keys) > self.slots and len(set(keys)) > self.slots:
            raise StoreError(f"a batch of {len(set(keys))} experts does not fit a cache of {self.slots} blocks")
        row_of = self._row_of
        try:
            if self._granted < self.slots:
                distinct = set(keys)
                self._grow(len(row_of) + len(distinct - row_of.keys()), len(distinct))
            done = self._decisions.batch(keys)
            late = self._ahead.find_late(done.useful) if done.useful else []
            self._vacate(done.victims, phase)
            rows = {key: self._free_rows.pop() for key in done.misses}
            pending = Pending(self.reader, [(key, self._views[row]) for key, row in rows.items()])
            on_its_way = _OnItsWay(self, phase, len(done.hits), rows, late, pending)
            self._on_its_way = on_its_way
            self._take([key for key in done.useful if key not in late], phase)
            pending.begin(len(rows) - own_hands)
            self.missed = len(rows)
            if not rows and not late:
                on_its_way.wait()
                return Fetched([row_of[key] for key in keys], [], _nothing_to_wait_for)
        except BaseException:
            self._forget()
            raise
        missing = rows.keys() | set(late)
        return Fetched(
            [rows[key] if key in rows else row_of[key] for key in keys],
            [rank for rank, key in enumerate(keys) if key in missing],
            on_its_way.wait,
        )

    def _arrive(self, batch: "_OnItsWay") -> None:
        """All of a fetch is there on return."""
        if batch is not self._on_its_way:
            if batch.arrived:
                return
            raise StoreError("this fetch was given up: something else was asked of the cache before it was waited for")
        try:
            if batch.rows:
                batch.pending.wait()
                self._tell_came(batch.rows)
                self._row_of.update(batch.rows)
            self._take(batch.late, batch.phase, late=True)
            batch.arrived = True
            self._on_its_way = None
        except BaseException:
            self._forget()
            raise
        self._count(batch.phase, batch.hits, len(batch.rows))

    def _take(self, keys: list[int], phase: str, late: bool = False) -> None:
        """Blocks read ahead are asked for: they are there on return. late: they are waited for."""
        if keys:
            self._ahead.land(keys)
            self._tell_came({key: self._row_of[key] for key in keys})
            self._ahead.hand_over(keys)
            counts = self._counts_of(phase)
            counts.useful += len(keys)
            counts.late += len(keys) if late else 0

    def _pass_by(self, asked: list[int], late: list[int], phase: str) -> None:
        """A prompt asks for blocks read ahead."""
        try:
            self._take([key for key in asked if key not in late], phase)
            self._take(late, phase, late=True)
            self._decisions.pass_by(asked)
        except BaseException:
            self._forget()
            raise

    def _give_up(self) -> None:
        """A fetch that nobody waited for is over."""
        if self._on_its_way is not None:
            self._forget()

    def _tell_came(self, rows: dict[int, int]) -> None:
        if self._watcher is not None:
            self._watcher.came(list(rows), list(rows.values()))

    def _tell_left(self, keys: list[int]) -> None:
        if self._watcher is not None and keys:
            self._watcher.left(keys)

    def prefetch(self, layer: int, guesses: Sequence[int], phase: str = "decode") -> int:
        """Begin to read what the next layer may ask for, as far as the batch in use leaves room; returns at once.

        layer    MoE ordinal of the next layer; guesses  its ids, by rank: the absent ones are read
        Call it after a layer's lookup and before its blocks are used: those stay where they are. What is read counts as
        cached from here on; a lookup waits for a block still under way, and reads one anew whose read failed.
        Returns how many are read.
        """
        keys = self._keys(layer, guesses)
        if self._streaming:
            raise StoreError("a prefetch while a prompt batch is in use could evict it; finish the stream first")
        if self._on_its_way is not None:
            raise StoreError("a prefetch while a fetch is under way would compete with it; call the fetch's wait first")
        row_of = self._row_of
        absent = [key for key in keys if key not in row_of]
        if not absent:
            return 0
        try:
            if self._granted < self.slots:
                self._grow(len(row_of) + len(absent), 0)
            done = self._decisions.prefetch(keys)
            self._vacate(done.victims, phase)
            counts = self._counts_of(phase)
            counts.issued += len(done.reads)
            rows = [self._free_rows.pop() for _ in done.reads]
            self._ahead.start([(key, self._views[row]) for key, row in zip(done.reads, rows, strict=True)], counts)
            row_of.update(zip(done.reads, rows, strict=True))
        except BaseException:
            self._forget()
            raise
        return len(done.reads)

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
        self._give_up()
        keys = list(dict.fromkeys(self._keys(layer, experts)))
        batches = [keys[start : start + self.ring] for start in range(0, len(keys), self.ring)]
        here = coming = None
        self.missed = 0
        try:
            self._streaming = True
            for number, batch in enumerate([*batches, None]):
                here = coming
                # Read ahead into the bank that the batch before last has left.
                coming = self._start_ring(batch, number % 2) if batch is not None else None
                if here is not None:
                    asked = [key for key in here.keys if key in self._ahead] if self._ahead else []
                    late = self._ahead.find_late(asked)
                    here.pending.wait()
                    if asked:
                        self._pass_by(asked, late, phase)
                    self.missed += here.misses
                    self._count(phase, len(here.keys) - here.misses, here.misses)
                    yield [key - layer * self._n_experts for key in here.keys], here.rows
        finally:
            for unfinished in (here, coming):
                if unfinished is not None:
                    unfinished.pending.cancel()
            self._streaming = False

    def stats(self) -> dict[str, dict[str, int]]:
        """By phase: lookups, hits, misses, reads and bytes_read (whole blocks that arrived, asked for or ahead), and
        prefetch_issued, _useful (asked for while cached), _wasted (left before) and _late (waited for when asked for).

        Waits for reads under way, so that no count depends on the moment.
        """
        lost = self._ahead.settle()
        return {
            phase: counts.to_dict(self.block_bytes, sum(owner is counts for owner in lost))
            for phase, counts in self._counts.items()
        }

    def clear(self) -> None:
        """Forget everything cached: what comes next begins cold. Blocks read ahead and not used count as wasted."""
        self._give_up()
        try:
            self._ahead.settle()  # their bytes were read, so they count
            self._start_over(self._row_of)
        except BaseException:  # an interrupt: what is left half-way is left whole
            self._start_over(self._row_of)
            raise

    def close(self) -> None:
        """Free memory, file and threads. Closing twice is fine."""
        if self.reader is not None:
            if self._on_its_way is not None:
                self._on_its_way.pending.cancel()
                self._on_its_way = None
            self._ahead.call_off()
            if self._own_reader:
                self.reader.close()
        self.reader = None
        self._release()

    def _start_decisions(self) -> Cache:
        return Cache(self._n_layers * self._n_experts, self.slots, 1, policy=self.policy)  # in blocks

    def _keys(self, layer: int, experts: Sequence[int]) -> list[int]:
        """Block indices. An id out of range would silently be another layer's expert, so it is refused."""
        if self.arena is None:
            raise StoreError("the expert cache is closed")
        ids = experts.tolist() if hasattr(experts, "tolist") else experts
        if ids and not (0 <= min(ids) and max(ids) < self._n_experts and 0 <= layer < self._n_layers):
            raise StoreError(
                f"layer {layer}, experts {min(ids)} to {max(ids)}: "
                f"the store holds {self._n_layers} MoE layers of {self._n_experts} experts"
            )
        base = layer * self._n_experts
        return [base + expert for expert in ids]

    def _grow(self, wanted: int, batch: int) -> None:
        """Before blocks come into rows that were never filled: is the memory still there? Else stay at what is filled.

        wanted  blocks held if nothing left; batch  those of this lookup, which need rows whatever memory says
        """
        while self._granted < min(wanted, self.slots):
            step = min(max(1, STEP_BYTES // self.block_bytes), self.slots - self._granted)
            memory = read_memory()
            if memory.room_bytes >= step * self.block_bytes:
                self._granted += step
                continue
            stay = min(max(self._granted, batch, self.store.config.top_k), self.slots)
            say(
                f"cache: stays at {stay:,} of {self.slots:,} blocks: {show_bytes(memory.available_bytes)} are left "
                f"(limit: {memory.tightest.name}), {show_bytes(memory.reserve_bytes)} must stay free"
            )
            self._granted = self.slots = stay
            if self.policy.divides:  # its shares are of the old budget: it must begin anew with what is cached
                self._start_over()
            else:
                self._decisions.resize(stay)
                self._free_rows = [row for row in self._free_rows if row < stay]

    def _vacate(self, victims: list[int], phase: str) -> None:
        """The rows of the victims are free: those still being read once their read has ended."""
        self._tell_left(victims)
        if self._ahead:
            self._waste(self._ahead.drop(victims), self._counts_of(phase))
        self._free_rows.extend([self._row_of.pop(victim) for victim in victims])

    def _waste(self, dropped: list[tuple[Counts, bool]], counts: Counts | None = None) -> None:
        """Count what was read ahead for nothing: where it was lost, or (None) where it was issued."""
        for issuer, arrived in dropped:
            (counts or issuer).wasted += 1
            issuer.lost += not arrived

    def _forget(self) -> None:
        """After a failed read, or an interrupt between any two steps: only what is whole counts as cached."""
        self.restarts += 1
        try:
            self._start_over()
        except BaseException:  # an interrupt, a second one or here only
            self._start_over()
            raise

    def _start_over(self, without: Iterable[int] = ()) -> None:
        """New decisions over what is cached and was asked for, but `without` these. Interrupted, it may begin again."""
        without = {*without, *self._ahead}
        begun = self._on_its_way
        if begun is not None:
            begun.pending.cancel()
            without.update(begun.late)
        kept = [key for key in self._decisions if key in self._row_of and key not in without]
        gone = self._row_of.keys() - kept
        if begun is not None:  # some may have been said to come already
            gone |= begun.rows.keys() - kept
        self._tell_left(list(gone))
        for key in gone:
            self._row_of.pop(key, None)
        self._waste(self._ahead.call_off())
        decisions = self._start_decisions()
        decisions.batch(kept)
        self._decisions = decisions
        self._free_rows = sorted(set(range(self.slots)) - set(self._row_of.values()), reverse=True)
        self._on_its_way = None

    def _start_ring(self, keys: list[int], bank: int) -> "_RingBatch":
        """Begin to read what the cache lacks into one of the two banks."""
        first = self.slots + bank * self.ring
        rows, jobs = [], []
        for place, key in enumerate(keys):
            row = self._row_of.get(key)
            if row is None:
                row = first + place
                jobs.append((key, self._views[row]))
            rows.append(row)
        return _RingBatch(keys, rows, len(jobs), self.reader.start(jobs))

    def _count(self, phase: str, hits: int, misses: int) -> None:
        counts = self._counts_of(phase)
        counts.hits += hits
        counts.misses += misses

    def _counts_of(self, phase: str) -> Counts:
        counts = self._counts.get(phase)
        if counts is None:
            counts = self._counts[phase] = Counts()
        return counts

    def _release(self) -> None:
        self.arena = None
        self._views = []
        self._row_of = {}
        self._arena.close()


@dataclass(slots=True, eq=False)
class _OnItsWay:
    """A fetch until it was waited for: how many hit, the rows of its misses, and what was not there in time."""

    cache: ExpertCache
    phase: str
    hits: int
    rows: dict[int, int]
    late: list[int]
    pending: Pending
    arrived: bool = False

    def wait(self) -> None:
        self.cache._arrive(self)


def _nothing_to_wait_for() -> None: ...


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
