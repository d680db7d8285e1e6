"""Rows of memory beside the decisions: the decisions stay those of a plain cache, and no two entries share a row."""

import numpy as np
import pytest
from blocks import ONLINE

from nemolab.policy import POLICIES, Cache
from nemolab.policy.rows import N_FREE, NO_ROW, RowCache

LAYERS, WIDTH = 3, 20


def check_rows(book):
    """Every entry that is cached has a row, and each row is one entry's or free."""
    held = sorted(book)
    seated = np.flatnonzero(book.row_of != NO_ROW).tolist()
    free = book._book.free[: book._book.numbers[N_FREE]].tolist()
    assert held == seated == book.find_seated()
    assert sorted([*book.row_of[seated].tolist(), *free]) == list(range(book.capacity_bytes))
    assert book.rows_used == len(seated)


@pytest.mark.parametrize("name", ["lru", *(name for name in ("lfu", "arc") if name in ONLINE)])
@pytest.mark.parametrize("rows", [7, 25])
def test_decisions_are_those_of_a_plain_cache_and_rows_follow(name, rows):
    """Batches with repeats, batches larger than the cache, and rounds of prefetch between them."""
    rng = np.random.default_rng(1)
    book = RowCache(LAYERS, WIDTH, rows, policy=POLICIES[name])
    plain = Cache(LAYERS * WIDTH, rows, 1, policy=POLICIES[name])
    for step in range(200):
        layer = step % LAYERS
        ids = rng.integers(WIDTH, size=int(rng.integers(1, 14))).tolist()
        before = book.row_of.copy()
        wanted, seats = plain.batch([layer * WIDTH + i for i in ids]), book.look_up(layer, ids)
        assert (seats.distinct, list(seats.misses), list(seats.useful), list(seats.victims)) == (
            len(set(ids)), wanted.misses, wanted.useful, wanted.victims,
        )  # fmt: skip
        assert seats.rows == [book.row_of[layer * WIDTH + i] for i in ids]
        assert list(seats.missing) == [at for at, i in enumerate(ids) if layer * WIDTH + i in wanted.misses]
        assert list(seats.miss_rows) == [book.row_of[key] for key in wanted.misses]
        stayed = [key for key in wanted.hits if key not in wanted.victims]
        assert np.array_equal(book.row_of[stayed], before[stayed]), "a hit lies where it lay"
        assert {*book} - {*book.find_whole()} >= {*wanted.misses, *wanted.useful} - {*wanted.victims}
        book.note_whole()
        check_rows(book)
        following, guesses = (layer + 1) % LAYERS, rng.integers(WIDTH, size=5).tolist()
        asked, issue = plain.prefetch([following * WIDTH + i for i in guesses]), book.issue(following, guesses)
        assert (issue.reads, issue.victims) == (asked.reads, asked.victims)
        assert issue.rows == book.row_of[asked.reads].tolist() if asked.reads else not issue.rows
        assert not set(issue.reads) & set(book.find_whole()), "not asked for yet"
        assert book.wasted == plain.wasted
        check_rows(book)
    assert book.wasted > 0


@pytest.mark.parametrize("layer, ids", [(0, [3, WIDTH]), (0, [-1]), (LAYERS, [0]), (-1, [0])])
def test_what_is_out_of_range_does_nothing(layer, ids):
    book = RowCache(LAYERS, WIDTH, 5)
    book.look_up(0, [1, 2])
    assert book.look_up(layer, ids) is None and book.issue(layer, ids) is None
    assert list(book) == [1, 2]
    assert list(book.look_up(0, [1, 2, 3]).misses) == [3]


def test_victims_that_were_prefetched_in_vain_are_counted():
    book = RowCache(LAYERS, WIDTH, 4)
    book.look_up(0, [0])
    book.issue(1, [5, 6])
    seats = book.look_up(2, [1, 2, 3])
    assert (list(seats.victims), seats.wasted) == ([0, WIDTH + 5], 1)


def test_more_ids_than_ever_before_find_buffers():
    book = RowCache(LAYERS, WIDTH, 4)
    ids = [1, 2, 3] * 100
    seats = book.look_up(0, ids)
    assert seats.rows == [book.row_of[i] for i in ids] and list(seats.missing) == list(range(300))
    assert book.issue(1, [7] * 500).reads == [WIDTH + 7], "and more than there are keys do no harm"
    assert Cache(4, 2, 1).prefetch([3] * 10_000).reads == [3]
    check_rows(book)


def test_a_smaller_cache_uses_low_rows_only():
    book = RowCache(LAYERS, WIDTH, 9)
    book.look_up(0, [0, 1])
    book.resize(4)
    for first in range(0, 12, 3):
        assert max(book.look_up(1, range(first, first + 3)).rows) < 4
    check_rows(book)


def test_a_refilled_cache_goes_on_where_the_old_one_was():
    old, new = (RowCache(LAYERS, WIDTH, 6) for _ in range(2))
    old.look_up(0, [4, 1, 9])
    old.note_whole()
    old.look_up(1, [3])
    kept = old.find_whole()
    assert kept == [4, 1, 9], "the last batch is not there yet"
    new.refill(kept, old.row_of[kept])
    assert list(new) == kept and np.array_equal(new.row_of[kept], old.row_of[kept])
    check_rows(new)
    new.look_up(2, [0, 1, 2, 5])
    assert list(new)[:2] == [1, 9], "the oldest left"
    full, again = RowCache(LAYERS, WIDTH, 50), RowCache(LAYERS, WIDTH, 50)
    for layer in range(LAYERS):
        full.look_up(layer, range(WIDTH))
    full.note_whole()
    again.refill(full.find_whole(), full.row_of[full.find_whole()])
    assert list(again) == list(full) and np.array_equal(again.row_of, full.row_of), "more than there are in a layer"
    check_rows(again)
