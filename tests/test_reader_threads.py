"""The direct reader with many reads under way: they end, arrive, are cancelled, and nothing is left behind."""

import errno
import os
import threading

import numpy as np
import pytest

from nemolab.errors import StoreError
from nemolab.store import direct_io
from nemolab.store import reader as reader_module
from nemolab.store.direct_io import aligned_buffer
from nemolab.store.reader import BlockReader

BLOCK = 8192
BLOCKS = 12


@pytest.fixture
def data():
    return np.random.default_rng(0).integers(0, 256, (BLOCKS, BLOCK), dtype=np.uint8)


@pytest.fixture
def path(tmp_path, data):
    path = tmp_path / "experts.bin"
    with open(path, "wb") as file:
        file.write(data.tobytes())
        file.flush()
        os.fsync(file.fileno())
    return path


def read_all(reader):
    buffers = [aligned_buffer(BLOCK) for _ in range(BLOCKS)]
    reader.read_many(list(enumerate(buffers)))
    return np.stack(buffers)


def test_one_bad_read_of_many_is_raised_after_all_have_ended(path, monkeypatch):
    real = os.preadv

    def fail_one(descriptor, buffers, offset):
        if offset == 5 * BLOCK:
            raise OSError(errno.EIO, "Input/output error")
        return real(descriptor, buffers, offset)

    with BlockReader(path, BLOCK, BLOCKS, direct=False) as reader:
        monkeypatch.setattr(os, "preadv", fail_one)
        with pytest.raises(StoreError, match=f"offset {5 * BLOCK}"):
            read_all(reader)
        monkeypatch.setattr(os, "preadv", real)
        read_all(reader)  # the reader goes on working


def test_started_reads_arrive_by_wait(path, data):
    with BlockReader(path, BLOCK, BLOCKS, direct=False, threads=3) as reader:
        buffers = [aligned_buffer(BLOCK) for _ in range(BLOCKS)]
        pending = reader.start(enumerate(buffers))
        pending.wait()
        assert np.array_equal(np.stack(buffers), data)
        reader.start([]).wait()


def test_cancelled_reads_touch_no_buffer_afterwards(path, monkeypatch):
    real, gate = os.preadv, threading.Event()

    def wait_at_the_gate(descriptor, buffers, offset):
        assert gate.wait(60)
        return real(descriptor, buffers, offset)

    with BlockReader(path, BLOCK, BLOCKS, direct=False, threads=2) as reader:
        monkeypatch.setattr(os, "preadv", wait_at_the_gate)
        buffers = [aligned_buffer(BLOCK) for _ in range(BLOCKS)]
        pending = reader.start(enumerate(buffers))
        settle = pending.settle
        # The gate opens when cancel has begun to wait for the reads under way: one for each thread at most.
        monkeypatch.setattr(pending, "settle", lambda: (gate.set(), settle()))
        pending.cancel()
        assert all(helper.ended for helper in pending._helpers)
        assert not np.stack(buffers)[2:].any(), "reads that had not begun were not made"


def test_an_interrupt_while_reads_are_started_leaves_none_under_way(path, monkeypatch):
    real, helpers = os.preadv, []

    def slow(descriptor, buffers, offset):
        threading.Event().wait(0.05)  # so that they are under way when the interrupt comes
        return real(descriptor, buffers, offset)

    with BlockReader(path, BLOCK, BLOCKS, direct=False, threads=4) as reader:
        submit = reader._pool.submit

        def interrupt_the_third(task):
            if len(helpers) == 2:
                raise KeyboardInterrupt
            submit(task)
            helpers.append(task.__self__)

        monkeypatch.setattr(os, "preadv", slow)
        monkeypatch.setattr(reader._pool, "submit", interrupt_the_third)
        with pytest.raises(KeyboardInterrupt):
            read_all(reader)
        assert len(helpers) == 2 and all(helper.ended for helper in helpers)


def open_files():
    return len(os.listdir("/proc/self/fd"))


def test_an_interrupt_as_the_file_closes_does_not_close_it_twice(path, monkeypatch):
    closed, real = [], os.close

    def interrupt(descriptor):
        closed.append(descriptor)
        real(descriptor)
        raise KeyboardInterrupt

    reader = BlockReader(path, BLOCK, BLOCKS, direct=False)
    monkeypatch.setattr(os, "close", interrupt)
    with pytest.raises(KeyboardInterrupt):
        reader.close()
    reader.close()  # by now its number may be another file's
    assert len(closed) == 1


def test_a_reader_that_cannot_be_made_leaves_no_descriptor(path, monkeypatch):
    def fail(*_):
        raise KeyboardInterrupt

    files = open_files()
    monkeypatch.setattr(reader_module, "_announced", set())
    monkeypatch.setattr(direct_io, "open_direct", lambda *_: (None, "this test says so"))
    with pytest.raises(KeyboardInterrupt):
        BlockReader(path, BLOCK, BLOCKS, announce=fail)
    assert open_files() == files, "what announces failed"
    monkeypatch.setattr(os, "posix_fadvise", fail)
    with pytest.raises(KeyboardInterrupt):
        BlockReader(path, BLOCK, BLOCKS, direct=False)
    assert open_files() == files, "advising the kernel failed"


def test_a_proof_that_fails_leaves_no_descriptor(path, monkeypatch):
    def fail(*_):
        raise KeyboardInterrupt

    files = open_files()
    monkeypatch.setattr(direct_io, "open_direct", lambda path, flags: (os.open(path, flags), ""))
    monkeypatch.setattr(direct_io, "prove_direct", fail)
    with pytest.raises(KeyboardInterrupt):
        BlockReader(path, BLOCK, BLOCKS)
    assert open_files() == files


def test_a_closed_reader_leaves_no_descriptor_and_no_thread(path):
    files, threads = open_files(), threading.active_count()
    reader = BlockReader(path, BLOCK, BLOCKS, announce=lambda line: None)
    read_all(reader)
    reader.close()
    reader.close()
    assert (open_files(), threading.active_count()) == (files, threads)
    with pytest.raises(StoreError, match="closed"):
        reader.read_into(0, aligned_buffer(BLOCK))
    with pytest.raises(StoreError, match="closed"):
        read_all(reader)
