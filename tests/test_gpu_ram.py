"""A budget of RAM, of which a card's page-locked memory is a part."""

from types import SimpleNamespace

import pytest

from nemolab.engine import Engine, memory
from nemolab.engine.gpu.device import StandIn
from nemolab.errors import EngineError
from nemolab.store import page_lock
from nemolab.system.memory import Limit, Memory

GIB = 2**30
pytest_plugins = ["card_fixtures"]


@pytest.fixture
def cgroup(monkeypatch):
    """A cgroup of 1 GiB with `.used_bytes` in use, wherever memory is asked after; `.locked`: what was locked."""
    told = SimpleNamespace(locked=[], used_bytes=0)

    def read_memory():
        return Memory((Limit("MemAvailable", 32 * GIB, GIB), Limit("cgroup /box memory.max", GIB, told.used_bytes)))

    for module in (memory, page_lock):
        monkeypatch.setattr(module, "read_memory", read_memory)
    locker = type(StandIn().locker)
    monkeypatch.setattr(locker, "lock", lambda _, at, nbytes: told.locked.append(nbytes))
    return told


def test_a_budget_above_the_cgroups_limit_is_refused_before_anything_is_locked(small_path, cgroup):
    with pytest.raises(EngineError, match=r"a cache of 2\.00 GiB was asked for, .*limit: cgroup /box memory\.max"):
        Engine(small_path, device="twin", ram_cache_gib=2)
    assert cgroup.locked == []
    with Engine(small_path, device="twin", ram_cache_gib=0.1) as engine:
        engine.step(40, engine.new_state())
    assert sum(cgroup.locked) > 0


def test_the_ring_for_what_is_not_locked_is_counted_beside_the_cache(small_path):
    beside = {}
    for device in ("cpu", "twin"):
        with Engine(small_path, device=device) as engine:
            dense = sum(module.nbytes for module in engine.store.dense.values())
            ring = engine.config.top_k * engine.store.block_bytes
            beside[device] = engine.budget.beside_bytes - (dense if device == "cpu" else 0)
            embeddings = engine.store.dense["backbone.embeddings"].nbytes
    assert beside["twin"] == beside["cpu"] + ring + embeddings


def test_a_chunk_that_memory_has_no_room_for_is_not_locked(cgroup):
    row = 4096
    lock = page_lock.PageLock(0, 10 * row, row, StandIn().locker, chunk_bytes=4 * row)
    cgroup.used_bytes = GIB - 3 * row
    problem = lock.grow(10 * row)
    assert "the next 16.00 KiB would not fit the 12.00 KiB left (limit: cgroup /box memory.max)" in problem
    assert cgroup.locked == [] and lock.locked_bytes == 0
    cgroup.used_bytes = 0
    assert lock.grow(10 * row) is None and cgroup.locked == [4 * row, 4 * row, 2 * row]
