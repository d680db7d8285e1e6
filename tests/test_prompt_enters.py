"""What a prompt reads, put into the cache: the misses of a replay in which prompts warm it, and sound throughout."""

import numpy as np
import pytest
import torch
from blocks import BLOCK, EXPERTS, LAYERS, TOP_K, Gate, interrupt_after, poison, rows_of
from live import COUNTS, count_batches
from stores import quiet
from synthetic import one_thread, write_checkpoint
from test_cache_fetch import Table
from test_prefetch import check_books, failing_reads_of, in_thread, wait_until
from test_prefetch_limits import tell_room

from nemolab.engine import Engine, Trials
from nemolab.errors import StoreError
from nemolab.policy import rows as rows_module
from nemolab.simulate import check_live
from nemolab.simulate.lookups import from_routing
from nemolab.store import Store, growth, prompt_ring, repack, residents
from nemolab.store import cache as cache_module
from nemolab.store import read_ahead as read_ahead_module
from nemolab.store.cache import ExpertCache

pytest_plugins = ["block_fixtures"]


def stream_all(cache, data, layer, experts, lookups=None):
    """The ids that came, each with its own block, as long as its batch is in use."""
    came = []
    for batch in cache.stream(layer, experts, lookups=lookups):
        for expert, view in batch:
            assert np.array_equal(view, data[layer * EXPERTS + expert])
            came.append(expert)
    return came


def test_what_a_prompt_read_is_a_hit_afterwards_and_what_it_used_is_refreshed(store, data):
    with ExpertCache(store, slots=12, ring=4, prompt_enters=True) as cache:
        cache.lookup(0, [0, 1, 2, 3])
        assert stream_all(cache, data, 0, range(2, 12)) == list(range(2, 12)) and cache.missed == 8
        cache.lookup(1, [0, 1, 2, 3])
        assert cache.missed == 4
        cache.lookup(0, [4, 9, 10, 11])
        assert cache.missed == 0, "0 and 1 of the first lookup, then 2 and 3 of the prompt were the oldest"
        assert cache.stats()["prefill"]["reads"] == 8 and cache.restarts == 0
        check_books(cache, data)


def test_by_default_nothing_enters(store, data):
    with ExpertCache(store, slots=12, ring=4) as cache:
        stream_all(cache, data, 0, range(8))
        assert not rows_of(cache)


def test_recency_is_that_of_the_tokens_lookups_however_the_experts_are_streamed(store, data):
    with ExpertCache(store, slots=4, prompt_enters=True) as cache:
        assert stream_all(cache, data, 0, [1, 2, 3, 4], lookups=np.array([[4, 1], [2, 1], [3, 4]])) == [1, 2, 3, 4]
        assert list(cache._residents.book) == [2, 1, 3, 4]


@pytest.mark.parametrize("name", ["lru", "lfu", "arc"])
@pytest.mark.parametrize("slots, ring", [(TOP_K, 3), (17, 4), (60, 32)])
def test_misses_are_those_of_a_replay_in_which_prompts_warm_the_cache(store, data, slots, ring, name):
    """Prompts of any length, also such as need more experts of a layer than the cache holds."""
    rng = np.random.default_rng(8)
    lengths = [int(rng.integers(2, 20)) if prompt else 1 for prompt in rng.random(40) < 0.3]
    step = np.repeat(np.arange(len(lengths)), lengths)
    phase = np.repeat([int(length == 1) for length in lengths], lengths)
    experts = np.stack([rng.choice(EXPERTS, (LAYERS, TOP_K), replace=True) for _ in step]) // 2
    lookups = from_routing(experts, n_experts=EXPERTS, phase=phase, step=step, prefill_warms=True)
    with ExpertCache(store, slots=slots, ring=ring, policy=name, prompt_enters=True) as cache:
        poison(cache)
        table, live = Table(cache), []
        for number in range(len(lengths)):
            of_step = experts[step == number]
            for layer in range(LAYERS):
                if len(of_step) == 1:
                    views = cache.lookup(layer, of_step[0, layer])
                    assert np.array_equal(np.stack(views), data[layer * EXPERTS + of_step[0, layer]])
                else:
                    needed = np.unique(of_step[:, layer])
                    assert stream_all(cache, data, layer, needed, of_step[:, layer]) == needed.tolist()
                live.append(cache.missed)
            table.check(data)
        replayed = count_batches(lookups, name, slots=slots)
        assert np.array_equal(live, replayed[:, COUNTS.index("misses")])
        counts = cache.stats()["prefill"]
        assert counts["misses"] > 0 and (counts["hits"] > 0) == (slots > TOP_K) and cache.restarts == 0
        check_books(cache, data)
    passed_by = count_batches(from_routing(experts, n_experts=EXPERTS, phase=phase, step=step), name, slots=slots)
    assert not np.array_equal(live, passed_by[:, COUNTS.index("misses")]), "and not those of one that they pass by"


def test_hits_that_leave_for_a_prompt_larger_than_the_cache_are_read_again_and_counted(store, data):
    with ExpertCache(store, slots=TOP_K, ring=3, prompt_enters=True) as cache:
        poison(cache)
        cache.lookup(0, [5, 6])
        cache.prefetch(0, [7])
        assert stream_all(cache, data, 0, range(5, 15)) == list(range(5, 15))
        counts = cache.stats()["prefill"]
        assert (counts["hits"], counts["misses"], counts["prefetch_useful"]) == (3, 7, 1)
        assert counts["reads"] == 10 and counts["bytes_read"] == 10 * BLOCK, "5, 6 and 7 were there, and had to go"
        assert list(cache._residents.book) == [11, 12, 13, 14]
        check_books(cache, data)


def test_a_block_that_leaves_for_a_prompt_while_it_is_read_ahead_is_waited_for_before_its_row_is_used(store, data):
    with ExpertCache(store, slots=TOP_K, ring=3, prompt_enters=True) as cache:
        table, gate = Table(cache), Gate(cache, held=[7])
        cache.prefetch(0, [7])
        wait_until(lambda: gate.begun, "its read begins")
        thread, got = in_thread(lambda: stream_all(cache, data, 0, range(7, 15)))
        thread.join(0.1)
        assert thread.is_alive() and gate.begun == [7]
        gate.let_through()
        thread.join(20)
        assert got == [list(range(7, 15))] and gate.begun.count(7) == 2, "and read again, since it had to go"
        table.check(data)
        counts = cache.stats()["prefill"]
        assert (counts["prefetch_useful"], counts["prefetch_late"], counts["prefetch_wasted"]) == (1, 1, 0)


@pytest.mark.parametrize("how", ["left early", "a read fails"])
def test_a_prompt_not_read_to_its_end_leaves_only_what_was_whole_before(store, data, how):
    with ExpertCache(store, slots=20, ring=4, prompt_enters=True) as cache:
        cache.lookup(1, [0, 1])
        table = Table(cache)
        if how == "left early":
            stream = cache.stream(0, range(12))
            next(stream)
            stream.close()
        else:
            with failing_reads_of(9), pytest.raises(StoreError, match=f"offset {9 * BLOCK}"):
                list(cache.stream(0, range(12)))
        assert set(rows_of(cache)) == {EXPERTS, EXPERTS + 1} and cache.restarts == 1
        table.check(data)
        stream_all(cache, data, 0, range(12))
        table.check(data)
        check_books(cache, data)


def test_a_prompt_left_at_its_last_batch_is_whole(store, data):
    with ExpertCache(store, slots=20, ring=4, prompt_enters=True) as cache:
        stream = cache.stream(0, range(8))
        next(stream), next(stream)
        stream.close()
        assert set(rows_of(cache)) == set(range(8)) and cache.restarts == 0
        check_books(cache, data)


def test_a_prompt_enters_no_further_than_there_is_memory(store, data, monkeypatch, capsys):
    tell_room(monkeypatch, 100, 100, 3)
    with ExpertCache(store, slots=20, ring=4, prompt_enters=True) as cache:
        assert stream_all(cache, data, 0, range(15)) == list(range(15))
        assert cache.slots == 8 and list(cache._residents.book) == list(range(7, 15))
        assert max(rows_of(cache).values()) < 8
    assert "stays at 8 of 20 blocks" in capsys.readouterr().err


def test_an_interrupt_at_any_line_of_a_prompt_that_enters_leaves_a_sound_cache(store, data):
    rng, interrupted, finished = np.random.default_rng(6), 0, False
    modules = (cache_module, rows_module, residents, growth, read_ahead_module, prompt_ring)
    with ExpertCache(store, slots=9, ring=4, prompt_enters=True) as cache:
        table = Table(cache)
        while not finished:
            cache.prefetch(0, rng.choice(EXPERTS, 3, replace=False).tolist())
            experts = rng.choice(EXPERTS, int(rng.integers(5, 14)), replace=False).tolist()
            with interrupt_after(interrupted, *modules):
                try:
                    for ids, rows in cache.stream_rows(0, experts):
                        assert np.array_equal(cache.arena[rows], data[ids])
                    finished = True
                except KeyboardInterrupt:
                    interrupted += 1
            cache.lookup(1, [0, 1])
            table.check(data)
            check_books(cache, data, counted=False)
    assert interrupted > 100, "every line was tried"


@pytest.mark.parametrize("device", ["cpu", "twin"])
@one_thread
def test_an_engine_whose_prompts_enter_equals_a_replay_in_which_they_warm_the_cache(tmp_path, device):
    model = write_checkpoint(tmp_path / "model", pattern="EME*EE", experts=12, top_k=3)
    repack(model, tmp_path / "store", announce=quiet)
    ids = torch.randint(3, 90, (40,), generator=torch.Generator().manual_seed(3)).tolist()

    def answer(**arguments):
        store = Store.open(tmp_path / "store")
        with Engine(None, store=store, device=device, ram_cache_slots=15, **arguments) as engine:
            logits = []
            with engine.record() as recorder:
                for prompt in (ids[:12], ids[12:]):
                    state = engine.new_state()
                    logits.append(engine.last_logits(prompt, state))
                    logits += [engine.step(token, state) for token in (5, 6, 7, 8)]
            return torch.stack(logits), recorder.trace()

    logits, trace = answer(prefetch=2, trials=Trials(prompt_enters=True))
    checked = check_live(trace)
    assert trace.meta.prefill_warms and checked.equal and checked.compared == len(checked.live)
    aside, other = answer(prefetch=2)
    assert torch.equal(logits, aside) and check_live(other).equal
    assert not np.array_equal(trace.live_misses, other.live_misses)
