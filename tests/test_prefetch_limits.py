"""Reading ahead: memory is looked after, and what cannot be is refused."""

import types

import numpy as np
import pytest
from blocks import BLOCK, EXPERTS, LAYERS, rows_of
from test_prefetch import check_books

from nemolab.errors import StoreError
from nemolab.store import growth
from nemolab.store.cache import ExpertCache

pytest_plugins = ["block_fixtures"]


def tell_room(monkeypatch, *rooms):
    answers = iter(rooms)

    def read_memory():
        room = next(answers)
        return types.SimpleNamespace(
            room_bytes=room * BLOCK, available_bytes=room * BLOCK, reserve_bytes=BLOCK,
            tightest=types.SimpleNamespace(name="cgroup /a memory.max"),
        )  # fmt: skip

    monkeypatch.setattr(growth, "read_memory", read_memory)
    monkeypatch.setattr(growth, "STEP_BYTES", 4 * BLOCK)


@pytest.mark.parametrize("name", ["lru", "lfu", "s3fifo", "arc"])
def test_memory_is_looked_after_for_blocks_read_ahead_too(store, data, monkeypatch, capsys, name):
    """Room for 8 of 20 blocks: the third step of memory is asked for by a prefetch, and refused."""
    tell_room(monkeypatch, 100, 100, 3)
    with ExpertCache(store, slots=20, policy=name) as cache:
        for layer in range(2):
            views = cache.lookup(layer, [0, 1, 2, 3])
            cache.prefetch(layer + 1, [0, 1, 2])
            assert np.array_equal(np.stack(views), data[layer * EXPERTS : layer * EXPERTS + 4])
        assert cache.slots == 8 and max(rows_of(cache).values()) < 8
        assert np.array_equal(np.stack(cache.lookup(2, [0, 1, 2, 9])), data[2 * EXPERTS + np.array([0, 1, 2, 9])])
        check_books(cache, data)
    assert "stays at 8 of 20 blocks" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["belady", "belady-bypass", "static"])
def test_a_policy_that_must_know_the_future_is_refused(store, name):
    with pytest.raises(StoreError, match=f"{name} must know all lookups in advance.*lru"):
        ExpertCache(store, slots=9, policy=name)


def test_an_unknown_policy_is_refused_with_those_there_are(store):
    with pytest.raises(StoreError, match="unknown policy 'lur'; a cache runs lru, lfu"):
        ExpertCache(store, slots=9, policy="lur")


@pytest.mark.parametrize("layer, guesses", [(0, [EXPERTS]), (0, [-1]), (LAYERS, [0])])
def test_guesses_out_of_range_are_refused(store, layer, guesses):
    with ExpertCache(store, slots=9) as cache, pytest.raises(StoreError, match="3 MoE layers of 40 experts"):
        cache.prefetch(layer, guesses)


def test_a_prefetch_amid_a_prompt_batch_is_refused(store):
    with ExpertCache(store, slots=9, ring=4) as cache:
        stream = cache.stream(0, range(10))
        next(stream)
        with pytest.raises(StoreError, match="finish the stream first"):
            cache.prefetch(0, [1])
        stream.close()
