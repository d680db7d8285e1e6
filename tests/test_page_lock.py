"""Page-locking in chunks: what is locked, what a failure leaves behind, and on a card that it can be read in place."""

import numpy as np
import pytest

from nemolab.errors import StoreError
from nemolab.store import page_lock
from nemolab.store.arena import Arena
from nemolab.store.direct_io import address
from nemolab.store.page_lock import CopyBatch, Driver, PageLock

ROW = 3 * 4096


class FakeLocker:
    """Locks until `limit_bytes` are locked, and keeps book."""

    def __init__(self, limit_bytes: int):
        self.limit_bytes, self.locked = limit_bytes, {}

    def lock(self, address, nbytes):
        if sum(self.locked.values()) + nbytes > self.limit_bytes:
            return "CUDA_ERROR_OUT_OF_MEMORY"
        self.locked[address] = nbytes
        return None

    def unlock(self, address):
        return None if self.locked.pop(address, None) else "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"


def test_it_grows_in_chunks_of_whole_rows():
    locker = FakeLocker(1 << 30)
    lock = PageLock(1 << 20, 10 * ROW, ROW, locker, chunk_bytes=3 * ROW + 5)
    assert lock.grow(1) is None and lock.locked_bytes == 3 * ROW
    assert lock.grow(3 * ROW) is None and lock.locked_bytes == 3 * ROW, "that much is locked already"
    assert lock.grow(10 * ROW) is None and lock.locked_bytes == 10 * ROW
    assert locker.locked == {(1 << 20) + 3 * k * ROW: size * ROW for k, size in enumerate((3, 3, 3, 1))}
    lock.close()
    assert locker.locked == {} and lock.locked_bytes == 0
    lock.close()


def test_a_row_larger_than_a_chunk_is_a_chunk():
    lock = PageLock(0, 4 * ROW, ROW, FakeLocker(1 << 30), chunk_bytes=4096)
    lock.grow(1)
    assert lock.locked_bytes == ROW == lock.chunk_bytes


def test_a_cap_stops_it_where_it_is_and_it_can_try_again():
    locker = FakeLocker(5 * ROW)
    lock = PageLock(0, 10 * ROW, ROW, locker, chunk_bytes=2 * ROW)
    problem = lock.grow(10 * ROW)
    assert "48.00 KiB" in problem and "CUDA_ERROR_OUT_OF_MEMORY" in problem
    assert lock.locked_bytes == 4 * ROW == sum(locker.locked.values()), "nothing half done"
    locker.limit_bytes = 20 * ROW
    assert lock.grow(10 * ROW) is None
    lock.close()
    assert locker.locked == {}


def test_it_shrinks_by_its_last_chunk():
    locker = FakeLocker(1 << 30)
    lock = PageLock(0, 10 * ROW, ROW, locker, chunk_bytes=4 * ROW)
    lock.grow(10 * ROW)
    assert [lock.shrink() for _ in range(4)] == [2 * ROW, 4 * ROW, 4 * ROW, 0]
    assert locker.locked == {} and lock.locked_bytes == 0
    assert lock.grow(5 * ROW) is None and lock.locked_bytes == 8 * ROW
    locker.locked.pop(4 * ROW)
    with pytest.raises(StoreError, match=f"unlocking {4 * ROW} bytes of memory failed"):
        lock.shrink()
    assert lock.locked_bytes == 4 * ROW


def test_what_cannot_be_unlocked_is_said():
    locker = FakeLocker(1 << 30)
    lock = PageLock(0, 4 * ROW, ROW, locker, chunk_bytes=ROW)
    lock.grow(4 * ROW)
    locker.locked.pop(ROW)
    with pytest.raises(StoreError, match="unlocking 1 pieces of memory failed: CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"):
        lock.close()
    assert locker.locked == {}, "the others are unlocked all the same"


class InterruptedLocker(FakeLocker):
    """Interrupted once in a call: "before" the driver does anything, or "behind" what it did."""

    def __init__(self, call: str, when: str):
        super().__init__(1 << 30)
        self._call, self._when = call, when

    def _interrupt(self, call, when):
        if (call, when) == (self._call, self._when):
            self._call = ""
            raise KeyboardInterrupt

    def lock(self, address, nbytes):
        self._interrupt("lock", "before")
        assert address not in self.locked, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"
        problem = super().lock(address, nbytes)
        self._interrupt("lock", "behind")
        return problem

    def unlock(self, address):
        self._interrupt("unlock", "before")
        problem = super().unlock(address)
        self._interrupt("unlock", "behind")
        return problem


def interrupted_unlocking(when):
    """Four locked rows whose first unlocking is interrupted: (locker, lock)."""
    locker = InterruptedLocker("unlock", when)
    lock = PageLock(0, 4 * ROW, ROW, locker, chunk_bytes=ROW)
    lock.grow(4 * ROW)
    return locker, lock


@pytest.mark.parametrize("when", ["before", "behind"])
@pytest.mark.parametrize("then", ["grow", "shrink", "close"])
def test_a_chunk_locked_as_an_interrupt_comes_is_not_lost(when, then):
    locker = InterruptedLocker("lock", when)
    lock = PageLock(0, 4 * ROW, ROW, locker, chunk_bytes=ROW)
    with pytest.raises(KeyboardInterrupt):
        lock.grow(ROW)
    assert lock.locked_bytes == 0
    if then == "grow":
        assert lock.grow(2 * ROW) is None
        assert lock.locked_bytes == 2 * ROW == sum(locker.locked.values())
    elif then == "shrink":
        assert lock.shrink() == 0 and lock.locked_bytes == 0 and locker.locked == {}
    lock.close()
    assert locker.locked == {}


@pytest.mark.parametrize("when", ["before", "behind"])
def test_an_interrupt_while_it_shrinks_promises_no_memory_that_is_unlocked(when):
    locker, lock = interrupted_unlocking(when)
    with pytest.raises(KeyboardInterrupt):
        lock.shrink()
    assert lock.locked_bytes == 3 * ROW
    assert lock.grow(4 * ROW) is None and sum(locker.locked.values()) == 4 * ROW == lock.locked_bytes
    lock.close()
    assert locker.locked == {}


def test_a_piece_that_breaks_its_unlocking_keeps_none_of_the_others_locked():
    class Broken(FakeLocker):
        def unlock(self, address):
            if address == 2 * ROW:
                raise RuntimeError("the driver is gone")
            return super().unlock(address)

    locker = Broken(1 << 30)
    lock = PageLock(0, 4 * ROW, ROW, locker, chunk_bytes=ROW)
    lock.grow(4 * ROW)
    with pytest.raises(RuntimeError, match="the driver is gone"):
        lock.close()
    assert list(locker.locked) == [2 * ROW]


@pytest.mark.parametrize("when", ["before", "behind"])
def test_an_interrupt_while_it_closes_leaves_nothing_locked(when):
    locker, lock = interrupted_unlocking(when)
    with pytest.raises(KeyboardInterrupt):
        lock.close()
    assert locker.locked == {} and lock.locked_bytes == 0
    lock.close()


@pytest.mark.parametrize(("at", "nbytes", "row"), [(5, ROW, ROW), (0, ROW + 4096, ROW), (0, 5000, 5000)])
def test_only_whole_pages_and_rows_are_locked(at, nbytes, row):
    with pytest.raises(StoreError, match="whole pages are needed"):
        PageLock(at, nbytes, row, FakeLocker(1 << 30))


class FakeCuda:
    """A driver's library that notes what is called; calls to `refused` come back with 101."""

    def __init__(self, refused: str = ""):
        self.refused, self.called = refused, []

    def __getattr__(self, name):
        def call(*arguments):
            if name == "cuGetErrorName":
                arguments[1]._obj.value = b"CUDA_ERROR_INVALID_DEVICE"
                return 0
            self.called.append(name)
            if name == "cuDeviceGetAttribute":
                arguments[0]._obj.value = 1
            return 101 if name == self.refused else 0

        return call


@pytest.fixture
def fake_cuda(monkeypatch):
    cuda = FakeCuda()
    monkeypatch.setattr(page_lock.ctypes, "CDLL", lambda name: cuda)
    monkeypatch.setattr(Driver, "_contexts", {})
    return cuda


def test_a_card_that_is_not_there_is_refused_before_another_is_touched(fake_cuda):
    """A handle that no call has filled in is card 0's."""
    fake_cuda.refused = "cuDeviceGet"
    with pytest.raises(StoreError, match="card 7 cannot be used: cuDeviceGet says CUDA_ERROR_INVALID_DEVICE"):
        Driver(7)
    assert fake_cuda.called == ["cuInit", "cuDeviceGet"]


def test_a_card_s_context_is_retained_once(fake_cuda):
    for card in (0, 0, 1):
        assert Driver(card).use() is None
    assert fake_cuda.called.count("cuDevicePrimaryCtxRetain") == 2


@pytest.mark.gpu
def test_a_card_beyond_the_last_is_refused():
    with pytest.raises(StoreError, match="card 99 cannot be used: cuDeviceGet says CUDA_ERROR_INVALID_DEVICE"):
        Driver(99)


@pytest.mark.gpu
def test_a_card_reads_and_copies_what_is_locked():
    import torch

    from nemolab.kernels.gpu.stream import stream, stream_torch

    torch.zeros(1, device="cuda")
    driver, arena = Driver(), Arena(8, ROW)
    arena.rows[:] = np.random.default_rng(0).integers(0, 256, arena.rows.shape)
    at = address(arena.rows)
    lock = PageLock(at, arena.reserved_bytes, ROW, driver, chunk_bytes=3 * ROW)
    assert lock.grow(arena.reserved_bytes) is None
    assert "ALREADY_REGISTERED" in driver.lock(at, ROW), "and the next call works all the same"
    sums = torch.empty(5, dtype=torch.int32, device="cuda")
    stream(at, arena.reserved_bytes // 4, sums)
    assert sums.sum(dtype=torch.int32).cpu() == stream_torch(torch.from_numpy(arena.rows).flatten().view(torch.int32))
    there = torch.zeros(8, ROW, dtype=torch.uint8, device="cuda")
    to = there.data_ptr() + ROW * np.arange(8, dtype=np.int64)
    sources = at + ROW * np.array([3, 1, 7, 0, 2, 6, 5, 4])
    side = torch.cuda.Stream()
    for batch in (driver.copy_batch, None):
        driver.copy_batch = batch
        there.zero_()
        torch.cuda.synchronize()
        copies = CopyBatch(driver, to, sources, ROW, side.cuda_stream)
        copies.run(0, 3)
        copies.run(3, 4)
        torch.cuda.synchronize()
        assert np.array_equal(there[:7].cpu().numpy(), arena.rows[[3, 1, 7, 0, 2, 6, 5]])
        assert not there[7].any()
    # Why no chunk's border may cut a block:
    with pytest.raises(StoreError, match="copying 24576 bytes .* CUDA_ERROR_INVALID_VALUE"):
        driver.copy(there.data_ptr(), at + 2 * ROW, 2 * ROW, side.cuda_stream)
    lock.close()
    arena.close()
