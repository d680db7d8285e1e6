"""Memory that card and CPU share: arrays and the cache in page-locked memory, choices that are waited for."""

import gc
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nemolab.engine.gpu.cache_memory import CacheMemory
from nemolab.engine.gpu.pinned import PinnedArray, wait_for_ids
from nemolab.errors import EngineError, StoreError
from nemolab.store.arena import Arena
from nemolab.store.direct_io import address
from nemolab.store.page_lock import PageLock

pytest_plugins = ["card_fixtures"]


@pytest.mark.parametrize("order", [range(5), reversed(range(5)), (0, 4, 2, 1, 3)], ids=["forth", "back", "last"])
def test_ids_are_waited_for_whatever_their_order(order):
    told = np.full(5, -1, np.int32)

    def tell():
        for place in order:
            time.sleep(1e-3)
            told[place] = place

    teller = threading.Thread(target=tell)
    teller.start()
    assert wait_for_ids(told, lambda: False) and told.tolist() == [0, 1, 2, 3, 4]
    teller.join()


def test_waiting_for_ids_ends():
    assert not wait_for_ids(np.array([1, -1, 2], np.int32), lambda: False, timeout_s=0.01)


def test_a_card_that_is_done_without_a_word_or_has_failed_is_not_waited_for():
    assert not wait_for_ids(np.array([1, -1, 2], np.int32), lambda: True)

    def fail():
        raise RuntimeError("an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        wait_for_ids(np.array([1, -1, 2], np.int32), fail)


def test_ids_that_came_while_this_process_stood_still_count():
    ids = np.array([1, -1, 2], np.int32)

    def stand_still():
        ids[1] = 0
        return True

    assert wait_for_ids(ids, stand_still)


def test_a_pinned_array_is_seen_by_the_card(world):
    shared = PinnedArray((3, 5), np.int32, world.device.locker)
    shared.array[:] = np.arange(15).reshape(3, 5)
    there = torch.zeros(15, dtype=torch.int32, device=world.device.torch_device)
    world.device.copy(there.data_ptr(), shared.address, 60)
    assert there.tolist() == list(range(15))
    shared.close()
    shared.close()


class CountingLocker:
    def __init__(self):
        self.locked = set()

    def lock(self, address, nbytes):
        self.locked.add(address)

    def unlock(self, address):
        self.locked.remove(address)


def test_a_pinned_array_is_unlocked_when_it_is_forgotten():
    locker = CountingLocker()
    kept = PinnedArray((3,), np.int32, locker)
    PinnedArray((5000,), np.int32, locker)
    assert locker.locked == {kept.address}
    kept.close()
    assert not locker.locked


def test_a_pinned_array_interrupted_once_it_is_locked_is_unlocked(monkeypatch):
    grow, locker = PageLock.grow, CountingLocker()

    def interrupted(lock, nbytes):
        grow(lock, nbytes)
        assert locker.locked
        raise KeyboardInterrupt

    monkeypatch.setattr(PageLock, "grow", interrupted)
    with pytest.raises(KeyboardInterrupt):
        PinnedArray((3,), np.int32, locker)
    gc.collect()
    assert not locker.locked


class KeepsTheFirst(CountingLocker):
    """A driver that does not unlock what lies in front."""

    def unlock(self, address):
        if address == min(self.locked):
            return "CUDA_ERROR_UNKNOWN"
        super().unlock(address)


def test_every_range_of_the_cache_is_unlocked_whatever_the_others_raise():
    locker, arena = KeepsTheFirst(), Arena(5, 4096)
    cache, device = SimpleNamespace(arena=arena.rows, slots=3), SimpleNamespace(locker=locker)
    memory = CacheMemory(cache, device)
    assert memory.lock_row(0) and memory.lock_row(3) and len(locker.locked) == 2
    with pytest.raises(StoreError, match="CUDA_ERROR_UNKNOWN"):
        memory.close()
    assert locker.locked == {address(arena.rows)}
    memory.close()


def test_addresses_of_rows_beyond_four_gib_are_whole():
    arena = Arena(1, 2**22)  # one block, in the place of as many
    rows = np.lib.stride_tricks.as_strided(arena.rows, (1501, 2**22), (0, 1))
    memory = CacheMemory(SimpleNamespace(arena=rows, slots=1501), SimpleNamespace(locker=CountingLocker()))
    assert int(memory.addresses[1500]) == address(arena.rows) + 1500 * 2**22
    arena.close()


def test_memory_that_cannot_be_shared_is_refused(monkeypatch):
    monkeypatch.setattr(CountingLocker, "lock", lambda *_: "CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(EngineError, match=r"20 B that card and CPU share: .*CUDA_ERROR_OUT_OF_MEMORY"):
        PinnedArray((5,), np.int32, CountingLocker())
