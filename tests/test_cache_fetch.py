"""A decode batch fetched without waiting, and whoever watches which block lies where."""

import contextlib
import threading
import time

import numpy as np
import pytest
from blocks import BLOCK, EXPERTS, LAYERS, ONLINE, TOP_K, Gate, interrupt_after, rows_of, write_store
from fuzz import fuzzing
from hypothesis import given
from hypothesis import strategies as st
from test_prefetch import check_books, in_thread, wait_until
from test_prefetch_limits import tell_room

from nemolab.errors import StoreError
from nemolab.policy import rows as rows_module
from nemolab.store import cache as cache_module
from nemolab.store import growth, residents
from nemolab.store import read_ahead as read_ahead_module
from nemolab.store import reader as reader_module
from nemolab.store import task as task_module
from nemolab.store.cache import ExpertCache

pytest_plugins = ["block_fixtures"]


class Table:
    """What a watcher knows. No row that it names may be written to."""

    def __init__(self, cache):
        self.cache, self.rows, self.faults = cache, {}, []
        self._read = cache.reader.read_into
        cache.watcher, cache.reader.read_into = self, self._check_and_read

    def came(self, blocks, rows):
        self.rows.update(zip(blocks, rows, strict=True))

    def left(self, blocks):
        for block in blocks:
            self.rows.pop(block, None)

    def _check_and_read(self, block, buffer):
        row = (buffer.ctypes.data - self.cache.arena.ctypes.data) // BLOCK
        if row in self.rows.values():
            self.faults.append((block, row))
        self._read(block, buffer)

    def check(self, data):
        """It names what the cache holds whole, and nothing else, as it lies there."""
        assert not self.faults, "a row was written to that the watcher still named"
        cache = self.cache
        ahead = cache._residents.ahead
        assert self.rows == {key: row for key, row in rows_of(cache).items() if key not in ahead}
        for block, row in self.rows.items():
            assert np.array_equal(cache.arena[row], data[block])


def test_a_fetch_returns_while_its_misses_are_read_and_names_them(store, data):
    with ExpertCache(store, slots=20) as cache:
        cache.lookup(0, [0, 1])
        gate = Gate(cache, held=[2, 3])
        fetched = cache.fetch(0, [2, 0, 3, 1, 2])
        assert fetched.missing == [0, 2, 4], "ranks, of a repeated expert too"
        assert np.array_equal(cache.arena[[fetched.rows[1], fetched.rows[3]]], data[[0, 1]]), "hits are there"
        assert cache.missed == 2 and cache.stats()["decode"]["misses"] == 2, "counted once they have come"
        thread, _ = in_thread(fetched.wait)
        thread.join(0.1)
        assert thread.is_alive()
        gate.let_through()
        thread.join(20)
        fetched.wait()
        assert np.array_equal(cache.arena[fetched.rows], data[[2, 0, 3, 1, 2]])
        assert cache.stats()["decode"]["misses"] == 4 and cache.fetch(0, [0, 3]).missing == []


def test_blocks_read_ahead_are_missing_only_while_they_are_under_way(store, data):
    with ExpertCache(store, slots=20) as cache:
        table, gate = Table(cache), Gate(cache, held=[6])
        cache.prefetch(0, [5, 6])
        wait_until(lambda: 5 in gate.ended, "5 is not held")
        wait_until(lambda: cache._residents.ahead._flights[5].landed, "nor what comes after")
        assert not table.rows
        fetched = cache.fetch(0, [5, 6, 7])
        assert fetched.missing == [1, 2] and table.rows == {5: fetched.rows[0]}
        gate.let_through()
        fetched.wait()
        assert np.array_equal(cache.arena[fetched.rows], data[5:8])
        counts = cache.stats()["decode"]
        assert (counts["misses"], counts["prefetch_useful"], counts["prefetch_late"]) == (1, 2, 1)
        table.check(data)


def test_nothing_is_read_ahead_between_a_fetch_and_its_wait(store):
    with ExpertCache(store, slots=20) as cache:
        fetched = cache.fetch(0, [0])
        with pytest.raises(StoreError, match="call the fetch's wait first"):
            cache.prefetch(1, [0])
        fetched.wait()
        assert cache.prefetch(1, [0]) == 1


@pytest.mark.parametrize("other", ["lookup", "stream", "clear", "close"])
def test_a_fetch_that_nobody_waited_for_is_given_up_by_what_is_asked_next(store, data, other):
    with ExpertCache(store, slots=TOP_K) as cache:
        cache.lookup(0, [0, 1])
        table, gate = Table(cache), Gate(cache, held=[2])
        fetched = cache.fetch(0, [0, 2])
        wait_until(lambda: 2 in gate.begun, "a thread reads")
        calls = {
            "lookup": lambda: cache.lookup(0, [3, 4, 5, 6]),
            "stream": lambda: list(cache.stream(0, [3])),
            "clear": cache.clear,
            "close": cache.close,
        }
        thread, got = in_thread(calls[other])
        thread.join(0.1)
        assert thread.is_alive(), "a thread still writes into a row"
        gate.let_through()
        thread.join(20)
        assert not isinstance(got[0], BaseException)
        with pytest.raises(StoreError, match="given up"):
            fetched.wait()
        if other != "close":
            table.check(data)
            assert 2 not in table.rows and cache.restarts == 1
            assert np.array_equal(np.stack(cache.lookup(0, [0, 2])), data[[0, 2]])
            check_books(cache, data)


def test_a_fetch_whose_read_fails_says_so_and_leaves_what_is_whole(store, data):
    with ExpertCache(store, slots=TOP_K) as cache:
        cache.lookup(0, [0, 1])
        table, read = Table(cache), cache.reader.read_into

        def refuse(block, buffer):
            if block == 3:
                raise StoreError("the disk said no")
            read(block, buffer)

        cache.reader.read_into = refuse
        fetched = cache.fetch(0, [0, 2, 3])
        with pytest.raises(StoreError, match="the disk said no"):
            fetched.wait()
        with pytest.raises(StoreError, match="given up"):
            fetched.wait()
        table.check(data)
        assert 0 in table.rows and 3 not in table.rows
        check_books(cache, data)


def test_an_interrupt_at_any_line_of_a_fetch_or_its_wait_leaves_a_sound_cache_and_watcher(store, data):
    rng, interrupted, finished = np.random.default_rng(6), 0, False
    modules = (cache_module, rows_module, residents, growth, read_ahead_module, reader_module, task_module)
    with ExpertCache(store, slots=9) as cache:
        table = Table(cache)
        while not finished:
            fetched = None
            cache.prefetch(0, rng.choice(EXPERTS, 4, replace=False).tolist())
            with interrupt_after(interrupted, *modules):
                try:
                    fetched = cache.fetch(0, rng.choice(EXPERTS, TOP_K, replace=False).tolist())
                    fetched.wait()
                    finished = True
                except KeyboardInterrupt:
                    interrupted += 1
            if fetched is None or interrupted % 2:  # else the next fetch finds this one not waited for
                cache.lookup_rows(1, [0])
                table.check(data)
            experts = rng.choice(EXPERTS, TOP_K, replace=False).tolist()
            again = cache.fetch(0, experts)
            again.wait()
            assert np.array_equal(cache.arena[again.rows], data[experts])
            table.check(data)
            check_books(cache, data, counted=False)
    assert interrupted > 80, "every line of both was tried"


@fuzzing(1 / 3)
@given(
    seed=st.integers(0, 2**32 - 1),
    slots=st.integers(TOP_K, 30),
    room=st.sampled_from([100, 8]),
    name=st.sampled_from(ONLINE),
    failing=st.sampled_from([0.0, 0.1]),
)
def test_a_watcher_knows_at_any_time_what_lies_whole_where(tmp_path_factory, data, seed, slots, room, name, failing):
    rng, dice, lock = np.random.default_rng(seed), np.random.default_rng(seed + 1), threading.Lock()
    store = write_store(tmp_path_factory.mktemp("store"), data)
    with (
        pytest.MonkeyPatch.context() as patch,
        ExpertCache(store, slots=slots, threads=3, ring=6, policy=name) as cache,
    ):
        tell_room(patch, 100, *[room, 0] * 50)
        read = cache.reader.read_into

        def read_badly(block, buffer):
            with lock:
                pause, fails = dice.random() ** 4 * 0.002, dice.random() < failing
            time.sleep(pause)
            buffer[: BLOCK // 2] = 0
            if fails:
                raise StoreError("the disk said no")
            read(block, buffer)

        cache.reader.read_into = read_badly
        table = Table(cache)
        modules = (cache_module, rows_module, residents, growth, read_ahead_module, reader_module, task_module)
        for step in range(50):
            layer, deed = step % LAYERS, rng.random()
            experts = rng.choice(EXPERTS // 2, TOP_K, replace=False).tolist()
            interrupt = interrupt_after(int(rng.integers(150)), *modules) if rng.random() < 0.1 else None
            with contextlib.suppress(StoreError, KeyboardInterrupt), interrupt or contextlib.nullcontext():
                if deed < 0.05:
                    cache.clear()
                elif deed < 0.15:
                    for batch in cache.stream(layer, rng.choice(EXPERTS, 15, replace=False)):
                        assert all(np.array_equal(view, data[layer * EXPERTS + expert]) for expert, view in batch)
                        if rng.random() < 0.2:
                            break
                elif deed < 0.25:
                    cache.fetch(layer, experts)  # and nobody waits
                else:
                    fetched = cache.fetch(layer, experts)
                    here = [rank for rank in range(TOP_K) if rank not in fetched.missing]
                    wanted = data[layer * EXPERTS + np.array(experts)]
                    assert np.array_equal(cache.arena[fetched.rows][here], wanted[here])
                    fetched.wait()
                    assert np.array_equal(cache.arena[fetched.rows], wanted)
                    cache.prefetch((layer + 1) % LAYERS, rng.choice(EXPERTS // 2, 6, replace=False).tolist())
                    assert np.array_equal(cache.arena[fetched.rows], wanted)
            if cache._residents.begun is None:
                table.check(data)
            assert not table.faults
        with contextlib.suppress(StoreError):
            cache.lookup(0, [0])
        table.check(data)


@pytest.mark.parametrize("forgetful", ["came", "left"])
def test_a_watcher_that_is_not_told_can_fail(store, data, monkeypatch, forgetful):
    with ExpertCache(store, slots=TOP_K) as cache:
        table = Table(cache)
        monkeypatch.setattr(table, forgetful, lambda *arguments: None)
        cache.lookup(0, [0, 1, 2, 3])
        cache.lookup(0, [4, 5, 6, 7])
        with pytest.raises(AssertionError):
            table.check(data)
