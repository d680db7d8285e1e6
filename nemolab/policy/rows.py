"""A cache in a running engine whose entries lie in rows of memory: who stays, who leaves, and whose row is which.

One compiled call a batch, from ids to rows: what Python would do for each lookup costs more than the decision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from nemolab.jit import jit, jit_inner, unowned
from nemolab.policy.cache import Cache, open_door
from nemolab.policy.core import (
    ABSENT,
    CACHED,
    ISSUED,
    MISSED,
    N_VICTIMS,
    STAMP,
    USEFUL,
    WASTED,
    issue,
    look_up,
)
from nemolab.policy.interface import Policy
from nemolab.policy.lru import LRU

NO_ROW = -1
N_FREE, N_UNREAD = range(2)  # places in Book.numbers


class Book(NamedTuple):
    """Whose row is which.

    row_of   int32 [n_keys]: NO_ROW for what is not cached
    free     int32 [rows]: a stack, the first numbers[N_FREE]
    unread   int32 [n_keys]: keys of the running batch that were not there to be used, the first numbers[N_UNREAD]
    numbers  int64 [2]
    """

    row_of: np.ndarray
    free: np.ndarray
    unread: np.ndarray
    numbers: np.ndarray


class Seats(NamedTuple):
    """What a batch did.

    distinct  keys looked up, each once
    rows      of the entries asked for, in that order; NO_ROW for one that did not stay
    missing   places in that order that missed
    misses    keys, in order of last occurrence, and miss_rows: where each is to be read to; NO_ROW if it did not stay
    useful    hits that were prefetched and not asked for before
    victims   keys that left, wasted: how many of them were prefetched and never asked for
    """

    distinct: int
    rows: list[int]
    missing: Sequence[int] = ()
    misses: Sequence[int] = ()
    miss_rows: Sequence[int] = ()
    useful: Sequence[int] = ()
    victims: Sequence[int] = ()
    wasted: int = 0


class Issue(NamedTuple):
    """What a round of prefetch did: keys to be read, and where to; keys that left, and how many of them unused."""

    reads: list[int]
    rows: list[int]
    victims: list[int]
    wasted: int


class RowCache(Cache):
    """A Cache of entries of one size, in layers of `width`, of which `rows` stay at a time, each in a row of its own.

    Entries are named by a layer and ids 0 to width - 1 within it; keys are layer * width + id. Where one is out of
    range nothing is done and the answer is None.
    """

    def __init__(self, n_layers: int, width: int, rows: int, *, policy: Policy = LRU):
        n_keys = n_layers * width
        super().__init__(n_keys, rows, 1, policy=policy)
        self._width = width
        self._book = Book(
            row_of=np.full(n_keys, NO_ROW, np.int32),
            free=np.arange(rows, dtype=np.int32)[::-1].copy(),  # low rows first: untouched memory is not taken
            unread=np.zeros(n_keys, np.int32),
            numbers=np.array([rows, 0], np.int64),
        )
        self._make_buffers(width)

    def _make_buffers(self, ids: int) -> None:
        """For batches of so many ids."""
        n_keys = len(self.row_of)
        self._ids = np.zeros(ids, np.int64)
        self._keys = np.zeros(max(ids, n_keys), np.int32)
        self._outcomes = np.zeros(len(self._keys), np.uint8)
        self._out = np.zeros(2 * ids + 4 * n_keys, np.int32)

    @property
    def row_of(self) -> np.ndarray:
        """int32 [n_keys]: the row of each entry that is cached, else NO_ROW. To be looked at only."""
        return self._book.row_of

    @property
    def rows_used(self) -> int:
        return self.capacity_bytes - int(self._book.numbers[N_FREE])

    @property
    def victims(self) -> list[int]:
        """Keys that left in the last batch or round."""
        return self._core.victims[: self._core.numbers[N_VICTIMS]].tolist()

    def look_up(self, layer: int, ids: Sequence[int]) -> Seats | None:
        """Look up one batch. What leaves frees its row, what enters has one on return.

        Misses and useful hits are not there yet for the caller: `find_whole` leaves them out until `note_whole`.
        """
        count = self._write_down(ids)
        distinct, missing, misses, places, useful, end, wasted = self._look_up_rows(
            self._core, self._state, self._book, self._ids, count, layer * self._width, self._width, self._keys,
            self._outcomes, self._out,
        )  # fmt: skip
        if distinct < 0:
            return None
        out = self._out[:end].tolist()  # one way from compiled code into lists: six would take longer
        if end == count:  # all are there
            return Seats(distinct, out)
        return Seats(
            distinct, out[:count], out[count:missing], out[missing:misses], out[misses:places], out[places:useful],
            out[useful:], wasted,
        )  # fmt: skip

    def issue(self, layer: int, ids: Sequence[int]) -> Issue | None:
        """As `prefetch`; what is to be read has a row on return."""
        count = self._write_down(ids)
        reads, victims, wasted = self._issue_rows(
            self._core, self._state, self._book, self._ids, count, layer * self._width, self._width, self._keys,
            self._out,
        )  # fmt: skip
        if reads < 0:
            return None
        out = self._out[: 2 * reads + victims].tolist()
        return Issue(out[:reads], out[reads : 2 * reads], out[2 * reads :], wasted)

    def count_absent(self, layer: int, ids: Sequence[int]) -> int:
        """How many distinct ones of these are not cached."""
        keys = layer * self._width + np.unique(np.array(ids, np.int64))
        keys = keys[(keys >= 0) & (keys < len(self.row_of))]
        return int(np.count_nonzero(self.row_of[keys] == NO_ROW))

    def _write_down(self, ids: Sequence[int]) -> int:
        count = len(ids)
        if count > len(self._ids):
            self._make_buffers(count)
        self._ids[:count] = ids
        return count

    def note_whole(self) -> None:
        """All of the last batch is there."""
        self._book.numbers[N_UNREAD] = 0

    def find_whole(self) -> list[int]:
        """The cached keys, as by iteration, but for those not there yet and those prefetched and not asked for."""
        whole = self._core.entries["held"] == CACHED
        whole[self._book.unread[: self._book.numbers[N_UNREAD]]] = False
        return [key for key in self if whole[key]]

    def find_seated(self) -> list[int]:
        """The keys that have a row, whole or not."""
        return np.flatnonzero(self.row_of != NO_ROW).tolist()

    def resize(self, capacity_bytes: int) -> None:
        """As of any Cache; it must not be above what it was, nor below any row that is used."""
        super().resize(capacity_bytes)
        free = self._book.free[: self._book.numbers[N_FREE]]
        free = free[free < capacity_bytes]
        self._book.free[: len(free)] = free
        self._book.numbers[N_FREE] = len(free)

    def refill(self, keys: Sequence[int], rows: Sequence[int]) -> None:
        """An empty cache takes these up, the oldest first, as they lie. No more of them than it has rows."""
        count = self._write_down(keys)
        if count:  # as one batch, as if all were of one layer
            self._look_up_rows(
                self._core, self._state, self._book, self._ids, count, 0, len(self.row_of), self._keys, self._outcomes,
                self._out,
            )  # fmt: skip
            self.note_whole()
        rows = np.array(rows, np.int32)
        self._book.row_of[np.array(keys, np.int64)] = rows
        free = np.setdiff1d(np.arange(self.capacity_bytes), rows)[::-1]
        self._book.free[: len(free)] = free
        self._book.numbers[N_FREE] = len(free)

    @cached_property
    def _look_up_rows(self) -> Callable:
        number = np.int64(0)
        return open_door(
            _look_up_rows_once,
            (self._core, self._state, self._book, self._ids, number, number, number, self._keys, self._outcomes,
             self._out),
        )  # fmt: skip

    @cached_property
    def _issue_rows(self) -> Callable:
        number = np.int64(0)
        return open_door(
            _issue_rows_once,
            (self._core, self._state, self._book, self._ids, number, number, number, self._keys, self._out),
        )


@jit_inner
def _free_rows(core, book):
    """The rows of those that left are free."""
    for place in range(core.numbers[N_VICTIMS]):
        key = np.int64(core.victims[place])
        row = book.row_of[key]
        if row != NO_ROW:  # a batch larger than the cache loses some of its own misses
            book.free[book.numbers[N_FREE]] = row
            book.numbers[N_FREE] += 1
            book.row_of[key] = NO_ROW


@jit_inner
def _list_victims(core, out, at):
    """Returns where they end."""
    for place in range(core.numbers[N_VICTIMS]):
        out[at + place] = core.victims[place]
    return at + core.numbers[N_VICTIMS]


@jit_inner
def _take_row(book, key):
    book.numbers[N_FREE] -= 1
    row = book.free[book.numbers[N_FREE]]
    book.row_of[key] = row
    return row


@jit
def _look_up_rows_once(core, state, book, ids, count, base, width, keys, outcome, out):
    """ids[:count] as one batch. Written to `out`, one behind the other: rows, places that missed, keys that missed,
    their rows, useful keys, victims.

    Returns the number of distinct keys (-1: an id is out of range), where each part but the first ends, and how many
    victims had been prefetched in vain.
    """
    core, state, book, ids, keys, outcome, out = unowned((core, state, book, ids, keys, outcome, out))
    stamp = core.numbers[STAMP] + 1  # which the look-up is about to give to what it sees
    first = len(keys)  # from the end, so that each stands at its last occurrence
    for place in range(count):
        if ids[place] < 0 or ids[place] >= width or base < 0 or base >= len(book.row_of):
            return np.int64(-1), count, count, count, count, count, np.int64(0)
    for place in range(count - 1, -1, -1):
        key = base + ids[place]
        if core.entries[key].mark != stamp:
            core.entries[key].mark = stamp
            first -= 1
            keys[first] = key
    wasted = core.numbers[WASTED]
    look_up(core, state, keys, first, len(keys), outcome)
    _free_rows(core, book)
    misses = unread = np.int64(0)
    for at in range(first, len(keys)):
        key = np.int64(keys[at])
        if outcome[at] & (MISSED | USEFUL):
            book.unread[unread] = key
            unread += 1
        if outcome[at] & MISSED:
            misses += 1
            if core.entries[key].held != ABSENT:
                _take_row(book, key)
    book.numbers[N_UNREAD] = unread
    missing = np.int64(count)
    for place in range(count):
        key = base + ids[place]
        out[place] = book.row_of[key]
        if misses:
            at = first + place
            if len(keys) - first != count:  # some are named twice
                at = first
                while keys[at] != key:
                    at += 1
            if outcome[at] & MISSED:
                out[missing] = place
                missing += 1
    miss, place, useful = missing, missing + misses, missing + 2 * misses
    for at in range(first, len(keys)):
        key = np.int64(keys[at])
        if outcome[at] & MISSED:
            out[miss], out[place] = key, book.row_of[key]
            miss += 1
            place += 1
        elif outcome[at] & USEFUL:
            out[useful] = key
            useful += 1
    end = _list_victims(core, out, useful)
    return np.int64(len(keys) - first), missing, miss, place, useful, end, core.numbers[WASTED] - wasted


@jit
def _issue_rows_once(core, state, book, ids, count, base, width, keys, out):
    """A round of prefetch of ids[:count]. Written to `out`: keys to be read, their rows, victims. Returns how many are
    read (-1: an id is out of range), how many left, and how many of those had been prefetched in vain."""
    core, state, book, ids, keys, out = unowned((core, state, book, ids, keys, out))
    for place in range(count):
        if ids[place] < 0 or ids[place] >= width or base < 0 or base >= len(book.row_of):
            return np.int64(-1), np.int64(0), np.int64(0)
        keys[place] = base + ids[place]
    wasted = core.numbers[WASTED]
    issue(core, state, keys, count, np.int64(0))
    reads = core.numbers[ISSUED]
    _free_rows(core, book)
    _list_victims(core, out, 2 * reads)
    for place in range(reads):
        out[place] = core.wanted[place]
        out[reads + place] = _take_row(book, np.int64(core.wanted[place]))
    return reads, core.numbers[N_VICTIMS], core.numbers[WASTED] - wasted
