"""Which blocks lie in which rows of the cache's memory: whole, on their way, or just gone.

Every change here is sound at any moment: a failed read, or an interrupt between any two steps, is followed by
`forget`, after which only what is whole counts as cached. What the order of the steps owes to that is said where it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from nemolab.policy import Policy
from nemolab.policy.rows import RowCache
from nemolab.store.counts import Counts
from nemolab.store.fetch import OnItsWay, Watcher
from nemolab.store.growth import Growth
from nemolab.store.read_ahead import ReadAhead
from nemolab.store.reader import BlockReader


class Residents:
    """The blocks that an ExpertCache holds in its first `slots` rows.

    shape      (layers, experts in each)
    growth     asked before rows that were never filled are
    .book      who stays, who leaves, in which row
    .ahead     blocks read ahead and not asked for yet
    .begun     the fetch that nobody has waited for yet, or None
    .watcher   told what lies where, or None
    .restarts  how often `forget` was called
    Keys are block numbers: layer * experts + expert.
    """

    def __init__(self, shape: tuple[int, int], slots: int, policy: Policy, growth: Growth, reader: BlockReader):
        self.slots = slots
        self._shape, self._policy, self._growth = shape, policy, growth
        self.book = self._start_book()
        self.ahead = ReadAhead(reader)
        self.begun: OnItsWay | None = None
        self.watcher: Watcher | None = None
        self.restarts = 0

    @property
    def growing(self) -> bool:
        """Whether memory must be found (`grow`) before anything more comes in."""
        return self._growth.open

    def grow(self, layer: int, experts: Sequence[int], needed: bool) -> None:
        """Before a batch or a round comes in: find memory for it, or stay at the rows there are.

        needed  whether there must be rows for all of them, whatever memory says
        """
        least = len(set(experts)) if needed else 0
        slots = self._growth.admit(self.book.rows_used + self.book.count_absent(layer, experts), least)
        if slots < self.slots:
            self.slots = slots
            if self._policy.divides:  # its shares are of the old budget: it must begin anew with what is cached
                self.start_over()
            else:
                self.book.resize(slots)

    def vacate(self, victims: list[int], wasted: int, counts: Counts) -> None:
        """What has left in the book leaves: its rows may be written to on return, those still being read included.

        wasted  how many of the victims had been read ahead in vain
        """
        self._tell_left(victims)
        if wasted:
            self._waste(self.ahead.drop(victims), counts)

    def take(self, keys: Sequence[int], late: int, counts: Counts, tell: bool = True) -> None:
        """Blocks read ahead are asked for: they are there on return.

        late  how many of them were under way when they were asked for
        tell  False: they have no place in the cache any more
        """
        if keys:
            self.ahead.land(keys)
            if tell:
                self.tell_came(keys)
            self.ahead.hand_over(keys)
            counts.useful += len(keys)
            counts.late += late

    def tell_came(self, keys: Sequence[int]) -> None:
        """Said of blocks before they count as whole: if an interrupt comes in between they are said to have left."""
        if self.watcher is not None and keys:
            self.watcher.came(keys, [self.book.row_of.item(key) for key in keys])

    def _tell_left(self, keys: list[int]) -> None:
        if self.watcher is not None and keys:
            self.watcher.left(keys)

    def watch(self, watcher: Watcher | None) -> None:
        """Tell it what lies where: first as it is now, then whatever changes."""
        self.watcher = watcher
        self.tell_came(self.book.find_whole())

    def forget(self) -> None:
        """After a failed read, or an interrupt between any two steps: only what is whole counts as cached."""
        self.restarts += 1
        try:
            self.start_over()
        except BaseException:  # an interrupt, a second one or here only
            self.start_over()
            raise

    def start_over(self, without: Iterable[int] = ()) -> None:
        """New decisions over what is whole and was asked for, but `without` these. Interrupted, it may begin again."""
        if self.begun is not None:
            self.begun.pending.cancel()
        book, without = self.book, set(without)
        kept = [key for key in book.find_whole() if key not in without]
        # Victims too: the book knows of them before the watcher does.
        self._tell_left(sorted({*book.find_seated(), *book.victims} - set(kept)))
        self._waste(self.ahead.call_off())
        fresh = self._start_book()
        fresh.refill(kept, book.row_of[np.array(kept, np.int64)])
        self.book, self.begun = fresh, None

    def clear(self) -> None:
        """Nothing is cached any more."""
        everything = range(self._shape[0] * self._shape[1])
        try:
            self.ahead.settle()  # their bytes were read, so they count
            self.start_over(everything)
        except BaseException:  # an interrupt: what is left half-way is left whole
            self.start_over(everything)
            raise

    def close(self) -> None:
        """Nothing is read into the memory any more."""
        if self.begun is not None:
            self.begun.pending.cancel()
            self.begun = None
        self.ahead.call_off()

    def _start_book(self) -> RowCache:
        return RowCache(*self._shape, self.slots, policy=self._policy)

    def _waste(self, dropped: list[tuple[Counts, bool]], counts: Counts | None = None) -> None:
        """Count what was read ahead for nothing: where it was lost, or (None) where it was issued."""
        for issuer, arrived in dropped:
            (counts or issuer).wasted += 1
            issuer.lost += not arrived
