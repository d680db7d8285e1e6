"""Where a store is made: what may be written over, and what interruptions and full disks leave behind."""

import errno
import json
import os

import pytest
from stores import damage, digests, quiet
from synthetic import write_checkpoint

from nemolab.checkpoint import Checkpoint
from nemolab.errors import NemolabError, StoreError
from nemolab.store import files, repack, verify

pytest_plugins = ["store_fixtures"]


def test_the_same_store_is_left_alone(source, store_path):
    before, said = {path: path.stat().st_mtime_ns for path in store_path.iterdir()}, []
    result = repack(source, store_path, announce=said.append)
    assert result.already_complete and result.bytes_written == 0 and result.blocks == 16
    assert "already this store" in said[0]
    assert {path: path.stat().st_mtime_ns for path in store_path.iterdir()} == before


def test_a_touched_source_is_looked_at_and_accepted(copied, tmp_path):
    repack(copied, tmp_path / "store", announce=quiet)
    for path in copied.iterdir():
        os.utime(path)
    said = []
    assert repack(copied, tmp_path / "store", announce=said.append).already_complete
    assert "16 blocks were compared" in said[0]


def test_other_weights_in_files_of_the_same_form_are_refused(copied, tmp_path):
    repack(copied, tmp_path / "store", announce=quiet)
    entry = Checkpoint.open(copied).entry("backbone.layers.1.mixer.experts.3.up_proj.weight")
    damage(copied / entry.shard, entry.offset_bytes + 5)
    before = digests(tmp_path / "store")
    with pytest.raises(StoreError, match="other weights .* layer 1, expert 3 .*up_values row 0 byte 5"):
        repack(copied, tmp_path / "store", announce=quiet)
    assert digests(tmp_path / "store") == before


def test_another_layout_or_model_is_refused_and_the_store_kept(source, store_path, tmp_path):
    before = digests(store_path)
    with pytest.raises(StoreError, match="layout is 'neuron', 'source' was asked for"):
        repack(source, store_path, layout="source", announce=quiet)
    other = write_checkpoint(tmp_path / "other", inter=64)
    with pytest.raises(StoreError, match="expert_inter is 96, 64 was asked for"):
        repack(other, store_path, announce=quiet)
    third = write_checkpoint(tmp_path / "third", kv_scales=True)
    with pytest.raises(StoreError, match="source differs in model-0000"):
        repack(third, store_path, announce=quiet)
    assert digests(store_path) == before


def test_a_changed_config_is_another_source(copied, tmp_path):
    repack(copied, tmp_path / "store", announce=quiet)
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"routed_scaling_factor": 1.5}))
    with pytest.raises(StoreError, match=r"source differs in config\.json"):
        repack(copied, tmp_path / "store", announce=quiet)


def test_folders_that_are_no_store_are_not_touched(source, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(StoreError, match="holds 'thesis.txt' and is no store"):
        repack(source, tmp_path / "mine", announce=quiet)
    assert os.listdir(tmp_path / "mine") == ["thesis.txt"]
    with pytest.raises(StoreError, match="is a file"):
        repack(source, tmp_path / "mine" / "thesis.txt", announce=quiet)
    before = digests(source)
    with pytest.raises(StoreError, match="is a checkpoint and no store"):
        repack(source, source, announce=quiet)
    assert digests(source) == before


def test_an_empty_folder_and_missing_parents_are_used(source, tmp_path):
    (tmp_path / "empty").mkdir()
    repack(source, tmp_path / "empty", announce=quiet)
    repack(source, tmp_path / "a" / "b" / "store", announce=quiet)
    assert digests(tmp_path / "empty") == digests(tmp_path / "a" / "b" / "store")


def test_experts_of_another_format_are_refused(tmp_path):
    source = write_checkpoint(tmp_path / "source", routed="bf16")
    with pytest.raises(StoreError, match="is bf16; blocks hold nvfp4 experts only"):
        repack(source, tmp_path / "store", announce=quiet)
    dense = write_checkpoint(tmp_path / "dense", pattern="M-*")
    with pytest.raises(NemolabError, match="no MoE layer"):
        repack(dense, tmp_path / "store", announce=quiet)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_a_nan_scale_is_refused_with_its_place(copied, tmp_path, byte):
    entry = Checkpoint.open(copied).entry("backbone.layers.4.mixer.experts.2.down_proj.weight_scale")
    row, group = 5, 3
    offset = entry.offset_bytes + row * entry.shape[1] + group
    with open(copied / entry.shard, "r+b") as file:
        file.seek(offset)
        file.write(bytes([byte]))
    with pytest.raises(NemolabError, match=r"layers\.4\.mixer\.experts\.2\.down_proj.*row 5, group 3"):
        repack(copied, tmp_path / "store", announce=quiet)
    assert not (tmp_path / "store").exists()


def test_an_interrupt_leaves_nothing_behind(source, tmp_path):
    def interrupt(done, total):
        raise KeyboardInterrupt

    (tmp_path / "empty").mkdir()
    for target in (tmp_path / "new" / "store", tmp_path / "empty"):
        with pytest.raises(KeyboardInterrupt):
            repack(source, target, progress=interrupt, announce=quiet)
    assert not (tmp_path / "new").exists() and os.listdir(tmp_path / "empty") == []


def test_a_source_that_changes_meanwhile_is_noticed(copied, tmp_path):
    def touch(done, total):
        os.utime(copied / "model-00001-of-00003.safetensors")

    with pytest.raises(StoreError, match="was changed while it was repacked"):
        repack(copied, tmp_path / "store", progress=touch, announce=quiet)
    assert not (tmp_path / "store").exists()


def test_a_target_in_use_is_refused(source, tmp_path):
    def meanwhile(done, total):
        with pytest.raises(StoreError, match="another repack is at work there"):
            repack(source, tmp_path / "store", announce=quiet)

    repack(source, tmp_path / "store", progress=meanwhile, announce=quiet)
    assert verify(tmp_path / "store").mismatches == 0


def test_too_little_space_is_said_before_anything_is_written(source, tmp_path, monkeypatch):
    real = os.statvfs

    class Small:
        f_bavail, f_frsize = 10, 4096

    monkeypatch.setattr(os, "statvfs", lambda path: Small)
    with pytest.raises(StoreError, match=r"needs [\d,]+ bytes .* 40,960 .* are free: [\d,]+ .* are missing"):
        repack(source, tmp_path / "store", announce=quiet)
    monkeypatch.setattr(os, "statvfs", real)
    assert not (tmp_path / "store").exists()


def test_a_file_system_that_cannot_reserve_gets_the_same_store(source, tmp_path, store_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    repack(source, tmp_path / "other", announce=quiet)
    assert digests(tmp_path / "other") == digests(store_path)


def test_a_real_full_disk_is_said_too(source, tmp_path):
    """/dev/full answers every write with ENOSPC."""
    os.symlink("/dev/full", tmp_path / ("dense.safetensors" + files.PARTIAL))
    with pytest.raises(StoreError, match=r"dense\.safetensors: cannot be written \(No space left on device\)"):
        with files.finished_file(tmp_path / "dense.safetensors") as file:
            file.write(b"x")
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_target_is_said(source, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(StoreError, match="cannot be used"):
        repack(source, tmp_path / "locked" / "store", announce=quiet)
