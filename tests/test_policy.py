"""Every policy decides as its plain twin does: batch after batch, sizes that differ, prompt passes, prefetch."""

import numpy as np
import pytest
from cache_twins import TWINS
from hypothesis import given, settings
from hypothesis import strategies as st
from small_lookups import from_batches

from nemolab.policy import POLICIES, Cache
from nemolab.policy.core import FIRST, MISSED, USEFUL
from nemolab.simulate.replay import replay
from nemolab.trace import DECODE, PREFILL

KEYS = 12
batches = st.lists(st.lists(st.integers(0, KEYS - 1), min_size=1, max_size=6), max_size=60)
small_sizes = st.lists(st.integers(1, 4), min_size=KEYS, max_size=KEYS)


def run_twin(name, batches, sizes, capacity, passing=None, guesses=None, depth=0):
    """Outcomes as `replay` writes them, (reads, wasted) of each batch, and the keys left in the cache."""
    future = [set(batch) for batch in batches]
    twin = TWINS[name](capacity, sizes, future)
    outcome, rounds = [], []
    for number, batch in enumerate(batches):
        wasted, read = twin.wasted, []
        if passing is not None and passing[number]:
            missed, first, useful, _ = twin.prompt(batch, number)
        else:
            if depth:
                twin.now = number - 1  # the batch itself is still to come
                read = twin.prefetch([key for key in guesses[number][:depth] if key >= 0])
            missed, first, useful, _ = twin.batch(batch, number)
        order = list(dict.fromkeys(reversed(batch)))[::-1]
        outcome += [MISSED * (k in missed) | FIRST * (k in first) | USEFUL * (k in useful) for k in order]
        rounds.append((len(read), twin.wasted - wasted))
    return outcome, rounds, set(twin.held)


@pytest.mark.parametrize("name", TWINS)
@settings(max_examples=60, deadline=None)
@given(batches=batches, sizes=small_sizes, capacity=st.integers(0, 40))
def test_a_policy_decides_as_its_twin(name, batches, sizes, capacity):
    lookups = from_batches(batches, n_keys=KEYS, size_bytes=sizes)
    outcome, _, _ = run_twin(name, batches, sizes, capacity)
    assert replay(lookups, name, budget_bytes=capacity).outcome.tolist() == outcome


@pytest.mark.parametrize("name", TWINS)
@settings(max_examples=40, deadline=None)
@given(data=st.data(), batches=batches, sizes=small_sizes, capacity=st.integers(0, 40), depth=st.integers(1, 4))
def test_a_policy_decides_as_its_twin_with_prompts_and_prefetch(name, data, batches, sizes, capacity, depth):
    passing = data.draw(st.lists(st.booleans(), min_size=len(batches), max_size=len(batches)))
    guess = st.lists(st.integers(-1, KEYS - 1), max_size=5)
    guesses = data.draw(st.lists(guess, min_size=len(batches), max_size=len(batches)))
    phase = [PREFILL if passes else DECODE for passes in passing]
    lookups = from_batches(batches, n_keys=KEYS, size_bytes=sizes, phase=phase, guesses=guesses)
    outcome, rounds, _ = run_twin(name, batches, sizes, capacity, passing, guesses, depth)
    result = replay(lookups, name, budget_bytes=capacity, prefetch=depth)
    assert result.outcome.tolist() == outcome
    assert list(zip(result.issued.tolist(), result.wasted.tolist(), strict=True)) == rounds


def test_the_twins_can_fail():
    """A twin of one policy does not pass for another."""
    rng = np.random.default_rng(0)
    batches = (rng.zipf(1.3, (300, 3)) % KEYS).tolist()
    sizes = [1] * KEYS
    seen = {name: tuple(run_twin(name, batches, sizes, 6)[0]) for name in TWINS}
    assert len(set(seen.values())) == len(TWINS), "each policy leaves a trace of its own here"
    for name in TWINS:
        assert tuple(replay(from_batches(batches, n_keys=KEYS), name, slots=6).outcome) == seen[name]


# The doors from Python are compiled anew for each kind of state: lists, a heap and dice show that they are doors.
LIVE = ["lru", "lfu", "random"]


@pytest.mark.parametrize("name", LIVE)
def test_a_live_cache_decides_as_the_replay(name):
    """Batch by batch from Python, and all at once: the same compiled rules, so the same misses, reads and waste."""
    rng = np.random.default_rng(3)
    n_keys, sizes = 40, rng.integers(1, 4, 40)
    batches = [(rng.zipf(1.4, 5) % n_keys).tolist() for _ in range(400)]
    guesses = [rng.integers(-1, n_keys, 4).tolist() for _ in batches]
    phase = [PREFILL if number % 50 == 0 else DECODE for number in range(len(batches))]
    lookups = from_batches(batches, n_keys=n_keys, size_bytes=sizes, phase=phase, guesses=guesses)
    expected = replay(lookups, name, budget_bytes=30, prefetch=3, seed=5)
    cache = Cache(n_keys, 30, sizes, policy=POLICIES[name], seed=5)
    cached, misses, issued = set(), [], []
    for batch, guess, of in zip(batches, guesses, phase, strict=True):
        if of == PREFILL:
            done = cache.pass_by(batch)
            assert done.victims == []
            issued.append(0)
        else:
            read, victims = cache.prefetch(guess[:3])
            cached = (cached | set(read)) - set(victims)
            done = cache.batch(batch)
            cached = (cached | set(done.misses)) - set(done.victims)
            issued.append(len(read))
        misses.append(len(done.misses))
        assert cached == set(cache) and cache.used_bytes == sizes[sorted(cached)].sum() <= 30
        assert len(cache) == len(cached) and set(done.useful) <= set(done.hits)
    assert misses == expected.misses_by_batch().tolist()
    assert issued == expected.issued.tolist() and sum(issued) > 100
    assert cache.wasted == expected.wasted.sum() > 0


@settings(max_examples=100, deadline=None)
@given(capacity=st.integers(0, 40), batches=batches, sizes=small_sizes)
def test_lru_lists_victims_and_keys_as_the_twin(capacity, batches, sizes):
    cache, twin = Cache(KEYS, capacity, np.array(sizes)), TWINS["lru"](capacity, sizes)
    for number, keys in enumerate(batches):
        missed, _, _, victims = twin.batch(keys, number)
        done = cache.batch(keys)
        assert (done.misses, done.victims) == (missed, victims)
        assert list(cache) == sorted(twin.held, key=twin.rank)
        assert len(done.hits) + len(done.misses) == len(set(keys))
        assert all((key in cache) == (key in twin.held) for key in range(KEYS))


class HitsFirst(TWINS["lru"]):
    """The plausible mistake: hits are refreshed before misses enter."""

    def batch(self, keys, number):
        return super().batch(sorted(keys, key=lambda key: key not in self.held), number)


def test_refreshing_hits_before_misses_is_seen():
    a, b, c, x = range(4)
    cache, right, wrong = Cache(4, 3, 1), TWINS["lru"](3, [1] * 4), HitsFirst(3, [1] * 4)
    for number, keys in enumerate(([a, b, c], [x, a])):
        cache.batch(keys)
        right.batch(keys, number)
        wrong.batch(keys, number)
    assert list(cache) == sorted(right.held, key=right.rank) == [c, x, a]
    assert sorted(wrong.held, key=wrong.rank) == [c, a, x]


@settings(max_examples=60, deadline=None)
@given(batches=batches, small=st.integers(0, 12), more=st.integers(0, 6))
def test_a_bigger_lru_holds_all_that_a_smaller_one_does(batches, small, more):
    a, b = Cache(KEYS, small, 1), Cache(KEYS, small + more, 1)
    for keys in batches:
        hits_a, hits_b = (set(cache.batch(keys).hits) for cache in (a, b))
        assert hits_a <= hits_b and set(a) <= set(b)


def test_recency_is_the_last_occurrence_in_the_batch():
    cache = Cache(4, 10, 1)
    assert cache.batch([0, 1, 0, 2]).misses == [1, 0, 2]
    assert list(cache) == [1, 0, 2]


def test_the_running_batch_is_spared_while_another_can_go():
    cache = Cache(10, 4, 1)
    cache.batch([1, 2, 3, 4])
    done = cache.batch([1, 9, 8, 7])  # 1 is the oldest and a hit: it stays
    assert done[:3] == ([1], [9, 8, 7], [2, 3, 4])


@pytest.mark.parametrize("name", LIVE)
def test_a_batch_larger_than_the_budget_loses_its_own_oldest_at_its_end(name):
    cache = Cache(10, 3, 1, policy=POLICIES[name])
    cache.batch([0])
    assert cache.batch([1, 2, 3, 4, 5]).victims == [0, 1, 2]
    assert sorted(cache) == [3, 4, 5]


@pytest.mark.parametrize("name", LIVE)
def test_nothing_stays_in_a_cache_of_nothing(name):
    cache = Cache(3, 0, 1, policy=POLICIES[name])
    for _ in range(3):
        assert cache.batch([1])[:3] == ([], [1], [1])
    assert cache.prefetch([2]) == ([], [])
    assert len(cache) == 0 and cache.used_bytes == 0


def test_a_round_of_prefetch_spares_the_running_batch_and_itself():
    cache = Cache(10, 4, 1)
    cache.batch([0, 1])
    cache.batch([2, 3])
    assert cache.prefetch([5, 6, 7]) == ([5, 6], [0, 1]), "the third guess finds no place"
    assert list(cache) == [2, 3, 5, 6]
    done = cache.batch([6, 8])
    assert done == ([6], [8], [2], [6])
    assert cache.wasted == 0
    cache.batch([1, 2, 3])  # 5 leaves, never asked for
    assert cache.wasted == 1


def test_a_guess_that_is_cached_is_not_refreshed():
    cache = Cache(10, 3, 1)
    for key in (0, 1, 2):
        cache.batch([key])
    assert cache.prefetch([1]) == ([], [])
    assert cache.batch([3]).victims == [0] and cache.batch([4]).victims == [1]


def test_a_prompt_pass_neither_refreshes_nor_inserts():
    cache = Cache(10, 3, 1)
    cache.batch([0, 1, 2])
    assert cache.pass_by([0, 5, 0]) == ([0], [5], [], [])
    assert list(cache) == [0, 1, 2]


def test_another_budget_holds_from_then_on():
    cache = Cache(10, 6, 1)
    cache.batch([0, 1, 2])
    cache.resize(3)
    assert list(cache) == [0, 1, 2] and cache.batch([3]).victims == [0]
    with pytest.raises(ValueError, match="2 bytes for a cache that holds 3"):
        cache.resize(2)
    for name in ("slru", "s3fifo", "arc"):
        with pytest.raises(ValueError, match=f"{name} shares its budget out"):
            Cache(10, 6, 1, policy=POLICIES[name]).resize(5)


def test_random_dice_are_those_of_the_seed():
    def run(seed):
        cache = Cache(50, 10, 1, policy=POLICIES["random"], seed=seed)
        return [cache.batch([key % 50]).victims for key in range(300)]

    assert run(1) == run(1) != run(2)


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="-1 bytes"):
        Cache(3, -1, 1)
    for name in ("static", "belady", "belady-bypass"):
        with pytest.raises(ValueError, match=f"{name} must know all lookups"):
            Cache(3, 1, 1, policy=POLICIES[name])
