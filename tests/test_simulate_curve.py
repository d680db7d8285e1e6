"""The one-pass LRU curve equals replay at every size where it changes, and just below."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_lookups import from_batches

from nemolab.errors import TraceError
from nemolab.simulate import curve as module
from nemolab.simulate.curve import NEVER, lru_curve, lru_distances
from nemolab.simulate.replay import replay
from nemolab.trace import DECODE, PREFILL

KEYS = 10
batches = st.lists(st.lists(st.integers(0, KEYS - 1), min_size=1, max_size=5), max_size=40)


def replayed(lookups, size, phase, **settings):
    return replay(lookups, "lru", **settings).row({None: "all", DECODE: "decode", PREFILL: "prefill"}[phase])["hits"]


@settings(max_examples=80, deadline=None)
@given(
    data=st.data(),
    batches=batches,
    sizes=st.lists(st.integers(1, 4), min_size=KEYS, max_size=KEYS),
    phase=st.sampled_from([None, DECODE, PREFILL]),
    cold=st.booleans(),
    warms=st.booleans(),
)
def test_the_curve_is_that_of_replay_at_every_size_where_it_changes(data, batches, sizes, phase, cold, warms):
    """Layer batches, sizes that differ, prompt passes of both kinds, cold conversations."""
    by_batch = st.lists(st.integers(0, 1), min_size=len(batches), max_size=len(batches))
    phases, conversation = data.draw(by_batch), np.cumsum(data.draw(by_batch))
    lookups = from_batches(
        batches, n_keys=KEYS, size_bytes=sizes, phase=phases, conversation=conversation, prefill_warms=warms
    )
    curve = lru_curve(lookups, phase=phase, cold=cold)
    assert np.all(np.diff(curve.sizes) > 0) and np.all(np.diff(curve.hits, prepend=0) > 0)
    for size in {0, *curve.sizes.tolist(), *(curve.sizes - 1).tolist(), sum(sizes)}:
        assert curve.hits_at(size) == replayed(lookups, size, phase, budget_bytes=size, cold=cold)
    in_slots = lru_curve(lookups, phase=phase, cold=cold, in_slots=True)
    for size in range(KEYS + 1):
        assert in_slots.hits_at(size) == replayed(lookups, size, phase, slots=size, cold=cold)


def test_a_stack_with_a_slip_does_not_pass():
    """Distances as if each lookup of a batch saw those before it: the plausible mistake gives another curve."""
    rng = np.random.default_rng(0)
    batches = [rng.permutation(8)[:4].tolist() for _ in range(60)]
    right = lru_curve(from_batches(batches))
    slipped = lru_curve(from_batches([[key] for batch in batches for key in batch]))
    assert right.hits.tolist() != slipped.hits.tolist()


@pytest.mark.parametrize("n_keys", [20, 40, 700])
def test_gaps_are_closed_as_often_as_needed(n_keys):
    """A trace many times longer than the stack has places, over several runs of the tree."""
    rng = np.random.default_rng(n_keys)
    draws = (rng.zipf(1.2, 30 * n_keys) % n_keys).tolist()
    lookups = from_batches([[key] for key in draws], n_keys=n_keys)
    stack, expected = [], []
    for key in draws:
        expected.append(len(stack) - stack.index(key) if key in stack else NEVER)
        if key in stack:
            stack.remove(key)
        stack.append(key)
    assert lru_distances(lookups).tolist() == expected
    assert len(draws) > 4 * (2 * n_keys + module.RUN)


def test_a_bigger_cache_is_never_worse_and_the_last_size_hits_all_but_first_lookups():
    rng = np.random.default_rng(1)
    lookups = from_batches(rng.integers(0, 50, (300, 4)).tolist(), n_keys=50)
    curve = lru_curve(lookups)
    assert np.all(np.diff(curve.hit_rates) > 0)
    assert curve.hits[-1] == curve.lookups - len(np.unique(lookups.keys))
    assert curve.hits_at(0) == 0 and curve.hits_at(10**9) == curve.hits[-1]


def test_a_cycle_is_a_cliff():
    curve = lru_curve(from_batches([[key] for key in list(range(30)) * 5]))
    assert (curve.sizes.tolist(), curve.hits.tolist()) == ([30], [120])


def test_a_trace_without_lookups_has_an_empty_curve():
    curve = lru_curve(from_batches([], n_keys=3))
    assert len(curve.sizes) == 0 and curve.hits_at(5) == 0


def test_unknown_sizes_allow_slots_only():
    lookups = from_batches([[0], [0]], size_bytes=None)
    with pytest.raises(TraceError, match="ask for the curve in slots"):
        lru_curve(lookups)
    assert lru_curve(lookups, in_slots=True).hits_at(1) == 1
