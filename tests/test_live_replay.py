"""Live equals replay, to the last block: what the engine's cache did, and what the same cache does with its trace."""

import json
import time

import numpy as np
import pytest
import torch
from blocks import ONLINE, poison
from faults import run_cli
from live import COUNTS, count_batches, watch
from stores import quiet
from synthetic import one_thread, write_checkpoint

from nemolab.engine import Engine
from nemolab.engine import engine as engine_module
from nemolab.engine.guesser import Guesser
from nemolab.errors import EngineError, StoreError, TraceError
from nemolab.simulate import check_live, from_trace
from nemolab.store import Store, repack

# Two MoE layers side by side, twelve experts of an odd size in groups, no latent projection.
ODD = {
    "pattern": "EME*EE", "experts": 12, "top_k": 3, "latent": None, "hidden": 80, "inter": 48, "shared_inter": 32,
    "config_extra": {"n_group": 3, "topk_group": 2},
}  # fmt: skip
PREFETCHED = ("prefetch_useful", "prefetch_wasted")
REACHABLE = 8  # experts in the best two groups


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    folder = tmp_path_factory.mktemp("odd")
    repack(write_checkpoint(folder / "model", **ODD), folder / "store", announce=quiet)
    return Store.open(folder / "store")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, tiny_path):
    folder = tmp_path_factory.mktemp("tiny") / "store"
    repack(tiny_path, folder, announce=quiet)
    return Store.open(folder)


def hold_conversations(engine, tokens=6, cold=False):
    """Three of them, the second with a second turn, with prompts of several lengths (one of a single token)."""
    ids = torch.randint(3, engine.config.vocab_size, (60,), generator=torch.Generator().manual_seed(3)).tolist()
    logits = []
    for prompts in ([ids[:9]], [ids[9:10], ids[10:22]], [ids[22:60]]):
        if cold:
            engine.empty_cache()
        state = engine.new_state()
        for prompt in prompts:
            logits.append(engine.last_logits(prompt, state))
            for _ in range(tokens):
                logits.append(engine.step(int(logits[-1].argmax()), state))
    return torch.stack(logits)


def run(store, slots, prefetch=0, policy="lru", cold=False, **arguments):
    """(logits, trace, COUNTS by batch, stats) of the conversations."""
    with Engine(None, store=store, ram_cache_slots=slots, prefetch=prefetch, policy=policy, **arguments) as engine:
        batches = watch(engine._cache)
        with engine.record() as recorder:
            logits = hold_conversations(engine, cold=cold)
        trace = recorder.trace()
        if cold:
            engine.empty_cache()  # what is left unused is wasted, as at the end of a cold replay
        return logits, trace, np.array(batches), engine.stats()


def assert_equal_to_replay(trace, live, stats, slots, prefetch, policy, cold=False):
    lookups = from_trace(trace)
    replayed = count_batches(lookups, policy, slots=slots, prefetch=prefetch, cold=cold)
    in_bytes = {"budget_bytes": slots * lookups.block_bytes + 1000, "prefetch": prefetch, "cold": cold}
    assert np.array_equal(replayed, count_batches(lookups, policy, **in_bytes)), "however the budget is spelled"
    unlike = COUNTS[:4] if cold else COUNTS  # a cold cache's last waste is counted at once, not at its next batch
    places = [COUNTS.index(name) for name in unlike]
    assert np.array_equal(live[:, places], replayed[:, places])
    hits, misses, issued, useful, wasted = replayed.sum(axis=0).tolist()
    both = {name: sum(counts[name] for counts in stats.values()) for name in stats["decode"]}
    assert (both["hits"], both["misses"], both["lookups"]) == (hits, misses, hits + misses)
    assert (both["prefetch_issued"], both["prefetch_useful"], both["prefetch_wasted"]) == (issued, useful, wasted)
    assert both["reads"] == misses + issued and both["bytes_read"] == both["reads"] * lookups.block_bytes
    assert cold or check_live(trace).equal


@pytest.fixture(scope="module")
def plain(odd, tiny):
    """The logits of each model when everything stays in the cache and nothing is read ahead."""
    run_all = one_thread(lambda store: run(store, store.n_layers * store.n_experts)[0])
    return {store.path: run_all(store) for store in (odd, tiny)}


@pytest.mark.parametrize("prefetch", [0, 1, 4, REACHABLE])
@pytest.mark.parametrize("slots", [3, 4, 17, 48])
@one_thread
def test_live_equals_replay_on_an_odd_checkpoint_at_every_budget_and_depth(odd, plain, slots, prefetch):
    logits, trace, live, stats = run(odd, slots, prefetch)
    assert torch.equal(logits, plain[odd.path]), "no bit of an answer depends on the cache"
    assert_equal_to_replay(trace, live, stats, slots, prefetch, "lru")
    assert (stats["decode"]["prefetch_issued"] > 0) == (prefetch > 0 and slots > 3)


@pytest.mark.parametrize("name", ONLINE)
@one_thread
def test_live_equals_replay_under_every_policy(odd, plain, name):
    logits, trace, live, stats = run(odd, 15, 4, name)
    assert torch.equal(logits, plain[odd.path])
    assert_equal_to_replay(trace, live, stats, 15, 4, name)
    assert stats["decode"]["prefetch_wasted"] > 0


@pytest.mark.parametrize("slots, prefetch, name", [(6, 4, "lru"), (61, 0, "lru"), (61, 8, "lru"), (40, 4, "arc")])
@one_thread
def test_live_equals_replay_on_the_shipped_model(tiny, plain, slots, prefetch, name):
    logits, trace, live, stats = run(tiny, slots, prefetch, name)
    assert torch.equal(logits, plain[tiny.path])
    assert_equal_to_replay(trace, live, stats, slots, prefetch, name)


@one_thread
def test_a_trace_taken_without_prefetch_foretells_what_a_prefetching_engine_does(odd):
    _, trace, _, _ = run(odd, 48)
    foretold = count_batches(from_trace(trace), "lru", slots=11, prefetch=5)
    assert np.array_equal(run(odd, 11, 5)[2], foretold)


@one_thread
def test_conversations_begun_cold_equal_a_cold_replay(odd):
    _, trace, live, stats = run(odd, 15, 4, cold=True)
    assert_equal_to_replay(trace, live, stats, 15, 4, "lru", cold=True)
    again = run(odd, 15, 4, cold=True)[2]
    assert np.array_equal(live, again), "a cold start is a defined one"


@one_thread
def test_live_equals_replay_can_fail(odd):
    """One slot more, one guess less or another policy is another cache, and is told apart."""
    _, trace, live, _ = run(odd, 15, 4)
    lookups = from_trace(trace)
    for other in ({"slots": 16}, {"prefetch": 3}, {"policy": "lfu"}, {"cold": True}):
        settings = {"policy": "lru", "slots": 15, "prefetch": 4} | other
        assert not np.array_equal(live, count_batches(lookups, settings.pop("policy"), **settings))


@one_thread
def test_a_prompt_longer_than_a_pass_is_several_steps(odd, monkeypatch):
    monkeypatch.setattr(engine_module, "PASS_TOKENS", 10)
    _, trace, live, stats = run(odd, 15, 4)
    assert_equal_to_replay(trace, live, stats, 15, 4, "lru")
    prompts = trace.select(phase="prefill")
    assert np.unique(prompts.step, return_counts=True)[1].tolist() == [9, 1, 10, 2, 10, 10, 10, 8]


@one_thread
def test_a_prompt_pass_reads_each_expert_it_needs_once_and_records_that(odd):
    with Engine(None, store=odd, ram_cache_slots=3) as engine, engine.record() as recorder:
        engine.last_logits([5 + 3 * i for i in range(64)], engine.new_state())
        trace = recorder.trace()
    distinct = [len(np.unique(trace.experts[:, layer])) for layer in range(trace.n_layers)]
    assert trace.live_misses[-1].tolist() == distinct and (trace.live_misses[:-1] == -1).all()


@one_thread
def test_active_neurons_of_a_prompt_are_those_of_the_same_tokens_in_decode(odd):
    ids = [5 + 3 * i for i in range(20)]
    with Engine(None, store=odd) as engine:
        with engine.record() as recorder:
            engine.last_logits(ids, engine.new_state())
            state = engine.new_state()
            for token in ids:
                engine.step(token, state)
        trace = recorder.trace()
    prompt, decode = trace.select(phase=0), trace.select(phase=1)
    assert np.array_equal(prompt.experts, decode.experts) and np.array_equal(prompt.guesses, decode.guesses)
    for name in ("active_neurons", "active_groups"):
        found, wanted = getattr(prompt, name), getattr(decode, name)
        assert wanted.max() > 1 and np.mean(found == wanted) > 0.99, "but for a sum that rounds to zero on one side"


@one_thread
def test_with_wrong_guesses_alone_answers_stay_and_everything_read_ahead_is_wasted(tiny, monkeypatch):
    def answer(engine):
        state = engine.new_state()
        logits = [engine.last_logits([5, 6], state)]
        return torch.stack(logits + [engine.step(token, state) for token in (7, 8, 9, 10)])

    with Engine(None, store=tiny, ram_cache_slots=12) as engine, engine.record() as recorder:
        wanted = answer(engine)
    chosen = recorder.trace().experts
    unused = [np.setdiff1d(np.arange(tiny.n_experts), chosen[:, layer]) for layer in range(tiny.n_layers)]
    assert min(len(ids) for ids in unused) >= 4, "experts that no token chose"
    monkeypatch.setattr(Guesser, "guess", lambda self, h: self.wrong)
    with Engine(None, store=tiny, ram_cache_slots=12, prefetch=4) as engine:
        for layer, ids in zip(engine._model.moe_layers, unused[1:], strict=False):
            layer.guesser.wrong = ids[:4]
        assert torch.equal(answer(engine), wanted)
        engine.empty_cache()
        counts = engine.stats()["decode"]
    assert counts["prefetch_issued"] == counts["prefetch_wasted"] > 50 and counts["prefetch_useful"] == 0


@one_thread
def test_a_slow_disk_and_poisoned_rows_change_no_bit(odd, plain):
    """The tightest caches, reads that take their time, and 0x7F in every row that is free."""
    for slots, prefetch in ((3, 4), (4, 4), (9, REACHABLE)):
        with Engine(None, store=odd, ram_cache_slots=slots, prefetch=prefetch, reader_threads=3) as engine:
            cache = engine._cache
            read = cache.reader.read_into
            poison(cache)

            def read_slowly(block, buffer, read=read):
                time.sleep(0.0005 * (block % 4))
                read(block, buffer)

            cache.reader.read_into = read_slowly
            assert torch.equal(hold_conversations(engine), plain[odd.path])
            late = engine.stats()["decode"]["prefetch_late"]
        assert slots == 3 or late > 0


@one_thread
def test_a_step_that_fails_leaves_the_trace_whole_and_the_next_conversation_right(odd, plain):
    with Engine(None, store=odd, ram_cache_slots=15, prefetch=4) as engine, engine.record() as recorder:
        state = engine.new_state()
        engine.last_logits([5, 6, 7], state)
        read, left = engine._cache.reader.read_into, [6]

        def fail_soon(block, buffer):
            left[0] -= 1
            if left[0] < 0:
                raise StoreError("the disk said no")
            read(block, buffer)

        engine._cache.reader.read_into = fail_soon
        with pytest.raises(StoreError, match="the disk said no"):
            for token in range(8, 40):
                engine.step(token, state)
        steps = state.tokens - 3
        engine._cache.reader.read_into = read
        logits = hold_conversations(engine)
    trace = recorder.trace()
    assert torch.equal(logits, plain[odd.path])
    assert (trace.conversation == 0).sum() == 3 + steps, "the half-made step left nothing"
    assert trace.meta.taken["cache"]["failed_steps"] == 1, "and is told: its lookups moved the cache all the same"
    with pytest.raises(TraceError, match="failed_steps is 1"):
        check_live(trace)


@one_thread
def test_a_trace_says_which_cache_it_was_taken_with(odd):
    cache = run(odd, 15, 4, "lfu")[1].meta.taken["cache"]
    assert cache == {
        "policy": "lfu", "slots": 15, "budget_bytes": 15 * odd.block_bytes, "prefetch": 4, "start": "empty",
        "slots_at_end": 15, "failed_steps": 0,
    }  # fmt: skip
    with Engine(None, store=odd, ram_cache_slots=15) as engine:
        hold_conversations(engine)
        with engine.record(cold=False) as recorder:
            hold_conversations(engine)
        warm = recorder.trace()
        assert warm.meta.taken["cache"]["start"] == "as it was"
        with pytest.raises(TraceError, match="start is 'as it was'"):
            check_live(warm)
        with engine.record() as recorder:
            hold_conversations(engine)
            engine._cache._residents.slots = 14
        with pytest.raises(TraceError, match="slots is 15, slots_at_end 14"):
            check_live(recorder.trace())


@pytest.mark.parametrize("ram_cache, prefetch, name", [("13slots", 4, "lru"), ("70KiB", 8, "slru")])
@one_thread
def test_the_commands_say_the_same_of_the_engine_and_of_the_replay(odd, tmp_path, ram_cache, prefetch, name):
    for number, text in enumerate(("The first of two short texts.", "Another one, fed after it.")):
        (tmp_path / f"{number}.txt").write_text(text)
    trace, depth = tmp_path / "taken.safetensors", ("--prefetch", prefetch, "--policy", name)
    texts = ("trace", "--store", odd.path, "--texts", tmp_path, "--to", trace)
    code, out, err = run_cli(*texts, "--ram-cache", ram_cache, *depth, "--json")
    assert code == 0, err
    live = json.loads(out)["stats"]
    code, out, err = run_cli("simulate", trace, "--budget", ram_cache, *depth, "--check", "--json")
    assert code == 0, err
    replayed = json.loads(out)
    assert replayed["live"]["equal"] and len(replayed["rows"]) == 3
    for row in replayed["rows"]:
        both = (row.keys() & live[row["phase"]].keys()) - {"prefetch_late"}  # only the engine knows the clock
        assert both >= {"lookups", "hits", "misses", "hit_rate", "reads_per_token", "bytes_per_token", *PREFETCHED}
        assert {key: row[key] for key in both} == {key: live[row["phase"]][key] for key in both}
    assert live["decode"]["prefetch_useful"] > 0 < live["decode"]["misses"]


@pytest.mark.parametrize("prefetch", [-1, REACHABLE + 1, True, 1.5])
def test_a_prefetch_of_more_than_can_be_chosen_is_refused(odd, prefetch):
    with pytest.raises(EngineError, match=f"prefetch is {prefetch!r}; a whole number from 0 to {REACHABLE}"):
        Engine(None, store=odd, ram_cache_slots=9, prefetch=prefetch)


def test_a_policy_that_no_engine_can_run_is_refused(odd):
    with pytest.raises(StoreError, match="belady must know all lookups in advance"):
        Engine(None, store=odd, ram_cache_slots=9, policy="belady")


def test_one_recording_at_a_time(odd):
    with Engine(None, store=odd, ram_cache_slots=9) as engine, engine.record():
        with pytest.raises(EngineError, match="recorded already"), engine.record():
            pass
