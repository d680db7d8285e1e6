"""A prompt pass: experts by the batch, through two banks of rows beside the cache or into it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from nemolab.policy.rows import NO_ROW
from nemolab.store.counts import Counts
from nemolab.store.reader import BlockReader, Pending
from nemolab.store.residents import Residents


@dataclass(slots=True, eq=False)
class RingBatch:
    """Experts that a prompt uses at once.

    keys, rows       block numbers and where they lie
    misses           how many of them the cache lacked; reread  how many more are read, since it could not keep them
    entered          those that are read to stay
    pending, helpers the reads, and how many threads they are worth
    """

    keys: list[int]
    rows: list[int]
    misses: int
    reread: int
    entered: list[int]
    pending: Pending
    helpers: int


class PromptRing:
    """Streams blocks through `rows`, two banks of `size`; `views` of all rows of the cache's memory."""

    def __init__(self, residents: Residents, reader: BlockReader, views: list[np.ndarray], rows: range, size: int):
        self._residents, self._reader, self._views = residents, reader, views
        self._rows, self._size = rows, size

    def stream(self, keys: Sequence[int], counts: Counts) -> Iterator[RingBatch]:
        """The blocks in batches, in the order given: hits lie in the cache and are not refreshed, nothing enters."""
        return self._stream(keys, counts, None)

    def stream_entering(
        self, keys: Sequence[int], counts: Counts, layer: int, ids: Sequence[int]
    ) -> Iterator[RingBatch]:
        """As `stream`, of one layer, but as one batch of decode: `ids`, each once, by last use. What misses is read
        where it stays. Nothing of it counts as cached where the stream is not used to its end.

        Of a batch larger than the cache some leave at once, hits too: they go through the ring.
        """
        residents, done = self._residents, False
        try:
            if residents.growing:
                residents.grow(layer, ids, needed=False)
            seats = residents.book.look_up(layer, ids)
            leaving = [key for key in seats.useful if residents.book.row_of[key] == NO_ROW]
            residents.take(leaving, len(residents.ahead.find_late(leaving)), counts, tell=False)
            residents.vacate(list(seats.victims), seats.wasted, counts)
            # Closed by name: Python 3.12.3 would keep it open until this generator is forgotten.
            with contextlib.closing(self._stream(keys, counts, set(seats.misses))) as batches:
                for batch in batches:
                    if batch.keys[-1] == keys[-1]:  # all are there
                        residents.book.note_whole()
                        done = True
                    yield batch
        finally:
            if not done:
                residents.forget()

    def _stream(self, keys: Sequence[int], counts: Counts, missed: set[int] | None) -> Iterator[RingBatch]:
        batches = [keys[start : start + self._size] for start in range(0, len(keys), self._size)]
        here = coming = None
        try:
            for number, batch in enumerate([*batches, None]):
                here, coming = coming, None
                if batch is not None:  # read ahead into the bank that the batch before last has left
                    coming = self._plan(batch, number % 2, missed)
                    coming.pending.begin(coming.helpers)
                if here is not None:
                    self._arrive(here, counts, passing=missed is None)
                    yield here
        finally:
            for unfinished in (here, coming):
                if unfinished is not None:
                    unfinished.pending.cancel()

    def _plan(self, keys: Sequence[int], bank: int, missed: set[int] | None) -> RingBatch:
        """Where each lies or is to be read to: what has no row in the cache, into one of the two banks."""
        free = iter(self._rows[bank * self._size :])
        rows, jobs, entered = self._residents.book.row_of[np.array(keys)].tolist(), [], []
        for place, key in enumerate(keys):
            if rows[place] == NO_ROW:
                rows[place] = next(free)
            elif missed and key in missed:
                entered.append(key)
            else:
                continue
            jobs.append((key, self._views[rows[place]]))
        misses = len(jobs) if missed is None else len(missed.intersection(keys))
        pending = Pending(self._reader, jobs)
        return RingBatch(list(keys), rows, misses, len(jobs) - misses, entered, pending, len(jobs))

    def _arrive(self, batch: RingBatch, counts: Counts, passing: bool) -> None:
        residents = self._residents
        asked = [key for key in batch.keys if key in residents.ahead] if residents.ahead else []
        late = len(residents.ahead.find_late(asked))
        batch.pending.wait()
        residents.tell_came(batch.entered)
        try:
            residents.take(asked, late, counts)
            if passing and asked:
                residents.book.pass_by(asked)
        except BaseException:
            if passing:  # else all of the pass is forgotten anyway
                residents.forget()
            raise
        counts.hits += len(batch.keys) - batch.misses
        counts.misses += batch.misses
        counts.reread += batch.reread
