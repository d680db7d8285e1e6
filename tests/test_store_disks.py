"""Disks that are full, read-only, dying or without direct I/O, and sources that change: said in words, nothing left."""

import errno
import fcntl
import os
import shutil
import subprocess
import sys

import pytest
from stores import digests, quiet

from nemolab.cli import main
from nemolab.errors import CheckpointError, NemolabError, StoreError
from nemolab.store import Store, direct_io, files, repack, verify
from nemolab.store.direct_io import Alignment

pytest_plugins = ["store_fixtures"]


@pytest.fixture
def mounted(tmp_path):
    """mount(kind, options, name): a file system of its own, or a skip where this user may not mount."""
    points = []

    def mount(kind, options, name="disk"):
        point = tmp_path / name
        point.mkdir()
        words = ["mount", "-t", kind, "-o", options, kind, str(point)]
        try:
            done = subprocess.run(words, capture_output=True, text=True)
        except FileNotFoundError:
            pytest.skip("no mount command")
        if done.returncode:
            pytest.skip(f"mounting {kind} is not possible here: {done.stderr.strip()}")
        points.append(point)
        return point

    yield mount
    for point in reversed(points):
        subprocess.run(["umount", str(point)], check=True)


def store_bytes(store_path):
    return sum(path.stat().st_size for path in store_path.iterdir())


def test_a_small_disk_is_refused_before_anything_is_written(source, mounted):
    disk = mounted("tmpfs", "size=200k")
    with pytest.raises(StoreError, match=r"needs [\d,]+ bytes .*, 200,704 .* are free: [\d,]+ .* are missing"):
        repack(source, disk / "store", announce=quiet)
    assert list(disk.iterdir()) == []


@pytest.mark.parametrize("reserving", ["works", "is not supported"])
def test_a_disk_that_is_full_in_the_middle_is_left_empty(source, mounted, monkeypatch, reserving):
    """The check before the work is lied to, as by another program that fills the disk meanwhile."""
    disk = mounted("tmpfs", "size=100k")
    monkeypatch.setattr(files, "free_bytes", lambda folder, real=files.free_bytes: max(real(folder), 1 << 30))
    if reserving != "works":
        monkeypatch.setattr(os, "posix_fallocate", fail_with(errno.EOPNOTSUPP))
    with pytest.raises(StoreError, match="the disk is full: [0-9,]+ bytes are needed"):
        repack(source, disk / "store", announce=quiet)
    assert list(disk.iterdir()) == []


def test_a_disk_that_is_just_large_enough_is_used(source, store_path, mounted):
    disk = mounted("tmpfs", f"size={store_bytes(store_path) + (640 << 10)}")
    repack(source, disk / "store", announce=quiet)
    assert verify(disk / "store", source=source, all=True).mismatches == 0


def test_the_command_says_what_is_missing_and_ends_with_1(source, mounted, capsys):
    disk = mounted("tmpfs", "size=200k")
    assert main(["repack", str(source), "--to", str(disk / "store")]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "are missing" in err


def fail_with(number, after=0):
    calls = []

    def fail(*arguments):
        calls.append(arguments)
        if len(calls) > after:
            raise OSError(number, os.strerror(number))

    return fail


def failing(real, number, after):
    fail = fail_with(number, after)

    def call(*arguments, **named):
        fail(*arguments)
        return real(*arguments, **named)

    return call


@pytest.mark.parametrize(
    "call, number, after, words",
    [
        ("posix_fallocate", errno.ENOSPC, 0, "the disk is full: .* bytes are needed, .* are there, .* are free"),
        ("posix_fallocate", errno.ENOSPC, 1, "dense.safetensors.partial: the disk is full"),
        ("posix_fallocate", errno.EDQUOT, 0, "the quota is used up: .* bytes are needed"),
        ("pwritev", errno.ENOSPC, 6, "the disk is full"),
        ("pwritev", errno.EDQUOT, 6, "the quota is used up"),
        ("pwritev", errno.EIO, 0, r"experts.bin.partial: writing at offset \d+ failed: Input/output error"),
        ("pwritev", errno.EIO, 6, r"experts.bin.partial: writing at offset \d+ failed: Input/output error"),
        ("pwritev", errno.EROFS, 6, "Read-only file system"),
        ("fsync", errno.EIO, 1, "Input/output error"),
        ("fsync", errno.ENOSPC, 4, "No space left"),
        ("ftruncate", errno.EIO, 1, "Input/output error"),
        ("write", errno.ENOSPC, 5, "journal.partial: cannot be written .No space left"),
        ("replace", errno.EIO, 3, "cannot be put in its place .Input/output error"),
    ],
)
def test_every_failed_write_is_said_and_leaves_nothing(source, tmp_path, monkeypatch, call, number, after, words):
    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing(getattr(os, call), number, after))
        with pytest.raises(StoreError, match=words):
            repack(source, tmp_path / "other", announce=quiet)
    assert not (tmp_path / "other").exists()


def test_a_source_that_cannot_be_read_is_named(source, tmp_path, monkeypatch):
    real = os.preadv

    def dying(descriptor, buffers, offset):
        if "model-00002" in os.readlink(f"/proc/self/fd/{descriptor}") and offset > 8192:
            raise OSError(errno.EIO, "Input/output error")
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", dying)
    with pytest.raises(
        CheckpointError, match=r"model-00002.*: reading [\d,]+ bytes at offset [\d,]+ failed: Input/output"
    ):
        repack(source, tmp_path / "other", announce=quiet)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("step", [3000, 4096, 10_000])
def test_short_and_interrupted_reads_of_the_source_are_continued(source, tmp_path, store_path, monkeypatch, step):
    real, calls = os.preadv, []

    def cut(descriptor, buffers, offset):
        if "model-" not in os.readlink(f"/proc/self/fd/{descriptor}"):
            return real(descriptor, buffers, offset)
        calls.append(offset)
        direct = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT
        if direct and len(calls) % 5 == 0:
            raise InterruptedError(errno.EINTR, "Interrupted system call")
        return min(max(step, 4096) if direct else step, real(descriptor, buffers, offset))

    monkeypatch.setattr(os, "preadv", cut)
    repack(source, tmp_path / "other", announce=quiet)
    monkeypatch.undo()
    assert digests(tmp_path / "other") == digests(store_path)


def change_later(change):
    """As `progress`: at the first call, when the headers have long been read."""
    done = []

    def meanwhile(now, total):
        if not done:
            done.append(True)
            change()

    return meanwhile


def test_a_shard_cut_off_or_replaced_under_way_is_noticed(copied, tmp_path):
    shard = copied / "model-00002-of-00003.safetensors"
    raw, times = shard.read_bytes(), shard.stat()

    def replace_with_the_old_time():
        shard.rename(copied.parent / "aside")
        shard.write_bytes(raw)
        os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))

    changes = [lambda: os.truncate(shard, 5000), replace_with_the_old_time, shard.unlink]
    for change in changes:
        with pytest.raises(NemolabError, match="was changed|ended early|cannot be opened"):
            repack(copied, tmp_path / "other", progress=change_later(change), announce=quiet)
        assert not (tmp_path / "other").exists()
        shard.write_bytes(raw)


def test_targets_that_cannot_be_are_said(source, tmp_path):
    (tmp_path / "file").write_text("here already")
    with pytest.raises(StoreError, match="cannot be used .Not a directory"):
        repack(source, tmp_path / "file" / "store", announce=quiet)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(StoreError, match="is a link to .*nowhere.*, which does not exist"):
        repack(source, tmp_path / "dangling", announce=quiet)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    repack(source, tmp_path / "link", announce=quiet)
    assert verify(tmp_path / "real").mismatches == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "file", "link", "real"]


def test_a_target_within_the_source_leaves_the_source_as_it_is(copied):
    before = digests(copied)
    repack(copied, copied / "store", announce=quiet)
    assert verify(copied / "store", source=copied, all=True).mismatches == 0
    shutil.rmtree(copied / "store")
    assert digests(copied) == before


def test_a_read_only_file_system_is_said(source, mounted):
    disk = mounted("tmpfs", "size=4m")
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    with pytest.raises(StoreError, match="cannot be used .Read-only file system"):
        repack(source, disk / "store", announce=quiet)


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_folder_nobody_may_write_in_is_said(source, tmp_path, monkeypatch, number):
    """As root no mode stops us, so the kernel's answer is pretended."""
    real = os.open

    def refuse(name, flags, *rest, **named):
        if str(name).endswith(files.PARTIAL):
            raise OSError(number, os.strerror(number), str(name))
        return real(name, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refuse)
    (tmp_path / "locked").mkdir()
    with pytest.raises(StoreError, match=f"cannot be used .{os.strerror(number)}"):
        repack(source, tmp_path / "locked", announce=quiet)


def test_overlay_gives_the_same_store(source, store_path, mounted, tmp_path):
    for name in ("lower", "upper", "work"):
        (tmp_path / name).mkdir()
    options = f"lowerdir={tmp_path / 'lower'},upperdir={tmp_path / 'upper'},workdir={tmp_path / 'work'}"
    disk = mounted("overlay", options)
    repack(source, disk / "store", announce=quiet)
    ours = digests(disk / "store")
    assert {name for name, digest in digests(store_path).items() if digest != ours[name]} <= {files.MANIFEST}
    with Store.open(disk / "store").open_reader(announce=quiet) as reader:
        assert reader.mode in ("direct", "buffered") and reader.reason


def test_a_source_on_tmpfs_is_read_through_the_page_cache_and_said_once(source, store_path, mounted, tmp_path):
    disk, said = mounted("tmpfs", "size=64m"), []
    shutil.copytree(source, disk / "source")
    done = repack(disk / "source", tmp_path / "other", announce=said.append)
    assert (tmp_path / "other" / files.EXPERTS).read_bytes() == (store_path / files.EXPERTS).read_bytes()
    assert len([line for line in said if "reading through the page cache" in line]) == (not done.source_direct)


@pytest.mark.nvme
@pytest.mark.parametrize(
    "wants, written, read",
    [
        (Alignment(512, 512), True, True),
        (Alignment(4096, 4096), True, True),
        (Alignment(512, 8192), True, True),
        (Alignment(512, 16384), False, True),
        (Alignment(512, 16384, 4096), False, True),
        (Alignment(512, 32768), False, True),
        (Alignment(512, 1 << 20), False, False),
        (Alignment(8192, 512), False, False),
        (Alignment(0, 0), False, False),
        (None, True, True),
    ],
)
def test_any_alignment_gives_the_same_bytes(source, store_path, tmp_path, monkeypatch, wants, written, read):
    """Blocks of 8192 bytes here; the source is read in aligned ranges of whatever width, up to 64 KiB."""
    monkeypatch.setattr(direct_io, "ask_alignment", lambda descriptor: wants)
    said = []
    done = repack(source, tmp_path / "other", announce=said.append)
    assert (done.direct_io, done.source_direct) == (written, read)
    assert len([line for line in said if "writing through" in line]) == (not written)
    assert len([line for line in said if "reading through" in line]) == (not read)
    ours = digests(tmp_path / "other")
    other = {name for name, digest in digests(store_path).items() if digest != ours[name]}
    assert other == (set() if written else {files.MANIFEST})


@pytest.mark.nvme
def test_a_source_whose_direct_reads_fail_is_read_otherwise(source, store_path, tmp_path, monkeypatch):
    real, said = os.preadv, []

    def refuse(descriptor, buffers, offset):
        direct = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT
        if direct and "model-" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", refuse)
    assert repack(source, tmp_path / "other", announce=said.append).source_direct is False
    assert len([line for line in said if "an aligned read fails (EINVAL)" in line]) == 1
    assert digests(tmp_path / "other") == digests(store_path)


def test_an_interrupt_ends_the_command_at_once_and_leaves_nothing(source, tmp_path):
    script = (
        "import os, signal, sys, time\n"
        "import nemolab.store.writer as writer\n"
        "real, begun = writer.PlacedFile.write, []\n"
        "def slow(self, *rest):\n"
        "    if not begun:\n"
        "        begun.append(1)\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(0.2)\n"
        "    return real(self, *rest)\n"
        "writer.PlacedFile.write = slow\n"
        "from nemolab.cli import main\n"
        "sys.exit(main(['repack', sys.argv[1], '--to', sys.argv[2]]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, source, tmp_path / "a" / "store"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr.strip()) == (130, "nemolab: interrupted")
    assert not (tmp_path / "a").exists()


def test_a_missing_small_file_is_named_at_repack_and_where_it_is_needed(copied, tmp_path, capsys):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (copied / name).unlink(missing_ok=True)
    assert main(["repack", str(copied), "--to", str(tmp_path / "other"), "--json"]) == 0
    assert "tokenizer.json, tokenizer_config.json" in capsys.readouterr().err
    assert Store.open(tmp_path / "other").manifest.missing_small_files == ["tokenizer.json", "tokenizer_config.json"]
