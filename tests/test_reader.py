"""The direct reader: modes that are proven, reads that are whole, errors that say where."""

import errno
import fcntl
import os
from pathlib import Path

import numpy as np
import pytest

from nemolab.errors import StoreError
from nemolab.store import direct_io
from nemolab.store import reader as reader_module
from nemolab.store.direct_io import Alignment, aligned_buffer
from nemolab.store.reader import BlockReader

BLOCK = 8192
BLOCKS = 12
SHM = Path("/dev/shm")


@pytest.fixture
def data():
    return np.random.default_rng(0).integers(0, 256, (BLOCKS, BLOCK), dtype=np.uint8)


@pytest.fixture
def path(tmp_path, data):
    path = tmp_path / "experts.bin"
    write(path, data)
    return path


@pytest.fixture
def said():
    return []


def write(path, data):
    with open(path, "wb") as file:
        file.write(data.tobytes())
        file.flush()
        os.fsync(file.fileno())


def read_all(reader):
    buffers = [aligned_buffer(BLOCK) for _ in range(BLOCKS)]
    reader.read_many(list(enumerate(buffers)))
    return np.stack(buffers)


@pytest.mark.parametrize("direct", [None, False])
def test_blocks_arrive_as_written(path, data, said, direct):
    with BlockReader(path, BLOCK, BLOCKS, direct=direct, announce=said.append) as reader:
        assert np.array_equal(read_all(reader), data)
        one = aligned_buffer(BLOCK)
        reader.read_into(BLOCKS - 1, one)
        assert np.array_equal(one, data[-1])


@pytest.mark.nvme
def test_direct_mode_leaves_the_page_cache_alone(path, data, said):
    with BlockReader(path, BLOCK, BLOCKS, announce=said.append) as reader:
        assert reader.mode == "direct" and said == []
        os.posix_fadvise(reader._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        assert np.array_equal(read_all(reader), data)
        assert direct_io.count_cached_pages(reader._descriptor, 0, BLOCK * BLOCKS) in (0, None)


def test_buffered_mode_fills_the_page_cache_so_the_check_can_fail(path):
    with BlockReader(path, BLOCK, BLOCKS, direct=False) as reader:
        read_all(reader)
        assert direct_io.count_cached_pages(reader._descriptor, 0, BLOCK * BLOCKS) in (2 * BLOCKS, None)


@pytest.mark.skipif(not os.access(SHM, os.W_OK), reason="no writable /dev/shm")
def test_tmpfs_is_read_buffered_and_says_so_once(data, said, tmp_path):
    path = SHM / f"nemolab-{os.getpid()}.bin"
    try:
        write(path, data)
        for _ in range(2):
            with BlockReader(path, BLOCK, BLOCKS, announce=said.append) as reader:
                assert reader.mode == "buffered"
                assert np.array_equal(read_all(reader), data)
        assert len(said) == 1 and str(path) in said[0]
        with pytest.raises(StoreError, match="direct I/O was asked for"):
            BlockReader(path, BLOCK, BLOCKS, direct=True)
    finally:
        path.unlink()


def test_a_refused_open_falls_back(path, data, said, monkeypatch):
    real = os.open

    def refuse(name, flags, *rest, **named):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(name, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refuse)
    with BlockReader(path, BLOCK, BLOCKS, announce=said.append) as reader:
        assert reader.mode == "buffered" and "EINVAL at open" in said[0]
        assert np.array_equal(read_all(reader), data)


def test_a_dropped_flag_is_seen(path, data, said, monkeypatch):
    """A wrapper that swallows O_DIRECT: the open works, the mode must not be believed."""
    real = os.open
    monkeypatch.setattr(os, "open", lambda name, flags, *rest: real(name, flags & ~os.O_DIRECT, *rest))
    with BlockReader(path, BLOCK, BLOCKS, announce=said.append) as reader:
        assert reader.mode == "buffered" and "does not carry O_DIRECT" in reader.reason
        assert np.array_equal(read_all(reader), data)


@pytest.mark.nvme
def test_an_open_that_works_and_reads_that_fail_falls_back(path, data, said, monkeypatch):
    """Overlay over squashfs: O_DIRECT opens, every aligned read is EINVAL."""
    real = os.preadv

    def fail_direct(descriptor, buffers, offset):
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", fail_direct)
    with BlockReader(path, BLOCK, BLOCKS, announce=said.append) as reader:
        assert reader.mode == "buffered" and "fails (EINVAL)" in said[0]
        assert np.array_equal(read_all(reader), data)


@pytest.mark.nvme
@pytest.mark.parametrize(
    "answer, mode",
    [
        (Alignment(512, 512), "direct"),
        (Alignment(4, 8192), "direct"),
        (Alignment(512, 16384), "buffered"),
        (Alignment(512, 16384, 4096), "direct"),
        (Alignment(512, 512, 16384), "buffered"),
        (Alignment(8192, 512), "buffered"),
        (Alignment(0, 0), "buffered"),
        (None, "direct"),
    ],
)
def test_the_kernels_alignment_is_heeded(path, data, said, monkeypatch, answer, mode):
    """A block of 8192 bytes goes with 512 and 8192, not with 16384; reads may want less than writes; memory is aligned
    to pages and no more; zeros mean no direct I/O at all.
    """
    monkeypatch.setattr(direct_io, "ask_alignment", lambda descriptor: answer)
    with BlockReader(path, BLOCK, BLOCKS, announce=said.append) as reader:
        assert reader.mode == mode
        assert np.array_equal(read_all(reader), data)
    if mode == "buffered":
        assert "direct" in said[0] or "memory aligned to 8192" in said[0]


@pytest.mark.parametrize("alignment, mode", [(8192, "direct"), (16384, "direct"), (32768, "buffered")])
def test_a_super_block_goes_with_16_kib_and_not_with_32(tmp_path, said, monkeypatch, alignment, mode):
    """3,096,576 = 189 x 16384."""
    monkeypatch.setattr(direct_io, "ask_alignment", lambda descriptor: Alignment(512, alignment))
    monkeypatch.setattr(direct_io, "_prove_at", lambda *_: direct_io.Proof(True, "pretended"))
    assert direct_io.prove_direct(-1, 3_096_576, 4).direct == (mode == "direct")


def test_reads_may_want_another_alignment_than_writes():
    wants = Alignment(512, 32768, 4096)
    assert direct_io.object_to(3_096_576, wants) == ""
    refused = direct_io.object_to(3_096_576, wants, writes=True)
    assert "direct writes in multiples of 32768 bytes, and a block of 3096576 is none" in refused
    assert direct_io.object_to(4096, Alignment(512, 512)) == direct_io.object_to(4096, None) == ""
    assert "memory aligned to 65536" in direct_io.object_to(65536, Alignment(65536, 512))


@pytest.mark.nvme
@pytest.mark.parametrize("read_align", [None, 4096])
def test_the_kernels_answer_is_read_from_the_right_bytes(path, monkeypatch, read_align):
    """struct statx: mem and offset alignment at 152 and 156, that of reads (Linux 6.14) at 180, each under its mask."""

    class Libc:
        @staticmethod
        def statx(descriptor, name, flags, mask, answer):
            said = 0x2000 | (0x20000 if read_align else 0)
            answer[0:4] = said.to_bytes(4, "little")
            answer[152:160] = (512).to_bytes(4, "little") + (16384).to_bytes(4, "little")
            answer[180:184] = (4096).to_bytes(4, "little")
            return 0

    monkeypatch.setattr(direct_io, "_libc", lambda: Libc)
    assert direct_io.ask_alignment(0) == Alignment(512, 16384, read_align)
    assert direct_io.ask_alignment(0).for_reads_bytes == (read_align or 16384)


@pytest.mark.nvme
def test_reads_refused_later_go_on_through_the_page_cache(path, data, said, monkeypatch):
    """The probe at open went well; the first read of another part does not. Said once, and the mode shown follows."""
    real = os.preadv

    def refuse(descriptor, buffers, offset):
        if offset >= 4 * BLOCK and fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(descriptor, buffers, offset)

    with BlockReader(path, BLOCK, BLOCKS, announce=said.append) as reader:
        assert reader.mode == "direct"
        monkeypatch.setattr(os, "preadv", refuse)
        assert np.array_equal(read_all(reader), data)
        assert reader.mode == "buffered" and "refused (EINVAL)" in reader.reason and len(said) == 1
    monkeypatch.setattr(os, "preadv", real)
    with BlockReader(path, BLOCK, BLOCKS, direct=True) as reader:
        monkeypatch.setattr(os, "preadv", refuse)
        with pytest.raises(StoreError, match="Invalid argument"):
            reader.read_into(5, aligned_buffer(BLOCK))


@pytest.mark.nvme
def test_reads_served_from_the_page_cache_are_not_called_direct(path, said, monkeypatch):
    counts = iter([0, 2] * 6)
    monkeypatch.setattr(direct_io, "count_cached_pages", lambda *_: next(counts))
    with BlockReader(path, BLOCK, BLOCKS, announce=said.append) as reader:
        assert reader.mode == "buffered" and "go through the page cache" in reader.reason


@pytest.mark.parametrize("direct", [None, False])
def test_short_reads_are_continued(path, data, monkeypatch, direct):
    """However the kernel cuts a read, also in the middle of a page, the block arrives whole."""
    real = os.preadv
    with BlockReader(path, BLOCK, BLOCKS, direct=direct, announce=lambda line: None) as reader:
        for step in (4096, 5000, 8191):
            monkeypatch.setattr(
                os, "preadv", lambda fd, buffers, offset, step=step: min(step, real(fd, buffers, offset))
            )
            assert np.array_equal(read_all(reader), data)


@pytest.mark.nvme
def test_a_direct_read_is_continued_on_a_page(path, data, monkeypatch):
    real, starts = os.preadv, []

    def cut(descriptor, buffers, offset):
        starts.append(offset)
        return min(5000, real(descriptor, buffers, offset))

    with BlockReader(path, BLOCK, BLOCKS) as reader:
        monkeypatch.setattr(os, "preadv", cut)
        buffer = aligned_buffer(BLOCK)
        reader.read_into(1, buffer)
    assert np.array_equal(buffer, data[1]) and starts == [BLOCK, BLOCK + 4096]


@pytest.mark.nvme
def test_a_direct_read_that_never_fills_a_page_is_an_error(path, monkeypatch):
    with BlockReader(path, BLOCK, BLOCKS) as reader:
        monkeypatch.setattr(os, "preadv", lambda *_: 100)
        with pytest.raises(StoreError, match="less than a page"):
            reader.read_into(0, aligned_buffer(BLOCK))


def test_interrupted_reads_are_tried_again(path, data, monkeypatch):
    real, calls = os.preadv, []

    def interrupt_every_other(descriptor, buffers, offset):
        calls.append(offset)
        if len(calls) % 2:
            raise InterruptedError(errno.EINTR, "Interrupted system call")
        return real(descriptor, buffers, offset)

    with BlockReader(path, BLOCK, BLOCKS, direct=False) as reader:
        monkeypatch.setattr(os, "preadv", interrupt_every_other)
        for block in range(BLOCKS):
            buffer = aligned_buffer(BLOCK)
            reader.read_into(block, buffer)
            assert np.array_equal(buffer, data[block])
    assert len(calls) == 2 * BLOCKS


def test_a_failed_read_names_path_offset_wanted_and_got(path, monkeypatch):
    real = os.preadv

    def fail_late(descriptor, buffers, offset):
        if offset % BLOCK:
            raise OSError(errno.EIO, "Input/output error")
        return min(4096, real(descriptor, buffers, offset))

    with BlockReader(path, BLOCK, BLOCKS, direct=False) as reader:
        monkeypatch.setattr(os, "preadv", fail_late)
        with pytest.raises(StoreError) as caught:
            reader.read_into(3, aligned_buffer(BLOCK))
    for word in (str(path), f"offset {3 * BLOCK}", f"{BLOCK} bytes", "got 4096", "Input/output error"):
        assert word in str(caught.value)


def test_a_file_that_shrank_is_an_error_not_zeros(path):
    with BlockReader(path, BLOCK, BLOCKS, direct=False) as reader:
        os.truncate(path, BLOCK * BLOCKS - 4096)
        with pytest.raises(StoreError, match="got 4096: the file ends there"):
            reader.read_into(BLOCKS - 1, aligned_buffer(BLOCK))


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: aligned_buffer(BLOCK + 4096)[16 : 16 + BLOCK], "16 bytes into a page"),
        (lambda: aligned_buffer(BLOCK - 4096), f"uint8 \\[{BLOCK}\\] is needed"),
        (lambda: aligned_buffer(BLOCK).view(np.int8), "int8"),
        (lambda: aligned_buffer(2 * BLOCK)[::2], "contiguous"),
    ],
)
def test_unfit_buffers_are_refused_by_us_and_not_by_the_kernel(path, make, words):
    with BlockReader(path, BLOCK, BLOCKS, announce=lambda line: None) as reader:
        with pytest.raises(StoreError, match=words):
            reader.read_into(0, make())


def test_a_read_only_buffer_is_refused(path):
    buffer = aligned_buffer(BLOCK)
    buffer.flags.writeable = False
    with BlockReader(path, BLOCK, BLOCKS, direct=False) as reader, pytest.raises(StoreError, match="read-only"):
        reader.read_into(0, buffer)


@pytest.mark.parametrize("block", [-1, BLOCKS])
def test_blocks_outside_the_file_are_refused(path, block):
    with BlockReader(path, BLOCK, BLOCKS, direct=False) as reader, pytest.raises(StoreError, match="no block"):
        reader.read_into(block, aligned_buffer(BLOCK))


def test_a_missing_file_and_odd_sizes_are_named(tmp_path):
    with pytest.raises(StoreError, match="nowhere.bin: cannot be opened"):
        BlockReader(tmp_path / "nowhere.bin", BLOCK, BLOCKS)
    with pytest.raises(StoreError, match="whole pages"):
        BlockReader(tmp_path / "nowhere.bin", 5000, BLOCKS)
    with pytest.raises(StoreError, match="0 reader threads"):
        BlockReader(tmp_path / "nowhere.bin", BLOCK, BLOCKS, threads=0)


def test_a_fallback_is_announced_on_stderr_by_default(path, monkeypatch, capsys):
    monkeypatch.setattr(direct_io, "open_direct", lambda path, flags: (None, "of a reason of its own"))
    monkeypatch.setattr(reader_module, "_announced", set())
    BlockReader(path, BLOCK, BLOCKS).close()
    assert "of a reason of its own" in capsys.readouterr().err
