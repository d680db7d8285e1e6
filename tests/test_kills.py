"""Killed at any moment: nothing looks finished that is not, and the next run ends with an undisturbed one's bytes.

The storms are short here: every kind of system call, few moments. NEMOLAB_STORM=200 adds so many moments to each.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import kills
import pytest
from stores import damage, digests, quiet
from synthetic import write_checkpoint

from nemolab.cli import main
from nemolab.errors import StoreError
from nemolab.store import Store, ensure_store, files, repack, verify
from nemolab.store.journal import JOURNAL, Journal
from nemolab.store.target import MARKER, Target
from nemolab.store.tensor_file import Written

pytest_plugins = ["store_fixtures"]
KILLS = Path(__file__).parent / "kills.py"


class Killed(BaseException):
    """Stands for the end of the process in tests that need no real one."""


def killed(patch, owner, name, after=False):
    """Let the process seem to be killed at a call of `owner.name`: nothing is tidied up, as after SIGKILL."""
    real = getattr(owner, name)

    def die(*arguments):
        if after:
            real(*arguments)
        raise Killed

    def only_close(self):
        self.journal.close()
        os.close(self._lock)

    patch.setattr(owner, name, die)
    patch.setattr(Target, "_abandon", only_close)
    return pytest.raises(Killed)


def test_killed_at_any_moment_a_rerun_is_identical(source, tmp_path):
    more = os.environ.get("NEMOLAB_STORM", "0")
    done = subprocess.run([sys.executable, KILLS, source, tmp_path, "1", more], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    storms = json.loads(done.stdout)
    assert [problem for found in storms.values() for problem in found["problems"]] == []
    found = storms["repack calls"]
    assert {"replace", "fsync", "pwritev", "write", "unlink", "open", "mkdir"} <= set(found["calls"])
    assert found["kills"] >= 2 * len(found["calls"]), "the kills are real"
    assert max(found["resumed_blocks"]) >= 8, "and what was written is not made again"
    assert storms["ensure calls"]["kills"] >= 4 and storms["repack delays"]["kills"] >= 3


def test_a_store_that_only_looks_finished_would_be_found(source, store_path, tmp_path):
    """The checker itself, on what a careless repack would leave: a manifest beside a block that was not written."""
    killer, wanted = kills.Killer("repack", source, tmp_path), digests(store_path)
    damage(store_path / files.EXPERTS, 5)
    killer.finish(store_path, wanted, "a damaged block")
    assert killer.problems == [
        "a damaged block: it can be opened and is not whole",
        f"a damaged block: other bytes after the rerun: ['{files.EXPERTS}']",
    ]


@pytest.fixture(scope="module")
def cut_off_once(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cut-off") / "store"
    with pytest.MonkeyPatch.context() as patch, killed(patch, Journal, "add_file", after=True):
        repack(source, folder, announce=quiet)
    return folder


@pytest.fixture
def cut_off(cut_off_once, tmp_path):
    """A repack killed after its dense file, and the journal it left."""
    return Path(shutil.copytree(cut_off_once, tmp_path / "cut-off"))


@pytest.mark.parametrize("name", [None, "config.json"])
def test_chat_with_an_unfinished_store_says_what_it_is(cut_off, source, name, capsys):
    if name:
        shutil.copy(source / name, cut_off)
    assert main(["chat", str(cut_off), "--prompt", "Hi"]) == 1
    assert "interrupted or is still at work; run `nemolab repack` again" in capsys.readouterr().err


def test_all_blocks_and_the_dense_file_are_kept(source, cut_off, store_path):
    dense_before, said = (cut_off / files.DENSE).stat(), []
    done = repack(source, cut_off, announce=said.append)
    assert done.resumed_blocks == done.blocks == 16
    assert "going on with a repack that was cut off: 16 of 16 blocks were written" in said[0]
    dense_after = (cut_off / files.DENSE).stat()
    assert (dense_before.st_ino, dense_before.st_mtime_ns) == (dense_after.st_ino, dense_after.st_mtime_ns)
    small = [files.CHECKSUMS, files.GLOBALS, "config.json", "tokenizer.json"]
    assert done.bytes_written < sum((cut_off / name).stat().st_size for name in small) + 20_000
    assert digests(cut_off) == digests(store_path)


def test_a_whole_expert_file_of_a_killed_run_is_looked_at_again(source, cut_off, store_path):
    damage(cut_off / files.EXPERTS, 5)
    assert repack(source, cut_off, announce=quiet).resumed_blocks == 15
    assert digests(cut_off) == digests(store_path)


@pytest.mark.parametrize(
    "spoil, kept",
    [
        (lambda folder: (folder / files.EXPERTS).unlink(), 0),
        (lambda folder: os.truncate(folder / files.EXPERTS, 9 * 8192 + 100), 9),
        (lambda folder: os.truncate(folder / files.EXPERTS, 10**7), 16),
        (lambda folder: (folder / files.EXPERTS).write_bytes(b""), 0),
        (lambda folder: (folder / files.DENSE).unlink(), 16),
        (lambda folder: damage(folder / files.DENSE, 5000), 16),
        (lambda folder: os.truncate(folder / files.DENSE, 5000), 16),
        (lambda folder: (folder / JOURNAL).unlink(), 0),
        (lambda folder: (folder / JOURNAL).write_bytes(b"\xff" * 5000), 0),
        (lambda folder: os.truncate(folder / JOURNAL, 10 * len("12345678 " + '{"block":0,"crc32":1}\n')), None),
        (lambda folder: (folder / MARKER).write_bytes(b""), 0),
        (lambda folder: (folder / "config.json").write_text("{}"), 16),
        (lambda folder: (folder / "manifest.json.partial").write_text("{"), 16),
    ],
)
def test_parts_deleted_or_damaged_by_hand_are_made_again(source, cut_off, store_path, spoil, kept):
    assert (cut_off / files.EXPERTS).stat().st_size == 16 * 8192
    spoil(cut_off)
    found = repack(source, cut_off, announce=quiet).resumed_blocks
    assert found == kept or (kept is None and 0 < found < 16)
    assert digests(cut_off) == digests(store_path)


@pytest.mark.parametrize("name", [files.EXPERTS, files.DENSE, JOURNAL])
def test_a_link_in_the_place_of_a_part_is_not_followed(source, cut_off, store_path, tmp_path, name):
    precious = tmp_path / "precious"
    precious.write_bytes(b"years of work")
    (cut_off / name).unlink()
    (cut_off / name).symlink_to(precious)
    repack(source, cut_off, announce=quiet)
    assert precious.read_bytes() == b"years of work"
    assert digests(cut_off) == digests(store_path)


def test_another_layout_or_source_is_refused_and_what_is_there_kept(source, cut_off, tmp_path):
    before = digests(cut_off)
    with pytest.raises(StoreError, match="unfinished repack of another kind: layout is 'neuron', 'source' was asked"):
        repack(source, cut_off, layout="source", announce=quiet)
    other = write_checkpoint(tmp_path / "other", vocab=300)
    with pytest.raises(StoreError, match=r"source differs in model-0000.*: .*bytes \d+.* then, .*bytes \d+.* now"):
        repack(other, cut_off, announce=quiet)
    assert digests(cut_off) == before


@pytest.fixture
def own_cut_off(copied, tmp_path):
    """A source that a test may change, and a repack of it that was killed before its manifest."""
    folder = tmp_path / "own-cut-off"
    with pytest.MonkeyPatch.context() as patch, killed(patch, Target, "commit"):
        repack(copied, folder, announce=quiet)
    return copied, folder


def test_a_shard_replaced_in_between_is_refused_with_both_times(own_cut_off):
    copied, folder = own_cut_off
    shard = copied / "model-00002-of-00003.safetensors"
    then = shard.stat().st_mtime_ns
    damage(shard, shard.stat().st_size - 5)
    now, before = shard.stat().st_mtime_ns, digests(folder)
    with pytest.raises(StoreError, match=f"{shard.name}: mtime_ns {then} then, mtime_ns {now} now"):
        repack(copied, folder, announce=quiet)
    assert digests(folder) == before


def test_a_shard_changed_under_its_old_time_is_read_anew(own_cut_off, tmp_path):
    """Somebody put the time back: the inode tells, nothing is kept, and the new bytes are in the store."""
    copied, folder = own_cut_off
    shard = copied / "model-00002-of-00003.safetensors"
    times = shard.stat()
    damage(shard, shard.stat().st_size - 5)
    os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))
    said = []
    assert repack(copied, folder, announce=said.append).resumed_blocks == 0
    assert "its source was touched since: it begins again" in said[0]
    assert verify(folder, source=copied, all=True).mismatches == 0


def test_a_changed_small_file_is_refused_with_both_hashes(own_cut_off):
    copied, folder = own_cut_off
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"routed_scaling_factor": 1.5}))
    with pytest.raises(StoreError, match=r"source differs in config\.json: [0-9a-f]{16} then, [0-9a-f]{16} now"):
        repack(copied, folder, announce=quiet)


def test_an_interrupt_of_a_run_that_goes_on_cleans_up_too(source, cut_off):
    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        repack(source, cut_off, progress=interrupt, announce=quiet)
    assert list(cut_off.iterdir()) == []


def test_a_refusal_before_the_work_keeps_what_is_there(source, cut_off, store_path, monkeypatch):
    """A disk that filled up meanwhile costs nothing but a line: what was written waits."""
    before = digests(cut_off)
    with monkeypatch.context() as patch:
        patch.setattr(files, "free_bytes", lambda folder: 100)
        patch.setattr(files, "allocated_bytes", lambda path: 0)
        with pytest.raises(StoreError, match="are missing"):
            repack(source, cut_off, announce=quiet)
    renamed = {
        {files.EXPERTS + files.PARTIAL: files.EXPERTS}.get(name, name): sum for name, sum in digests(cut_off).items()
    }
    assert renamed == before
    assert repack(source, cut_off, announce=quiet).resumed_blocks == 16
    assert digests(cut_off) == digests(store_path)


def test_what_is_written_counts_as_space(source, cut_off, store_path, monkeypatch):
    monkeypatch.setattr(files, "free_bytes", lambda folder: 520_000)
    with pytest.raises(StoreError, match="are missing"):
        repack(source, cut_off.with_name("fresh"), announce=quiet)
    assert repack(source, cut_off, announce=quiet).resumed_blocks == 16


def test_two_at_once_the_second_is_refused_while_the_first_goes_on(source, cut_off, store_path):
    def meanwhile(done, total):
        with pytest.raises(StoreError, match="another repack is at work there"):
            repack(source, cut_off, announce=quiet)

    repack(source, cut_off, progress=meanwhile, announce=quiet)
    assert digests(cut_off) == digests(store_path)


def test_leftovers_beside_a_manifest_are_tidied_up(source, store_path):
    """Killed between the manifest and the removal of the marker: it is a store, and the next look removes the rest."""
    wanted = digests(store_path)
    for name in (MARKER, JOURNAL, files.EXPERTS + files.PARTIAL):
        (store_path / name).write_bytes(b"left")
    assert repack(source, store_path, announce=quiet).already_complete
    assert digests(store_path) == wanted


def test_an_interrupt_of_the_tidying_leaves_nothing_that_looks_finished(source, tmp_path, store_path, monkeypatch):
    """Ctrl-C just after the manifest, and again while what was written is removed: the manifest goes first."""
    folder = tmp_path / "stopped"
    wanted, real, removed = digests(store_path), Path.unlink, []

    def unlink(path, **named):
        if path.name != files.MANIFEST + files.PARTIAL and ((folder / files.MANIFEST).exists() or removed):
            removed.append(path.name)
            if len(removed) > 2:
                raise KeyboardInterrupt
        real(path, **named)

    def commit(self, manifest):
        manifest.write(self.folder)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Target, "commit", commit)
        patch.setattr(Path, "unlink", unlink)
        repack(source, folder, announce=quiet)
    assert removed[0] == files.MANIFEST
    with pytest.raises(StoreError, match="interrupted or is still at work"):
        Store.open(folder)
    repack(source, folder, announce=quiet)
    assert digests(folder) == wanted


@pytest.mark.parametrize("name", [files.EXPERTS, files.CHECKSUMS, files.DENSE, files.GLOBALS, "tokenizer.json"])
def test_a_finished_store_that_lacks_a_part_is_made_again(source, store_path, name):
    wanted, said = digests(store_path), []
    (store_path / name).unlink()
    assert not repack(source, store_path, announce=said.append).already_complete
    assert f"{name} is missing; the manifest lists it" in said[0] and "made again" in said[0]
    assert digests(store_path) == wanted
    os.truncate(store_path / name, 50)
    with pytest.raises(StoreError, match="holds another store: layout is 'neuron', 'source' was asked for"):
        repack(source, store_path, layout="source", announce=quiet)
    repack(source, store_path, announce=quiet)
    assert digests(store_path) == wanted


def test_a_cache_folder_cleared_half_way_is_made_again(source, tmp_path, monkeypatch):
    """Killed while it removed a damaged store: files without manifest and marker, in a folder that is ours."""
    monkeypatch.setenv("NEMOLAB_CACHE", str(tmp_path / "cache"))
    path = ensure_store(source, announce=quiet)
    wanted = digests(path)
    (path / files.MANIFEST).unlink()
    (path / files.DENSE).unlink()
    assert ensure_store(source, announce=quiet) == path
    assert digests(path) == wanted


def test_a_journal_passes_over_what_does_not_check_out(tmp_path):
    journal = Journal(tmp_path)
    for index in range(5):
        journal.add_block(index, 1000 + index)
    journal.add_file("dense.safetensors", Written(7, 8, {"a": 9}))
    journal.add_block(3, 77)
    journal.close()
    raw = (tmp_path / JOURNAL).read_bytes()
    for cut in range(len(raw) + 1):
        (tmp_path / JOURNAL).write_bytes(raw[:cut])
        torn = Journal(tmp_path)
        torn.add_block(9, 9)
        torn.close()
        again = Journal(tmp_path)
        again.close()
        assert again.blocks.pop(9) == 9, "what follows a torn line is read"
        assert again.blocks.items() <= {0: 1000, 1: 1001, 2: 1002, 3: again.blocks.get(3), 4: 1004}.items()
        assert again.blocks.get(3) in (None, 1003, 77) and again.files in (
            {},
            {"dense.safetensors": Written(7, 8, {"a": 9})},
        )
    for place in range(len(raw)):
        spoilt = bytearray(raw)
        spoilt[place] ^= 0x20
        (tmp_path / JOURNAL).write_bytes(spoilt)
        read = Journal(tmp_path)
        read.close()
        assert set(read.blocks.values()) <= {1000, 1001, 1002, 1003, 77, 1004}
    for place in range(len(raw)):  # another digit is good JSON: only the line's own crc32 tells
        spoilt = bytearray(raw)
        spoilt[place] ^= 0x01
        (tmp_path / JOURNAL).write_bytes(spoilt)
        read = Journal(tmp_path)
        read.close()
        assert read.blocks.items() <= {0: 1000, 1: 1001, 2: 1002, 3: read.blocks.get(3), 4: 1004}.items()
        assert read.blocks.get(3) in (None, 1003, 77)


def test_chat_after_a_killed_chat_goes_on_and_answers(tiny_path, tmp_path, monkeypatch, capsys):
    """The store that a command makes on the way: killed while it was made, the next command makes the rest."""
    monkeypatch.setenv("NEMOLAB_CACHE", str(tmp_path))
    words = ["chat", str(tiny_path), "--prompt", "Hi", "--max-tokens", "2"]
    with monkeypatch.context() as patch, killed(patch, files, "rename"):
        main(words)
    assert main(words) == 0
    assert "going on with a repack that was cut off" in capsys.readouterr().err
    (made,) = (path for path in (tmp_path / "stores").iterdir() if path.is_dir())
    assert verify(made, source=tiny_path, all=True).mismatches == 0
    assert not list(made.glob("*" + files.PARTIAL))
