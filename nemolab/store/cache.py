"""Experts in RAM: a byte-budgeted LRU cache for decode and a ring for prompts, filled by direct reads.

What stays is decided by `nemolab.policy`, in the same compiled code that replays traces.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from nemolab.errors import StoreError
from nemolab.policy import Cache
from nemolab.progress import say
from nemolab.store.arena import Arena
from nemolab.store.reader import DEFAULT_THREADS, BlockReader, Pending
from nemolab.system.memory import read_memory
from nemolab.units import show_bytes

RING = 32  # experts of a prompt batch
STEP_BYTES = 64 * 2**20  # memory is asked after again each time the cache has grown by so much


class ExpertCache:
    """The experts of a store, resident as far as the budget goes.

    budget_bytes | slots  how much stays (one of the two); capped at what the store holds, refused below top_k blocks
    reader                a BlockReader to use and leave open; by default one of its own with `threads` threads
    ring                  experts in a prompt batch; two such banks are kept beside the budget, once a prompt is seen
    .slots                blocks it may hold. Memory is taken as blocks come in, and looked after again on the way: when
                          others have taken it meanwhile, the cache stays at what it has, says so, and .slots is less
    .arena                uint8 [rows, block_bytes]; `lookup_rows` and `stream_rows` answer with its row numbers
    For one thread at a time. Close it, or use it in a `with` block.
    Raises StoreError for sizes that cannot work, ids out of range, a batch larger than the cache, a failed read.
    """

    def __init__(
        self,
        store,
        *,
        budget_bytes: int | None = None,
        slots: int | None = None,
        reader: BlockReader | None = None,
        threads: int = DEFAULT_THREADS,
        ring: int = RING,
    ):
        if (budget_bytes is None) == (slots is None):
            raise StoreError("give the cache either budget_bytes or slots")
        if ring < 1:
            raise StoreError(f"prompt batches of {ring} experts; 1 or more are needed")
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
        self._row_of: dict[int, int] = {}  # block index -> row
        self._free_rows = list(range(self.slots - 1, -1, -1))  # low rows first: untouched memory is not taken
        self._granted = 0  # rows that memory was found for
        self._counts: dict[str, list[int]] = {}
        self._streaming = False
        self._own_reader = reader is None
        try:
            self.reader = store.open_reader(threads=threads) if reader is None else reader
        except BaseException:
            self._release()
            raise

    def __enter__(self) -> "ExpertCache":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def lookup(self, layer: int, experts: Sequence[int], phase: str = "decode") -> list[np.ndarray]:
        """The blocks of a decode batch, in the order asked for, all resident on return.

        layer    MoE ordinal; experts  ids in rank order
        Returns uint8 [block_bytes] views, valid until the next lookup.
        """
        views = self._views
        return [views[row] for row in self.lookup_rows(layer, experts, phase)]

    def lookup_rows(self, layer: int, experts: Sequence[int], phase: str = "decode") -> list[int]:
        """As `lookup`, but the rows of `.arena` that hold the blocks."""
        keys = self._keys(layer, experts)
        if self._streaming:
            raise StoreError("a lookup while a prompt batch is in use could evict it; finish the stream first")
        if len(keys) > self.slots and len(set(keys)) > self.slots:
            raise StoreError(f"a batch of {len(set(keys))} experts does not fit a cache of {self.slots} blocks")
        row_of = self._row_of
        absent = [key for key in keys if key not in row_of]
        if absent and self._granted < self.slots:
            self._grow(len(row_of) + len(set(absent)), len(set(keys)))
        try:
            done = self._decisions.batch(keys)
            if done.misses:
                self._fill(done.misses, done.victims)
        except BaseException:
            self._forget(absent)
            raise
        self._count(phase, len(done.hits), len(done.misses))
        return [row_of[key] for key in keys]

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
        keys = list(dict.fromkeys(self._keys(layer, experts)))
        batches = [keys[start : start + self.ring] for start in range(0, len(keys), self.ring)]
        here = coming = None
        try:
            self._streaming = True
            for number, batch in enumerate([*batches, None]):
                here = coming
                # Read ahead into the bank that the batch before last has left.
                coming = self._start_ring(batch, number % 2) if batch is not None else None
                if here is not None:
                    here.pending.wait()
                    self._count(phase, len(here.keys) - here.misses, here.misses)
                    yield [key - layer * self._n_experts for key in here.keys], here.rows
        finally:
            for unfinished in (here, coming):
                if unfinished is not None:
                    unfinished.pending.cancel()
            self._streaming = False

    def stats(self) -> dict[str, dict[str, int]]:
        """By phase: lookups, hits, misses and bytes_read (completed reads of whole blocks)."""
        return {
            phase: {
                "lookups": hits + misses,
                "hits": hits,
                "misses": misses,
                "bytes_read": misses * self.block_bytes,
            }
            for phase, (hits, misses) in self._counts.items()
        }

    def close(self) -> None:
        """Free memory, file and threads. Closing twice is fine."""
        if self._own_reader and self.reader is not None:
            self.reader.close()
        self.reader = None
        self._release()

    def _start_decisions(self) -> Cache:
        return Cache(self._n_layers * self._n_experts, self.slots * self.block_bytes, self.block_bytes)

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
            # In this order: interrupted between two of them, the cache asks again and is sound.
            self._decisions.resize(stay * self.block_bytes)
            self._free_rows = [row for row in self._free_rows if row < stay]
            self._granted = self.slots = stay

    def _fill(self, misses: list[int], victims: list[int]) -> None:
        """Read the misses into rows of their own, those of the victims first of all."""
        self._free_rows.extend(self._row_of.pop(victim) for victim in victims)
        for key in misses:
            self._row_of[key] = self._free_rows.pop()
        self.reader.read_many([(key, self._views[self._row_of[key]]) for key in misses])

    def _forget(self, unread: list[int]) -> None:
        """After a failed read, or an interrupt between any two steps: only what was whole before counts as cached."""
        for key in unread:
            self._row_of.pop(key, None)
        kept = [key for key in self._decisions if key in self._row_of]
        for key in self._row_of.keys() - set(kept):
            del self._row_of[key]
        self._decisions = self._start_decisions()
        self._decisions.batch(kept)
        self._free_rows = sorted(set(range(self.slots)) - set(self._row_of.values()), reverse=True)

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
        counts = self._counts.setdefault(phase, [0, 0])
        counts[0] += hits
        counts[1] += misses

    def _release(self) -> None:
        self.arena = None
        self._views = []
        self._row_of = {}
        self._arena.close()


class _RingBatch(NamedTuple):
    """One batch of a prompt pass: its block indices, their rows, how many are read, and the reads."""

    keys: list[int]
    rows: list[int]
    misses: int
    pending: Pending
