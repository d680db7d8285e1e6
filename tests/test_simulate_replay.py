"""Replay: toy traces with known answers, what is counted where, and what is refused."""

import numpy as np
import pytest
from small_lookups import from_batches

from nemolab.errors import TraceError, UsageError
from nemolab.simulate.floor import lru_floor, warn_below_floor
from nemolab.simulate.lookups import from_routing
from nemolab.simulate.replay import POLICY_NAMES, replay
from nemolab.trace import DECODE, PREFILL

A, B, C, D = range(4)
KNOWN = [[key] for key in (A, B, C, A, B, D, A, B, C)]


def misses(lookups, policy, **settings):
    return replay(lookups, policy, **settings).row("all")["misses"]


@pytest.mark.parametrize("policy, expected", [("lru", 9), ("belady", 7), ("belady-bypass", 5)])
def test_the_known_trace_has_its_known_misses(policy, expected):
    lookups = from_batches(KNOWN)
    row = replay(lookups, policy, slots=2).row("all")
    assert row["misses"] == expected
    assert (row["compulsory"], row["capacity"]) == (4, expected - 4)


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_cache_without_end_misses_only_what_it_has_never_seen(policy):
    row = replay(from_batches(KNOWN), policy, slots=100).row("all")
    assert (row["misses"], row["compulsory"], row["capacity"]) == (4, 4, 0)


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_cache_of_nothing_misses_everything(policy):
    row = replay(from_batches(KNOWN), policy, slots=0).row("all")
    assert (row["hits"], row["misses"], row["hit_rate"], row["reads"]) == (0, 9, 0.0, 9)


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_where_all_are_distinct_nothing_hits(policy):
    lookups = from_batches([[key] for key in range(50)])
    assert misses(lookups, policy, slots=10) == 50


def test_a_cycle_just_too_long_never_hits_an_lru_and_the_optimum_keeps_all_but_one():
    lookups = from_batches([[key] for key in list(range(6)) * 20])
    assert misses(lookups, "lru", slots=5) == 120 and misses(lookups, "lru", slots=6) == 6
    assert misses(lookups, "belady-bypass", slots=5) == 6 + 19 * 1
    assert misses(lookups, "belady", slots=5) < 6 + 19 * 2


def test_one_slot_hits_only_a_repetition():
    lookups = from_batches([[A], [A], [B], [A], [A], [A]])
    assert misses(lookups, "lru", slots=1) == 3


def test_of_a_batch_larger_than_the_cache_the_optimum_keeps_what_comes_next():
    lookups = from_batches([[A, B, C], [A]])
    assert misses(lookups, "lru", slots=1) == 4, "its own oldest leave"
    assert misses(lookups, "belady", slots=1) == misses(lookups, "belady-bypass", slots=1) == 3


def test_duplicates_in_a_batch_are_one_lookup():
    row = replay(from_batches([[A, A, B, A], [A, B]]), "lru", slots=4).row("decode")
    assert (row["lookups"], row["misses"]) == (4, 2)


def test_two_block_sizes_share_one_budget_of_bytes():
    lookups = from_batches([[A], [B], [C], [A], [B]], size_bytes=[30, 10, 10])
    row = replay(lookups, "lru", budget_bytes=40).row("all")
    # A and B fill it, C pushes A out, A pushes B out (10 + 10 + 30 > 40), B pushes C out and stays beside A
    assert (row["misses"], row["bytes_read"], row["slots"], row["budget_bytes"]) == (5, 90, None, 40)
    assert misses(lookups, "lru", budget_bytes=50) == 3
    assert misses(lookups, "lru", slots=2) == 5, "slots count blocks, whatever their size"


def test_budgets_in_bytes_and_in_slots_agree_where_blocks_are_of_one_size():
    lookups = from_batches(np.random.default_rng(0).integers(0, 30, (200, 3)).tolist(), size_bytes=7)
    for slots in (0, 1, 5, 29):
        a, b = replay(lookups, slots=slots), replay(lookups, budget_bytes=slots * 7 + 6)
        assert np.array_equal(a.outcome, b.outcome) and a.slots == b.slots == slots
        assert a.row("all")["bytes_read"] == b.row("all")["bytes_read"]


def test_phases_are_counted_apart_and_together():
    lookups = from_batches([[A, B], [A], [C]], phase=[PREFILL, DECODE, DECODE], size_bytes=5)
    prefill, decode, both = replay(lookups, budget_bytes=100).rows()
    assert [row["phase"] for row in (prefill, decode, both)] == ["prefill", "decode", "all"]
    assert (prefill["lookups"], decode["lookups"], both["lookups"]) == (2, 2, 4)
    assert (prefill["misses"], decode["misses"], both["misses"]) == (2, 2, 4), "a prompt pass leaves nothing behind"
    assert both["compulsory"] == 4, "no cache of any size, filled by decode alone, would have had A"
    assert (decode["reads_per_token"], decode["bytes_per_token"]) == (1.0, 5.0)
    empty = replay(from_batches([[A]]), slots=1).row("prefill")
    assert (empty["lookups"], empty["hit_rate"], empty["reads_per_token"]) == (0, None, None)


def test_a_prompt_pass_that_warms_the_cache_is_a_switch():
    batches, phase = [[A, B], [A], [B]], [PREFILL, DECODE, DECODE]
    assert replay(from_batches(batches, phase=phase), slots=4).row("decode")["misses"] == 2
    assert replay(from_batches(batches, phase=phase, prefill_warms=True), slots=4).row("decode")["misses"] == 0


def test_cold_conversations_begin_with_compulsory_misses_only():
    lookups = from_batches([[A], [B], [A], [A], [B], [A]], conversation=[0, 0, 0, 7, 7, 7])
    carried, cold = replay(lookups, slots=9), replay(lookups, slots=9, cold=True)
    assert carried.missed.tolist() == [True, True, False, False, False, False]
    assert cold.missed.tolist() == [True, True, False] * 2
    assert (cold.row("all")["compulsory"], cold.row("all")["capacity"], cold.row("all")["cold"]) == (4, 0, True)
    assert np.array_equal(cold.outcome, replay(lookups, slots=9, cold=True).outcome), "a defined start"


@pytest.mark.parametrize("policy", ["belady", "static", "lfu"])
def test_a_cold_cache_knows_nothing_of_the_next_conversation(policy):
    rng = np.random.default_rng(4)
    first, second = rng.integers(0, 9, (60, 2)).tolist(), rng.integers(0, 9, (60, 2)).tolist()
    together = replay(from_batches(first + second, conversation=[0] * 60 + [1] * 60), policy, slots=4, cold=True)
    apart = [replay(from_batches(batches, n_keys=9), policy, slots=4).outcome for batches in (first, second)]
    assert np.array_equal(together.outcome, np.concatenate(apart))


def test_prefetch_counts_what_was_useful_wasted_and_late():
    #        batch   guessed for it
    steps = [([A], []), ([B], [B, C]), ([D], [C]), ([A], []), ([B], [A, C])]
    lookups = from_batches([batch for batch, _ in steps], guesses=[guess for _, guess in steps], size_bytes=10)
    result = replay(lookups, slots=3, prefetch=2, reads_in_time=1)
    # B and C are read ahead, B is used at once; D enters, A leaves; A enters, C leaves unused.
    assert result.missed.tolist() == [True, False, True, True, True]
    assert result.issued.tolist() == [0, 2, 0, 0, 1] and result.wasted.tolist() == [0, 0, 0, 1, 0]
    row = result.row("all")
    assert (row["prefetch_issued"], row["prefetch_useful"], row["prefetch_wasted"], row["prefetch_late"]) == (
        3,
        1,
        1,
        0,
    )
    assert (row["reads"], row["bytes_read"]) == (7, 70)
    none_in_time = replay(lookups, slots=3, prefetch=2, reads_in_time=0).row("all")
    assert (none_in_time["prefetch_late"], none_in_time["misses"]) == (1, 4), "late is still a hit"


def test_prefetch_sums_hold_and_a_perfect_guess_leaves_only_first_layers_to_miss():
    rng = np.random.default_rng(1)
    experts = np.stack([np.stack([rng.permutation(16)[:3] for _ in range(4)]) for _ in range(60)])
    guesses = experts.copy()
    guesses[:, 0] = -1
    lookups = from_routing(experts, n_experts=16, guesses=guesses, layer_bytes=100)
    result = replay(lookups, slots=9, prefetch=3)
    row = result.row("decode")
    assert set(lookups.layer[result.misses_by_batch() > 0]) == {0}
    assert row["prefetch_wasted"] == 0 and row["prefetch_useful"] == row["prefetch_issued"] > 300
    assert row["reads"] == row["misses"] + row["prefetch_issued"] and row["bytes_read"] == 100 * row["reads"]
    assert row["prefetch_late"] is None
    assert replay(lookups, slots=9, prefetch=3, reads_in_time=0).row("all")["prefetch_late"] == row["prefetch_useful"]
    in_time = [replay(lookups, slots=9, prefetch=3, reads_in_time=n).row("all")["prefetch_late"] for n in range(4)]
    assert in_time == sorted(in_time, reverse=True) and in_time[-1] == 0
    assert row["hits"] + row["misses"] == row["lookups"] == 60 * 4 * 3


def test_wrong_guesses_are_all_wasted_and_cost_reads_not_answers():
    experts = np.tile(np.arange(3), (50, 4, 1))
    guesses = np.tile(np.array([9, 8]), (50, 4, 1))
    guesses[:, 0] = -1
    lookups = from_routing(experts, n_experts=16, guesses=guesses)
    plain = replay(lookups, slots=12).row("all")
    wrong = replay(lookups, slots=12, prefetch=2, cold=True).row("all")
    assert wrong["prefetch_useful"] == 0 and wrong["prefetch_wasted"] == wrong["prefetch_issued"] > 0
    assert wrong["misses"] >= plain["misses"] and wrong["reads"] > plain["reads"]


def test_prefetch_uses_only_what_the_running_batch_leaves():
    experts = np.random.default_rng(2).permuted(np.tile(np.arange(8), (40, 3, 1)), axis=2)[:, :, :4]
    guesses = experts.copy()
    guesses[:, 0] = -1
    lookups = from_routing(experts, n_experts=8, guesses=guesses)
    assert replay(lookups, slots=4, prefetch=4).issued.sum() == 0
    assert replay(lookups, slots=5, prefetch=4).issued.max() == 1


def test_an_lru_of_its_own_for_each_layer_is_that_lru_on_that_layer():
    rng = np.random.default_rng(5)
    experts = rng.permuted(np.tile(np.arange(12), (80, 3, 1)), axis=2)[:, :, :2]
    lookups = from_routing(experts, n_experts=12, layer_bytes=[10, 10, 20])
    result = replay(lookups, "lru-per-layer", budget_bytes=190)
    expected = sum(
        misses(lookups.take(np.flatnonzero(lookups.layer == layer))[0], "lru", budget_bytes=63) for layer in range(3)
    )
    assert result.row("all")["misses"] == expected
    assert result.misses_by_batch()[0] == 2


def test_per_layer_prefetch_may_take_the_place_of_the_last_token_s_experts():
    experts = np.array([[[0], [0]], [[1], [1]], [[2], [2]]])
    lookups = from_routing(experts, n_experts=4, guesses=experts)
    assert replay(lookups, "lru-per-layer", slots=2, prefetch=1).missed.sum() == 0


def test_misses_by_batch_add_up():
    rng = np.random.default_rng(6)
    result = replay(from_routing(rng.integers(0, 8, (30, 3, 2)), n_experts=8), slots=10)
    counts = result.misses_by_batch()
    assert len(counts) == 30 * 3 and counts.sum() == result.missed.sum() == result.row("all")["misses"]


def test_a_prompt_pass_is_one_batch_a_layer_and_later_tokens_are_the_more_recent():
    experts = np.array([[[1, 2]], [[2, 3]], [[1, 4]], [[5, 6]]])
    lookups = from_routing(experts, n_experts=8, phase=[0, 0, 0, 1], prefill_warms=True)
    assert lookups.keys.tolist() == [2, 3, 1, 4, 5, 6] and lookups.starts.tolist() == [0, 4, 6]
    assert lookups.tokens.tolist() == [3, 1] and lookups.count_tokens(PREFILL) == 3


def test_tokens_of_a_step_given_as_such_pass_together():
    lookups = from_routing(np.array([[[1]], [[2]], [[3]]]), n_experts=8, step=[0, 4, 4])
    assert lookups.starts.tolist() == [0, 1, 3] and lookups.step.tolist() == [0, 4]


def test_a_layer_that_saw_no_token_has_no_batch():
    experts = np.full((3, 2, 2), -1)
    experts[:, 0] = [[0, 1], [1, 2], [2, 3]]
    experts[2, 1] = [4, 5]
    lookups = from_routing(experts, n_experts=8, phase=[0, 0, 1])
    assert lookups.layer.tolist() == [0, 0, 1] and lookups.keys.tolist() == [0, 1, 2, 2, 3, 12, 13]
    assert lookups.count_tokens() == 3


def test_an_empty_trace_has_nothing_to_miss():
    lookups = from_batches([], n_keys=4)
    row = replay(lookups, slots=2).row("all")
    assert (row["lookups"], row["hit_rate"], row["tokens"]) == (0, None, 0)


def test_the_floor_is_where_nothing_hits_yet():
    experts = np.tile(np.arange(3), (20, 5, 1))
    lookups = from_routing(experts, n_experts=8, layer_bytes=10)
    slots, size_bytes = lru_floor(lookups)
    assert (slots, size_bytes) == (4 * 3, 120)
    assert replay(lookups, slots=slots).row("all")["hits"] == 0
    assert replay(lookups, slots=slots + 3).row("all")["hits"] == 19 * 5 * 3
    assert "12 blocks are less than one token's cycle" in warn_below_floor(lookups, slots=12)
    assert "120 bytes" in warn_below_floor(lookups, budget_bytes=119)
    assert warn_below_floor(lookups, slots=13) is None and warn_below_floor(lookups, budget_bytes=121) is None


@pytest.mark.parametrize(
    "wrong, message",
    [
        (dict(policy="mru", slots=2), "unknown policy 'mru'; known are lru,"),
        (dict(), "either budget_bytes or slots"),
        (dict(slots=1, budget_bytes=1), "either budget_bytes or slots"),
        (dict(slots=-1), "a budget of -1"),
        (dict(slots=1, prefetch=-2), "prefetch -2"),
    ],
)
def test_contradicting_settings_are_refused(wrong, message):
    with pytest.raises(UsageError, match=message):
        replay(from_batches(KNOWN), **wrong)


def test_what_the_trace_cannot_answer_is_refused():
    with pytest.raises(TraceError, match="how large its blocks are"):
        replay(from_batches(KNOWN, size_bytes=None), budget_bytes=5)
    with pytest.raises(TraceError, match="holds no guesses"):
        replay(from_batches(KNOWN), slots=2, prefetch=1)
    assert replay(from_batches(KNOWN, size_bytes=None), slots=2).row("all")["bytes_read"] is None


@pytest.mark.parametrize(
    "wrong, message",
    [
        (dict(experts=np.zeros((2, 3), int)), r"shape \(2, 3\)"),
        (dict(experts=np.zeros((2, 3, 1))), "float64"),
        (dict(experts=np.full((2, 1, 1), 8)), "experts holds 8; ids from 0 to 7, or -1 for none, were expected"),
        (dict(experts=np.full((2, 1, 1), -2)), "experts holds -2;"),
        (dict(phase=[0, 1, 1]), r"phase of shape \(3,\)"),
        (dict(phase=[0, 2]), "phase holds 0 to 2; phases 0"),
        (dict(step=[1, 0]), "step falls from 1 to 0 at token 1"),
        (dict(step=[1, 1], phase=[0, 1]), "step 1 mixes phases"),
        (dict(layer_bytes=[1, 2]), r"shape \(2,\)"),
        (dict(layer_bytes=0), "above 0"),
        (dict(guesses=np.zeros((2, 2, 1), int)), r"guesses of shape \(2, 2, 1\)"),
        (dict(guesses=np.full((2, 1, 1), 9)), "guesses holds 9"),
    ],
)
def test_a_routing_that_cannot_be_is_refused(wrong, message):
    with pytest.raises(TraceError, match=message):
        from_routing(**{"experts": np.zeros((2, 1, 1), int), "n_experts": 8} | wrong)
