"""Synthetic routing has the statistics it promises and says what it is; real routing is told from independent draws."""

import dataclasses

import numpy as np
import pytest

from nemolab.errors import UsageError
from nemolab.simulate import from_trace, measures, replay
from nemolab.simulate.independence import looks_independent, measure_independence
from nemolab.trace import read_trace, write_trace
from nemolab.trace.synthetic import iid_trace, sticky_trace


def hit_rate(trace, policy, slots):
    return replay(from_trace(trace), policy, slots=slots).row("decode")["hit_rate"]


@pytest.fixture(scope="module")
def even():
    return iid_trace(1500, 4, 32, 4, seed=1)


def test_independent_draws_hit_what_they_hold_under_every_policy(even):
    """64 of 128 blocks: a half. Belady's, which knows the future, and an LRU below its floor do otherwise."""
    for policy in ("lru", "lfu", "random", "s3fifo", "sieve", "slru", "arc", "static"):
        assert abs(hit_rate(even, policy, 64) - 0.5) < 0.04, policy
    assert hit_rate(even, "belady", 64) > 0.6
    assert hit_rate(even, "lru", 3 * 4) == 0


def test_independent_draws_choose_all_alike_and_none_twice(even):
    counts = measures.count_usage(even.experts, 32)
    assert abs(counts - 1500 * 4 / 32).max() < 5 * np.sqrt(1500 * 4 / 32)
    assert np.all(np.diff(np.sort(even.experts, axis=2), axis=2) > 0)
    assert abs(measures.repeat_rate(even.experts) - 4 / 32) < 0.01


def test_first_ranks_are_not_lower_numbers(even):
    """Ranks are the order of drawing: every rank is spread over all experts."""
    for rank in range(4):
        assert abs(even.experts[:, :, rank].mean() - 15.5) < 1


def test_popularity_falls_as_asked_and_differs_between_layers():
    trace = iid_trace(2000, 3, 64, 1, zipf=1.0)
    counts = measures.count_usage(trace.experts, 64)
    ordered = -np.sort(-counts, axis=1).mean(axis=0)
    expected = 2000 / np.arange(1, 65) / np.sum(1 / np.arange(1, 65))
    assert np.all(np.abs(ordered[:8] / expected[:8] - 1) < 0.15)
    assert len(set(counts.argmax(axis=1).tolist())) == 3
    assert trace.meta.taken["zipf"] == 1.0 and "1 / rank^1" in trace.meta.taken["notes"][0]


def test_sticky_draws_have_the_published_repetition_and_hit_rate():
    trace = sticky_trace(250)
    assert (trace.n_layers, trace.meta.n_experts, trace.top_k) == (40, 512, 22)
    assert abs(measures.repeat_rate(trace.experts) - 0.40) < 0.01
    second = from_trace(trace)
    outcome = replay(second, "lru", slots=int(0.24 * 40 * 512))
    warm = outcome.missed[len(outcome.missed) // 2 :]  # once the cache is full
    assert 0.81 <= 1 - warm.mean() <= 0.85


def test_the_memory_of_sticky_draws_is_what_repeats():
    without = sticky_trace(300, 4, 64, 4, again=1.0)
    assert measures.repeat_rate(sticky_trace(300, 4, 64, 4, again=8.0).experts) > 2 * measures.repeat_rate(
        without.experts
    )
    assert not measure_independence(without).repeats_more


def test_the_same_seed_draws_the_same():
    for make in (iid_trace, sticky_trace):
        assert np.array_equal(make(9, 2, 8, 2, seed=3).experts, make(9, 2, 8, 2, seed=3).experts)
        assert not np.array_equal(make(9, 2, 8, 2, seed=3).experts, make(9, 2, 8, 2, seed=4).experts)


@pytest.mark.parametrize(("make", "kind"), [(iid_trace, "iid"), (sticky_trace, "sticky")])
def test_synthetic_traces_say_so_and_can_be_kept(tmp_path, make, kind):
    trace = make(5, 2, 8, 2, block_bytes=4096)
    assert trace.meta.taken["kind"] == kind and trace.meta.taken["notes"][0].startswith("synthetic: ")
    assert trace.meta.block_bytes == (4096, 4096) and trace.meta.source == "synthetic"
    write_trace(tmp_path / "trace", trace)
    assert read_trace(tmp_path / "trace").meta == trace.meta


def test_ids_beyond_int16_are_kept():
    trace = iid_trace(3, 1, 40_000, 2)
    assert trace.experts.dtype == np.int32 and trace.experts.max() > 32_767


def test_all_experts_may_be_chosen():
    assert np.array_equal(np.sort(iid_trace(3, 2, 4, 4).experts, axis=2)[0, 0], np.arange(4))


@pytest.mark.parametrize("sizes", [(0, 2, 8, 2), (3, 0, 8, 2), (3, 2, 0, 0), (3, 2, 8, 9), (3, 2, 8, -1)])
def test_sizes_that_cannot_be_are_refused(sizes):
    for make in (iid_trace, sticky_trace):
        with pytest.raises(UsageError, match="each must be at least 1"):
            make(*sizes)


def test_numbers_that_cannot_be_are_refused():
    for value in (-1.0, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="zipf is"):
            iid_trace(3, 2, 8, 2, zipf=value)
    for name in ("spread", "again"):
        with pytest.raises(UsageError, match=f"{name} is|numbers above 0"):
            sticky_trace(3, 2, 8, 2, **{name: -2.0})
        with pytest.raises(UsageError, match="numbers above 0"):
            sticky_trace(3, 2, 8, 2, **{name: 0.0})


@pytest.mark.parametrize("zipf", [0.0, 1.2])
@pytest.mark.parametrize("seed", range(4))
def test_independent_draws_look_independent_however_popular(zipf, seed):
    """Of 100 such seeds one would be taken for a memory by chance; the seeds are fixed."""
    note = looks_independent(iid_trace(200, 4, 32, 4, zipf=zipf, seed=seed))
    assert "looks like independent draws" in note and "shuffled within their conversation" in note


@pytest.mark.parametrize("seed", range(4))
def test_draws_with_a_memory_do_not(seed):
    assert looks_independent(sticky_trace(200, 4, 32, 4, seed=seed)) is None
    assert measure_independence(sticky_trace(200, 4, 32, 4, seed=seed)).repeats_more


def test_conversations_about_different_things_are_no_memory():
    """Each conversation has favourites of its own: shuffling over all of them would call that a memory."""
    one, other = (iid_trace(200, 4, 32, 4, zipf=1.5, seed=seed) for seed in (0, 1))
    joined = {
        name: np.concatenate([getattr(one, name), getattr(other, name)]) for name in ("experts", "phase", "position")
    }
    numbers = {"conversation": np.repeat(np.arange(2, dtype=np.int32), 200), "step": np.arange(400, dtype=np.int32)}
    assert looks_independent(dataclasses.replace(one, **joined, **numbers)) is not None
    numbers["conversation"][:] = 0
    joined["position"] = numbers["step"]
    assert looks_independent(dataclasses.replace(one, **joined, **numbers)) is None


def test_a_few_tokens_tell_nothing():
    assert measure_independence(iid_trace(10, 4, 32, 4)) is None
    assert looks_independent(iid_trace(10, 4, 32, 4)) is None


def test_results_carry_what_a_trace_says_of_itself():
    """The notes beside every table of `nemolab simulate`."""
    from nemolab.simulate.notes import list_notes

    def notes_of(trace):
        return " ".join(list_notes(trace, from_trace(trace), (), ("lru",), (0,), cold=False))

    even, sticky = iid_trace(60, 4, 32, 4), sticky_trace(60, 4, 32, 4)
    assert "hits about c/N under every policy" in notes_of(even) and "synthetic trace (iid)" in notes_of(even)
    assert "memory of one token" in notes_of(sticky) and "looks like independent draws" not in notes_of(sticky)
    taken = {"kind": "imported", "notes": ["said by a file", "\x1b[31m", 3]}
    imported = dataclasses.replace(even, meta=dataclasses.replace(even.meta, taken=taken))
    assert "looks like independent draws" in notes_of(imported) and "said by a file" in notes_of(imported)
    assert "\x1b" not in notes_of(imported)
