"""Reading ahead: nothing in use is overwritten, nothing unread is used, every block is accounted for."""

import contextlib
import os
import threading
import time

import numpy as np
import pytest
from blocks import (
    BLOCK,
    EXPERTS,
    LAYERS,
    ONLINE,
    TOP_K,
    Gate,
    free_rows,
    interrupt_after,
    poison,
    rows_of,
    write_store,
)
from fuzz import fuzzing
from hypothesis import given
from hypothesis import strategies as st

from nemolab.errors import StoreError
from nemolab.policy import POLICIES, Cache
from nemolab.policy import rows as rows_module
from nemolab.policy.core import SPARED
from nemolab.store import cache as cache_module
from nemolab.store import growth, residents
from nemolab.store import read_ahead as read_ahead_module
from nemolab.store.cache import ExpertCache
from nemolab.store.read_ahead import ReadAhead

pytest_plugins = ["block_fixtures"]


def in_thread(function):
    """Run it in a thread: (thread, list that will hold what it returned or raised)."""
    got = []

    def run():
        try:
            got.append(function())
        except BaseException as problem:
            got.append(problem)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, got


def wait_until(said, what):
    for _ in range(2000):
        if said():
            return
        time.sleep(0.005)
    pytest.fail(what)


def test_a_prefetch_returns_while_its_reads_are_under_way_and_a_lookup_waits_for_what_it_asks_for(store, data):
    with ExpertCache(store, slots=20) as cache:
        cache.lookup(0, [0, 1, 2, 3])
        gate = Gate(cache, held=[EXPERTS + 5, EXPERTS + 6])
        assert cache.prefetch(1, [5, 6, 7]) == 3, "it did not wait for reads that nobody lets through"
        wait_until(lambda: EXPERTS + 7 in gate.ended, "the third is not held")
        thread, got = in_thread(lambda: np.stack(cache.lookup(1, [7, 5, 8])))
        wait_until(lambda: EXPERTS + 8 in gate.ended, "the miss is read meanwhile")
        assert thread.is_alive(), "5 has not arrived"
        gate.let_through(EXPERTS + 5)
        thread.join(20)
        assert np.array_equal(got[0], data[EXPERTS + np.array([7, 5, 8])])
        gate.let_through(EXPERTS + 6)
        counts = cache.stats()["decode"]
    assert counts == {
        "lookups": 7, "hits": 2, "misses": 5, "reads": 8, "bytes_read": 8 * BLOCK,
        "prefetch_issued": 3, "prefetch_useful": 2, "prefetch_wasted": 0, "prefetch_late": 1,
    }  # fmt: skip


def test_only_absent_guesses_are_read_and_never_in_place_of_the_batch_in_use(store, data):
    with ExpertCache(store, slots=6) as cache:
        cache.lookup(0, [0, 1, 2, 3])
        cache.prefetch(0, [3, 0, 9, 10, 11, 12])
        views = cache.lookup(0, [9, 10, 0, 1])
        assert np.array_equal(np.stack(views), data[[9, 10, 0, 1]])
        counts = cache.stats()["decode"]
        assert (counts["prefetch_issued"], counts["prefetch_useful"], counts["hits"]) == (2, 2, 4), "6 - 4 had room"
    with ExpertCache(store, slots=TOP_K) as cache:
        cache.lookup(0, [0, 1, 2, 3])
        assert cache.prefetch(1, [5, 6]) == 0, "the batch in use leaves nothing"


def evict_in_flight(cache, gate):
    """A block under way is evicted by a batch that takes the whole cache: the lookup in a thread."""
    cache.lookup(0, [0, 1, 2, 3])
    cache.prefetch(1, [9])
    wait_until(lambda: EXPERTS + 9 in gate.begun, "the read begins")
    return in_thread(lambda: np.stack(cache.lookup(2, [0, 1, 2, 3, 4])))


def test_the_row_of_an_evicted_block_in_flight_is_used_again_only_when_its_read_has_ended(store, data):
    with ExpertCache(store, slots=5) as cache:
        gate = Gate(cache, held=[EXPERTS + 9])
        thread, got = evict_in_flight(cache, gate)
        thread.join(0.2)
        assert thread.is_alive() and not set(gate.begun) & set(range(2 * EXPERTS, 3 * EXPERTS))
        gate.let_through()
        thread.join(20)
        assert np.array_equal(got[0], data[2 * EXPERTS + np.arange(5)])
        counts = cache.stats()["decode"]
        assert (counts["prefetch_wasted"], counts["prefetch_useful"], counts["reads"]) == (1, 0, 10)


def test_the_row_of_an_evicted_block_can_fail(store, data, monkeypatch):
    """Without the wait the late read lands on top of another block."""
    monkeypatch.setattr(ReadAhead, "drop", lambda self, keys: [])
    with ExpertCache(store, slots=5) as cache:
        gate = Gate(cache, held=[EXPERTS + 9])
        thread, got = evict_in_flight(cache, gate)
        thread.join(20)
        gate.let_through()
        wait_until(lambda: EXPERTS + 9 in gate.ended, "the late read ends")
        rows = [rows_of(cache)[2 * EXPERTS + expert] for expert in range(5)]
        assert not np.array_equal(cache.arena[rows], data[2 * EXPERTS + np.arange(5)])


@contextlib.contextmanager
def failing_reads_of(*blocks):
    """Reads of these blocks fail."""
    real = os.preadv

    def preadv(descriptor, buffers, offset):
        if offset // BLOCK in blocks:
            raise OSError(5, "Input/output error")
        return real(descriptor, buffers, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", preadv)
        yield


def test_a_failed_prefetch_is_no_failure_until_its_block_is_asked_for_and_is_then_read_again(store, data, capsys):
    with ExpertCache(store, slots=20) as cache:
        with failing_reads_of(EXPERTS + 5):
            cache.prefetch(1, [5, 6])
            assert np.array_equal(cache.lookup(1, [6])[0], data[EXPERTS + 6])
            assert cache.stats()["decode"]["reads"] == 1, "a read that failed is none"
            with pytest.raises(StoreError, match=f"offset {(EXPERTS + 5) * BLOCK}"):
                cache.lookup(1, [5, 6])
            assert np.array_equal(cache.lookup(1, [6])[0], data[EXPERTS + 6])
            cache.prefetch(1, [5])
            cache.stats()  # it has failed by now
        assert np.array_equal(cache.lookup(1, [5])[0], data[EXPERTS + 5])
        counts = cache.stats()["decode"]
        assert (counts["prefetch_issued"], counts["prefetch_useful"], counts["prefetch_wasted"]) == (3, 2, 1)
        assert counts["bytes_read"] == counts["reads"] * BLOCK == 2 * BLOCK, "5 and 6, once each"
    assert capsys.readouterr().err.count("could not be read ahead") == 1, "said, and said once"


def test_a_prompt_pass_waits_for_blocks_in_flight_and_counts_them_as_used(store, data):
    with ExpertCache(store, slots=20, ring=4) as cache:
        gate = Gate(cache, held=[7])
        cache.prefetch(0, [7])
        thread, got = in_thread(lambda: [(e, v.copy()) for batch in cache.stream(0, range(10)) for e, v in batch])
        wait_until(lambda: 8 in gate.begun or len(gate.ended) >= 7, "the prompt goes on beside it")
        gate.let_through()
        thread.join(20)
        assert [expert for expert, _ in got[0]] == list(range(10))
        assert all(np.array_equal(view, data[expert]) for expert, view in got[0])
        assert cache.missed == 9 and cache.stats()["prefill"]["prefetch_useful"] == 1
        assert cache.stats()["decode"]["prefetch_issued"] == 1
        cache.lookup(0, [7])
        assert cache.stats()["decode"]["hits"] == 1 and cache.stats()["decode"]["prefetch_useful"] == 0


def test_a_failed_prefetch_is_read_again_for_a_prompt(store, data):
    with ExpertCache(store, slots=20, ring=4) as cache:
        with failing_reads_of(7):
            cache.prefetch(0, [7])
            with pytest.raises(StoreError, match=f"offset {7 * BLOCK}"):
                list(cache.stream(0, [7]))
        [[(expert, view)]] = list(cache.stream(0, [7]))
        assert expert == 7 and np.array_equal(view, data[7])


def test_clearing_makes_what_comes_next_cold_and_what_was_not_used_wasted(store, data):
    with ExpertCache(store, slots=20) as cache:
        cache.lookup(0, [0, 1])
        cache.prefetch(1, [0, 1, 2])
        cache.lookup(1, [1])
        cache.clear()
        counts = cache.stats()["decode"]
        assert (counts["prefetch_issued"], counts["prefetch_useful"], counts["prefetch_wasted"]) == (3, 1, 2)
        assert cache.lookup_rows(0, [0, 1]) and cache.missed == 2 and cache.restarts == 0
        assert np.array_equal(np.stack(cache.lookup(1, [0, 1, 2])), data[EXPERTS : EXPERTS + 3]) and cache.missed == 3


@pytest.mark.parametrize("lent", [False, True])
def test_closing_waits_for_reads_begun_and_begins_no_other(store, lent):
    reader = store.open_reader(threads=1)
    if not lent:
        store.open_reader = lambda threads: reader
    cache = ExpertCache(store, slots=20, reader=reader if lent else None)
    gate = Gate(cache, held=[0])
    cache.prefetch(0, [0, 1, 2])
    wait_until(lambda: gate.begun, "the one thread reads")
    thread, _ = in_thread(cache.close)
    thread.join(0.2)
    assert thread.is_alive(), "memory is not given back under a read"
    gate.let_through()
    thread.join(20)
    assert not thread.is_alive() and gate.begun == [0]
    with pytest.raises(StoreError, match="closed"):
        cache.prefetch(0, [1])
    reader.close()


def test_a_closed_reader_fails_a_prefetch_and_leaves_a_sound_cache(store, data):
    reader = store.open_reader(threads=2)
    with ExpertCache(store, slots=20, reader=reader) as cache:
        cache.lookup(0, [0, 1])
        reader.close()
        with pytest.raises(StoreError, match="the reader is closed"):
            cache.prefetch(0, [5])
        assert np.array_equal(np.stack(cache.lookup(0, [0, 1])), data[:2])
        assert cache.stats()["decode"]["reads"] == 2


def test_an_interrupt_at_any_line_of_a_prefetch_or_of_the_lookup_after_it_leaves_a_sound_cache(store, data):
    rng, interrupted, finished = np.random.default_rng(6), 0, False
    with ExpertCache(store, slots=9) as cache:
        while not finished:
            with interrupt_after(interrupted, cache_module, rows_module, residents, growth, read_ahead_module):
                try:
                    cache.prefetch(0, rng.choice(EXPERTS, 5, replace=False).tolist())
                    cache.lookup_rows(0, rng.choice(EXPERTS, TOP_K, replace=False).tolist())
                    finished = True
                except KeyboardInterrupt:
                    interrupted += 1
            for _ in range(2):
                experts = rng.choice(EXPERTS, TOP_K, replace=False).tolist()
                assert np.array_equal(np.stack(cache.lookup(0, experts)), data[experts])
                cache.prefetch(1, rng.choice(EXPERTS, 3, replace=False).tolist())
            check_books(cache, data, counted=False)
    assert interrupted > 80, "every line of both was tried"


def check_books(cache, data, counted=True):
    """Everything cached is what it says, in a row of its own, and every block read ahead is accounted for.

    counted  False: an interrupt may have come between a read and its count
    """
    cache.stats()  # nothing is under way any more
    rows, free, ahead = rows_of(cache), free_rows(cache), cache._residents.ahead
    held = set(cache._residents.book)
    assert held == set(rows) and len(set(rows.values())) == len(held)
    assert sorted([*rows.values(), *free]) == list(range(cache.slots))
    whole = set(cache._residents.book.find_whole())
    assert held - whole == set(ahead), "what is not asked for yet"
    failed = {flight.block for flight in ahead._flights.values() if flight.failure}
    for key in held - failed:
        assert np.array_equal(cache.arena[rows[key]], data[key])
    counts = [sum(getattr(c, name) for c in cache._counts.values()) for name in ("issued", "useful", "wasted")]
    assert not counted or counts[0] == counts[1] + counts[2] + len(ahead)


@pytest.mark.parametrize("name", ONLINE)
def test_what_stays_is_what_the_policy_decides_alone(store, data, name):
    """The same schedule through the bare decisions: hits, misses, reads ahead, useful and wasted to the last one."""
    rng = np.random.default_rng(7)
    with ExpertCache(store, slots=21, policy=name) as cache:
        bare = Cache(LAYERS * EXPERTS, 21, 1, policy=POLICIES[name])
        expected = dict.fromkeys(("hits", "misses", "issued", "useful"), 0)
        for step in range(120):
            layer = step % LAYERS
            experts = (rng.zipf(1.4, 9) % EXPERTS).tolist()[:TOP_K]
            guesses = list(dict.fromkeys((rng.zipf(1.4, 9) % EXPERTS).tolist()))[: step % 5]
            done = bare.batch([layer * EXPERTS + expert for expert in experts])
            views = cache.lookup(layer, experts)
            assert all(np.array_equal(view, data[layer * EXPERTS + e]) for e, view in zip(experts, views, strict=True))
            assert cache.missed == len(done.misses)
            following = (layer + 1) % LAYERS
            ahead = bare.prefetch([following * EXPERTS + guess for guess in guesses]).reads if guesses else []
            assert cache.prefetch(following, guesses) == len(ahead)
            for field, found in zip(expected, (done.hits, done.misses, ahead, done.useful), strict=True):
                expected[field] += len(found)
        counts = cache._counts["decode"]
        assert {field: getattr(counts, field) for field in expected} == expected
        assert counts.wasted == bare.wasted > 0
        check_books(cache, data)


@fuzzing(1 / 3)
@given(
    seed=st.integers(0, 2**32 - 1),
    slots=st.integers(TOP_K, 30),
    threads=st.integers(1, 6),
    failing=st.sampled_from([0.0, 0.1]),
    name=st.sampled_from(ONLINE),
)
def test_any_schedule_of_slow_and_failing_reads_gives_right_blocks(
    tmp_path_factory, data, seed, slots, threads, failing, name
):
    rng, store = np.random.default_rng(seed), write_store(tmp_path_factory.mktemp("store"), data)
    dice = np.random.default_rng(seed + 1)
    lock = threading.Lock()
    with ExpertCache(store, slots=slots, threads=threads, ring=6, policy=name) as cache:
        poison(cache)
        read = cache.reader.read_into

        def read_badly(block, buffer):
            with lock:
                pause, fails = dice.random() ** 4 * 0.003, dice.random() < failing
            time.sleep(pause)
            if fails:
                buffer[: BLOCK // 2] = 0
                raise StoreError("the disk said no")
            read(block, buffer)

        cache.reader.read_into = read_badly
        for step in range(60):
            layer = step % LAYERS
            try:
                if rng.random() < 0.05:
                    for batch in cache.stream(layer, rng.choice(EXPERTS, 15, replace=False)):
                        assert all(np.array_equal(view, data[layer * EXPERTS + expert]) for expert, view in batch)
                        if rng.random() < 0.2:
                            break
                    continue
                experts = rng.choice(EXPERTS // 2, TOP_K, replace=False).tolist()
                views = cache.lookup(layer, experts)
                cache.prefetch((layer + 1) % LAYERS, rng.choice(EXPERTS // 2, 6, replace=False).tolist())
                # Used after the prefetch was issued, as a layer does.
                assert np.array_equal(np.stack(views), data[layer * EXPERTS + np.array(experts)])
            except StoreError as problem:
                assert failing and "the disk said no" in str(problem)
        check_books(cache, data)


def test_any_schedule_can_fail(store, data):
    """A policy that evicts the batch in use would show."""
    with ExpertCache(store, slots=TOP_K + 1) as cache:
        poison(cache)
        views = cache.lookup(0, [0, 1, 2, 3])
        cache._residents.book._core.numbers[SPARED] = 0  # as if nothing of the batch were in use
        cache.prefetch(1, [0, 1, 2, 3])
        cache.stats()
        assert not np.array_equal(np.stack(views), data[:4])
