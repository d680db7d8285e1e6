"""The cache of real blocks, which follows the decisions of `nemolab.policy`."""

import os
import threading
import time
import types

import numpy as np
import pytest
from blocks import BLOCK, EXPERTS, LAYERS, TOP_K, interrupt_after, rows_of

from nemolab.errors import StoreError
from nemolab.policy import Cache
from nemolab.policy import rows as rows_module
from nemolab.store import cache as cache_module
from nemolab.store import direct_io, growth, residents
from nemolab.store.arena import Arena
from nemolab.store.cache import ExpertCache
from nemolab.store.counts import NOTHING, Counts

pytest_plugins = ["block_fixtures"]


def counting(cache, monkeypatch):
    """Record every block that is really read."""
    reads, real = [], cache.reader.read_into
    monkeypatch.setattr(cache.reader, "read_into", lambda block, buffer: (reads.append(block), real(block, buffer)))
    return reads


def test_lookups_return_the_blocks_asked_for_in_that_order(store, data):
    rng = np.random.default_rng(2)
    with ExpertCache(store, slots=7) as cache:
        for _ in range(200):
            layer, experts = int(rng.integers(LAYERS)), rng.choice(EXPERTS, TOP_K, replace=False)
            for expert, view in zip(experts, cache.lookup(layer, experts), strict=True):
                assert np.array_equal(view, data[layer * EXPERTS + expert])


def test_hits_misses_and_reads_are_those_of_the_lru(store, monkeypatch):
    rng = np.random.default_rng(3)
    with ExpertCache(store, slots=30) as cache:
        reads, lru = counting(cache, monkeypatch), Cache(LAYERS * EXPERTS, 30, 1)
        hits = misses = 0
        for step in range(150):
            layer = step % LAYERS
            experts = (rng.zipf(1.5, 3 * TOP_K) % EXPERTS).tolist()[:TOP_K]
            expected = lru.batch([layer * EXPERTS + expert for expert in experts])
            before = len(reads)
            cache.lookup(layer, experts)
            assert sorted(reads[before:]) == sorted(expected.misses)
            hits, misses = hits + len(expected.hits), misses + len(expected.misses)
        assert hits > 0
        counts = {"lookups": hits + misses, "hits": hits, "misses": misses, "reads": misses}
        assert cache.stats() == {"decode": NOTHING | counts | {"bytes_read": misses * BLOCK}}


def test_all_hits_when_everything_fits(store, data):
    with ExpertCache(store, budget_bytes=10**9) as cache:
        assert cache.slots == LAYERS * EXPERTS, "capacity is capped at what the store holds"
        for _ in range(2):
            for layer in range(LAYERS):
                for first in range(0, EXPERTS, TOP_K):
                    cache.lookup(layer, range(first, first + TOP_K))
        assert cache.stats()["decode"]["misses"] == LAYERS * EXPERTS


@pytest.mark.parametrize("count", [1, 31, 32, 33, 40])
def test_a_prompt_pass_reads_each_needed_expert_at_most_once(store, data, monkeypatch, count):
    experts = np.random.default_rng(4).permutation(EXPERTS)[:count].tolist()
    with ExpertCache(store, slots=TOP_K) as cache:
        cache.lookup(1, experts[:TOP_K][:count])
        reads = counting(cache, monkeypatch)
        seen = []
        for batch in cache.stream(1, experts + experts):
            assert len(batch) <= 32
            for expert, view in batch:
                assert np.array_equal(view, data[EXPERTS + expert])
                seen.append(expert)
        assert seen == experts
        cached = min(TOP_K, count)
        assert sorted(reads) == sorted(EXPERTS + expert for expert in experts[cached:])
        missed = count - cached
        counts = {"lookups": count, "hits": cached, "misses": missed, "reads": missed, "bytes_read": missed * BLOCK}
        assert cache.stats()["prefill"] == NOTHING | counts


def test_counts_can_be_asked_for_while_a_phase_begins(store, monkeypatch):
    with ExpertCache(store, slots=30) as cache:
        cache.lookup(0, range(TOP_K))
        real = Counts.to_dict

        def begin_another(counts, *settings):
            cache._counts_of(f"phase {len(cache._counts)}")  # as another thread would
            return real(counts, *settings)

        monkeypatch.setattr(Counts, "to_dict", begin_another)
        assert cache.stats()["decode"]["misses"] == TOP_K


def test_a_prompt_pass_neither_refreshes_nor_inserts(store, monkeypatch):
    with ExpertCache(store, slots=5) as cache:
        cache.lookup(0, [0, 1, 2, 3])
        cache.lookup(0, [4])
        list(cache.stream(0, [0, 1, 7, 8, 9]))
        reads = counting(cache, monkeypatch)
        cache.lookup(0, [7])  # the prompt's own reads were not kept, and 0 is still the oldest: it goes
        cache.lookup(0, [1, 2, 3, 4])
        assert reads == [7]
        cache.lookup(0, [0])
        assert reads == [7, 0]


def test_the_next_prompt_batch_is_read_while_this_one_is_used(store, monkeypatch):
    with ExpertCache(store, slots=TOP_K, ring=8) as cache:
        reads = counting(cache, monkeypatch)
        stream = cache.stream(0, range(24))
        next(stream)
        for _ in range(500):
            if len(reads) == 16:
                break
            threading.Event().wait(0.01)
        assert sorted(reads) == list(range(16)), "two batches, not one and not three"
        stream.close()


def test_views_of_a_prompt_batch_stay_while_the_next_arrives(store, data):
    with ExpertCache(store, slots=TOP_K, ring=8) as cache:
        for batch in cache.stream(2, range(EXPERTS)):
            threading.Event().wait(0.01)  # the next batch lands meanwhile
            for expert, view in batch:
                assert np.array_equal(view, data[2 * EXPERTS + expert])


def test_an_abandoned_stream_leaves_the_cache_usable(store, data):
    with ExpertCache(store, slots=TOP_K, ring=8) as cache:
        stream = cache.stream(0, range(24))
        next(stream)
        with pytest.raises(StoreError, match="finish the stream first"):
            cache.lookup(0, [1])
        with pytest.raises(StoreError, match="one prompt stream at a time"):
            next(cache.stream(0, [1]))
        stream.close()
        assert np.array_equal(cache.lookup(0, [1])[0], data[1])


def test_a_failed_read_leaves_nothing_that_looks_cached(store, data, monkeypatch):
    real = os.preadv

    def fail(descriptor, buffers, offset):
        if offset == 6 * BLOCK:
            raise OSError(5, "Input/output error")
        return real(descriptor, buffers, offset)

    with ExpertCache(store, slots=TOP_K) as cache:
        cache.lookup(0, [0, 1, 2, 3])
        monkeypatch.setattr(os, "preadv", fail)
        with pytest.raises(StoreError, match=f"offset {6 * BLOCK}"):
            cache.lookup(0, [3, 5, 6, 7])
        with pytest.raises(StoreError, match=f"offset {6 * BLOCK}"):
            list(cache.stream(0, [5, 6]))
        monkeypatch.setattr(os, "preadv", real)
        before = cache.stats()["decode"]["misses"]
        for _ in range(3):
            for expert, view in zip([3, 5, 6, 7], cache.lookup(0, [3, 5, 6, 7]), strict=True):
                assert np.array_equal(view, data[expert])
        assert cache.stats()["decode"]["misses"] == before + 3, "only 3 was left, the others are read again"


def test_an_interrupt_at_any_line_of_a_lookup_leaves_a_sound_cache(store, data):
    """Ctrl-C may fall between deciding what stays and reading it: nothing unread may count as cached afterwards."""
    rng, interrupted, finished = np.random.default_rng(6), 0, False
    with ExpertCache(store, slots=6) as cache:
        while not finished:
            with interrupt_after(interrupted, cache_module, rows_module, residents, growth):
                try:
                    cache.lookup_rows(0, rng.choice(EXPERTS, TOP_K, replace=False).tolist())
                    finished = True
                except KeyboardInterrupt:
                    interrupted += 1
            for _ in range(3):
                experts = rng.choice(EXPERTS, TOP_K, replace=False).tolist()
                assert np.array_equal(np.stack(cache.lookup(0, experts)), data[experts])
            for key in list(cache._residents.book):  # what counts as cached is looked at without reading it again
                assert np.array_equal(cache.arena[rows_of(cache)[key]], data[key])
    assert interrupted > 40, "every line of a lookup with misses and victims was tried"


def test_rows_name_the_same_blocks_as_views(store, data):
    with ExpertCache(store, slots=9, ring=8) as cache:
        rows = cache.lookup_rows(1, [4, 2, 9, 0])
        assert np.array_equal(cache.arena[rows], data[EXPERTS + np.array([4, 2, 9, 0])])
        for ids, rows in cache.stream_rows(1, range(20)):
            assert np.array_equal(cache.arena[rows], data[EXPERTS + np.array(ids)])


@pytest.mark.parametrize("too_little", [{"slots": TOP_K - 1}, {"budget_bytes": TOP_K * BLOCK - 1}])
def test_fewer_slots_than_top_k_are_refused(store, too_little):
    with pytest.raises(StoreError, match=f"{TOP_K} slots"):
        ExpertCache(store, **too_little)


def test_exactly_top_k_slots_give_right_blocks(store, data):
    """The tightest cache: every lookup evicts, none may evict what it has just read."""
    rng = np.random.default_rng(5)
    with ExpertCache(store, slots=TOP_K) as cache:
        for _ in range(200):
            experts = rng.choice(EXPERTS, TOP_K, replace=False).tolist()
            assert np.array_equal(np.stack(cache.lookup(0, experts)), data[experts])


@pytest.mark.parametrize("layer, experts", [(0, [EXPERTS]), (0, [-1]), (LAYERS, [0]), (-1, [0])])
def test_ids_out_of_range_are_refused_and_not_taken_for_another_layer(store, layer, experts):
    with ExpertCache(store, slots=TOP_K) as cache:
        with pytest.raises(StoreError, match="3 MoE layers of 40 experts"):
            cache.lookup(layer, experts)
        with pytest.raises(StoreError, match="3 MoE layers of 40 experts"):
            list(cache.stream(layer, experts))


def test_a_batch_that_does_not_fit_is_refused(store):
    with ExpertCache(store, slots=5) as cache:
        with pytest.raises(StoreError, match="6 experts does not fit a cache of 5"):
            cache.lookup(0, range(6))
        assert len(cache.lookup(0, [1, 1, 2, 2, 3, 3])) == 6


@pytest.mark.parametrize("wrong", [{}, {"slots": 5, "budget_bytes": 5 * BLOCK}, {"slots": 5, "ring": 0}])
def test_contradicting_sizes_are_refused(store, wrong):
    with pytest.raises(StoreError):
        ExpertCache(store, **wrong)


def test_closing_frees_memory_files_and_threads(store):
    def resident_bytes():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")

    store.block_bytes, store.n_layers, store.n_experts = 64 << 20, 1, TOP_K
    store.open_reader = lambda threads: types.SimpleNamespace(
        read_many=lambda jobs: [buffer.fill(1) for _, buffer in jobs], close=lambda: None
    )
    before = resident_bytes()
    cache = ExpertCache(store, slots=TOP_K)
    assert resident_bytes() - before < 64 << 20, "memory is taken when blocks come, not before"
    cache.lookup(0, [0, 1])
    assert resident_bytes() - before > 100 << 20
    cache.close()
    cache.close()
    assert resident_bytes() - before < 64 << 20
    with pytest.raises(StoreError, match="closed"):
        cache.lookup(0, [0])


def test_closing_leaves_no_descriptor_and_no_thread(store):
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(3):
        with ExpertCache(store, slots=TOP_K) as cache:
            cache.lookup(0, [0, 1, 2, 3])
            list(cache.stream(0, range(EXPERTS)))
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == (files, threads)


def test_a_lent_reader_is_left_open(store):
    reader = store.open_reader(threads=2)
    with ExpertCache(store, slots=TOP_K, reader=reader) as cache:
        cache.lookup(0, [0])
    with ExpertCache(store, slots=TOP_K, reader=reader) as cache:
        cache.lookup(0, [0])
    reader.close()


def test_an_impossible_arena_says_what_was_asked():
    with pytest.raises(StoreError, match="cannot reserve"):
        Arena(1 << 40, 1 << 20)
    with pytest.raises(StoreError, match="whole pages"):
        Arena(3, 5000)


@pytest.fixture
def shrinking_memory(monkeypatch):
    """Memory that has room for so many blocks, less by each one that is asked for; the answers given are counted."""

    def tell(*rooms: int) -> list:
        asked, answers = [], iter(rooms)

        def read_memory():
            asked.append(room := next(answers))
            return types.SimpleNamespace(
                room_bytes=room * BLOCK,
                available_bytes=(room + 1) * BLOCK,
                reserve_bytes=BLOCK,
                tightest=types.SimpleNamespace(name="cgroup /a memory.max"),
            )

        monkeypatch.setattr(growth, "read_memory", read_memory)
        monkeypatch.setattr(growth, "STEP_BYTES", 8 * BLOCK)
        return asked

    return tell


def test_a_growing_cache_asks_for_memory_in_steps_and_no_more_once_it_is_full(store, shrinking_memory):
    asked = shrinking_memory(100, 92, 84)
    with ExpertCache(store, slots=20) as cache:
        for first in (*range(0, 20, TOP_K), *range(0, 24, TOP_K)):
            cache.lookup(0, range(first, first + TOP_K))
        assert asked == [100, 92, 84] and cache.slots == 20, "8 + 8 + 4 blocks"


def test_where_memory_has_gone_meanwhile_the_cache_stays_as_it_is_and_says_so(store, data, shrinking_memory, capsys):
    shrinking_memory(100, 3)
    with ExpertCache(store, slots=20) as cache:
        lru = Cache(LAYERS * EXPERTS, 8, 1)
        for first in (0, 4, 8, 0, 12, 4):
            views = cache.lookup(0, range(first, first + TOP_K))
            lru.batch(list(range(first, first + TOP_K)))
            assert all(np.array_equal(view, data[first + place]) for place, view in enumerate(views))
        assert cache.slots == 8 and list(cache._residents.book) == list(lru)
        assert max(rows_of(cache).values()) < 8, "no row beyond what was found room for is touched"
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "stays at 8 of 20 blocks" in said and "limit: cgroup /a memory.max" in said


def test_without_any_memory_the_least_still_runs(store, data, shrinking_memory):
    shrinking_memory(0)
    with ExpertCache(store, slots=20) as cache:
        for first in range(0, 20, TOP_K):
            assert np.array_equal(cache.lookup(1, [first])[0], data[EXPERTS + first])
        assert cache.slots == TOP_K


def test_a_shrunken_cache_survives_a_failed_read(store, data, shrinking_memory, monkeypatch):
    shrinking_memory(100, 3)
    with ExpertCache(store, slots=20) as cache:
        for first in (0, 4, 8):
            cache.lookup(0, range(first, first + TOP_K))
        with monkeypatch.context() as patch:
            patch.setattr(cache.reader, "read_into", lambda block, buffer: (_ for _ in ()).throw(StoreError("gone")))
            with pytest.raises(StoreError):
                cache.lookup(0, [20, 21])
        for first in (0, 8, 16):
            for expert, view in enumerate(cache.lookup(0, range(first, first + TOP_K)), start=first):
                assert np.array_equal(view, data[expert])
        assert max(rows_of(cache).values()) < 8


def test_reads_not_yet_begun_when_their_reader_closes_still_come_to_an_end(store):
    gate, buffers = threading.Event(), [direct_io.aligned_buffer(BLOCK) for _ in range(2)]
    reader = store.open_reader(threads=1)
    read = reader.read_into
    reader.read_into = lambda block, buffer: (gate.wait(10), read(block, buffer))
    _, queued = (reader.start([(block, buffer)]) for block, buffer in enumerate(buffers))
    closer = threading.Thread(target=reader.close)
    closer.start()
    time.sleep(0.05)  # it now waits for the first read
    gate.set()
    closer.join(10)
    ender = threading.Thread(target=queued.cancel, daemon=True)
    ender.start()
    ender.join(10)
    assert not closer.is_alive() and not ender.is_alive(), "waiting for reads that were dropped would last for ever"


def test_closing_a_stream_ends_it_at_once_in_every_python(store):
    """Python 3.12.3 keeps the frame of a closed generator, and with it a generator inside that nobody closed."""
    with ExpertCache(store, slots=TOP_K, ring=8) as cache:
        ended, rows = [], cache.stream_rows

        def watched(*arguments):
            try:
                yield from rows(*arguments)
            finally:
                ended.append(True)

        cache.stream_rows = watched
        stream = cache.stream(0, range(24))
        next(stream)
        stream.close()
        assert ended == [True]
        cache.lookup(0, [1])
