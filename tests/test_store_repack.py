"""Repack and verify: every byte in its place, damage found, nothing half-done that looks done."""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tracemalloc
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from synthetic import write_checkpoint

from nemolab.checkpoint import Checkpoint
from nemolab.checkpoint.safetensors_header import read_header
from nemolab.errors import NemolabError, StoreError
from nemolab.store import BlockLayout, ExpertCache, Store, ensure_store, files, repack, verify
from nemolab.store.layout import LAYOUTS
from nemolab.store.nibbles import transpose_nibbles
from nemolab.store.target import MARKER
from nemolab.store.verify import sample_blocks

SHM = Path("/dev/shm")
SHAPES = {
    "plain": {},
    "no latent": {"latent": None},
    "whole pages": {"latent": 128, "inter": 256, "experts": 4},
    "many experts": {"pattern": "E*", "experts": 201, "latent": 16, "inter": 16},
    "all the extras": {"prefix": "language_model.backbone.", "mtp": True, "vision": "timm", "kv_scales": True},
    "without input scales": {"input_scale": False, "single_file": True, "metadata": "hf_quant"},
}


def quiet(line):
    """For `announce` where a test is about something else."""


def digests(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(Path(folder).iterdir())}


def damage(path, offset, flip=0x01):
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ flip]))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "source")


@pytest.fixture(scope="module")
def forms(tmp_path_factory):
    """Each shape, written when it is first asked for."""
    folder, made = tmp_path_factory.mktemp("forms"), {}

    def form(shape):
        if shape not in made:
            made[shape] = write_checkpoint(folder / shape.replace(" ", "-"), **SHAPES[shape])
        return made[shape]

    return form


@pytest.fixture
def store_path(source, tmp_path):
    repack(source, tmp_path / "store", announce=quiet)
    return tmp_path / "store"


@pytest.fixture
def copied(source, tmp_path):
    """A copy of the source that a test may change."""
    return Path(shutil.copytree(source, tmp_path / "copied"))


# ---- what a store holds


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_form_repacks_and_verifies(forms, tmp_path, shape, layout):
    source = forms(shape)
    result = repack(source, tmp_path / "store", layout=layout, announce=quiet)
    store, checkpoint = Store.open(tmp_path / "store"), Checkpoint.open(source)
    assert result.blocks == store.n_layers * store.n_experts == len(checkpoint.config.moe_layers) * store.n_experts
    assert (tmp_path / "store" / files.EXPERTS).stat().st_size == result.blocks * result.block_bytes
    assert (
        result.bytes_written
        == sum(path.stat().st_size for path in store.path.iterdir()) - (store.path / files.MANIFEST).stat().st_size
    )
    for check in ({}, {"source": source}, {"source": source, "all": True}):
        found = verify(store, **check)
        assert found.mismatches == 0 and found.details == []
        assert found.checked == (min(200, result.blocks) if check == {"source": source} else result.blocks)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_views_hold_the_experts_of_the_checkpoint(source, tmp_path, layout):
    repack(source, tmp_path / "store", layout=layout, announce=quiet)
    store, checkpoint = Store.open(tmp_path / "store"), Checkpoint.open(source)
    with ExpertCache(store, slots=10**6) as cache:
        for layer in range(store.n_layers):
            for expert, block in enumerate(cache.lookup(layer, range(store.n_experts))):
                published = checkpoint.expert(layer, expert)
                planes = store.block_layout.unpack(block)
                for name in planes._fields:
                    assert np.array_equal(getattr(planes, name), getattr(published, name)), name
                assert np.array_equal(store.views(block).up_values, published.up_values)
                assert store.globals[layer, expert].tolist() == [published.up_scale_2, published.down_scale_2]


def test_the_shipped_model_repacks(tiny_path, tmp_path):
    repack(tiny_path, tmp_path / "store", announce=quiet)
    assert verify(tmp_path / "store", source=tiny_path, all=True).mismatches == 0


def test_dense_tensors_are_the_stored_bytes(forms, tmp_path):
    source = forms("all the extras")
    repack(source, tmp_path / "store", announce=quiet)
    store, checkpoint = Store.open(tmp_path / "store"), Checkpoint.open(source)
    with safe_open(store.path / files.DENSE, "pt") as library:  # and the reference library reads the file alike
        assert set(library.keys()) == set(store.dense_tensors)
        for name in library.keys():
            assert library.get_tensor(name).dtype == store.dense_tensor(name).dtype == checkpoint.tensor(name).dtype
            assert library.get_tensor(name).shape == checkpoint.tensor(name).shape
    for name, module in store.dense.items():
        wanted = checkpoint.modules[name]
        format, tensors, shape = store.dense_module(name)
        assert (format, shape, module.part) == (wanted.format, wanted.shape, wanted.part)
        for suffix, tensor in tensors.items():
            assert (
                tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
                == checkpoint.read_bytes(wanted.tensors[suffix].name).tobytes()
            )
    with pytest.raises(StoreError, match="no tensor 'nothing'"):
        store.dense_tensor("nothing")
    with pytest.raises(StoreError, match="no dense module 'nothing'"):
        store.dense_module("nothing")


def test_every_tensor_is_accounted_for(forms, tmp_path):
    """Dense, routed or left out by name: the three together are the checkpoint, without overlap."""
    source = forms("all the extras")
    repack(source, tmp_path / "store", announce=quiet)
    store, checkpoint = Store.open(tmp_path / "store"), Checkpoint.open(source)
    left_out = store.manifest.left_out
    assert set(left_out) == {"input_scale", "mtp", "vision"}
    routed = [
        entry.name
        for module in checkpoint.modules.values()
        if module.part == "routed"
        for suffix, entry in module.tensors.items()
        if suffix != "input_scale"
    ]
    source_names = {entry.source_name: name for name, entry in checkpoint.tensors.items()}
    named = [source_names[name] for names in left_out.values() for name in names]
    assert sorted([*store.dense_tensors, *routed, *named]) == sorted(checkpoint.tensors)
    assert any(name.startswith("language_model.mtp.") for name in left_out["mtp"])
    assert any(name.endswith("k_scale") for name in store.dense_tensors)


def test_small_files_are_copied_and_missing_ones_named(copied, tmp_path):
    (copied / "chat_template.jinja").unlink()
    said = []
    repack(copied, tmp_path / "store", announce=said.append)
    store = Store.open(tmp_path / "store")
    assert store.small_file("tokenizer.json").read_bytes() == (copied / "tokenizer.json").read_bytes()
    assert store.small_file("chat_template.jinja") is None and store.small_file("manifest.json") is None
    assert store.manifest.missing_small_files == ["chat_template.jinja"]
    assert "chat_template.jinja" in said[0]


def test_two_repacks_are_identical_to_the_last_byte(source, tmp_path, store_path):
    repack(source, tmp_path / "again", announce=quiet)
    assert digests(tmp_path / "again") == digests(store_path)


def test_progress_reaches_its_total(source, tmp_path):
    calls = []
    repack(source, tmp_path / "store", progress=lambda done, total: calls.append((done, total)), announce=quiet)
    assert calls[-1][0] == calls[-1][1] > 0
    assert calls == sorted(calls) and len({total for _, total in calls}) == 1


def test_large_dense_tensors_are_streamed(tmp_path):
    """Two matrices of 16 MiB and chunks of 8: the peak stays below one matrix and a chunk."""
    source = write_checkpoint(tmp_path / "source", pattern="E*", vocab=65536, hidden=128)
    tracemalloc.start()
    try:
        repack(source, tmp_path / "store", announce=quiet)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 24 << 20


# ---- direct I/O


@pytest.mark.nvme
def test_direct_io_is_recorded_where_it_works(store_path):
    assert Store.open(store_path).manifest.direct_io is True
    with Store.open(store_path).open_reader() as reader:
        assert reader.mode == "direct"


@pytest.mark.skipif(not os.access(SHM, os.W_OK), reason="no writable /dev/shm")
def test_tmpfs_gives_the_same_store_and_says_buffered(source, store_path):
    target, said = SHM / f"nemolab-{os.getpid()}", []
    try:
        assert repack(source, target, announce=said.append).direct_io is False
        assert any("writing through the page cache" in line for line in said)
        ours, theirs = digests(target), digests(store_path)
        assert [name for name in ours if ours[name] != theirs[name]] == [files.MANIFEST]
        assert verify(target, source=source, all=True).mismatches == 0
    finally:
        shutil.rmtree(target, ignore_errors=True)


@pytest.mark.nvme
def test_writes_that_fail_with_o_direct_fall_back(source, tmp_path, store_path, monkeypatch):
    real, said = os.pwritev, []

    def fail_direct(descriptor, buffers, offset):
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "pwritev", fail_direct)
    assert repack(source, tmp_path / "other", announce=said.append).direct_io is False
    assert "fails (EINVAL)" in said[0]
    assert (tmp_path / "other" / files.EXPERTS).read_bytes() == (store_path / files.EXPERTS).read_bytes()


def test_short_and_interrupted_writes_are_continued(source, tmp_path, store_path, monkeypatch):
    real, calls = os.pwritev, []

    def cut(descriptor, buffers, offset):
        """A page at a time, sometimes 100 bytes less, and now and then a signal."""
        calls.append(offset)
        if len(calls) % 3 == 0:
            raise InterruptedError(errno.EINTR, "Interrupted system call")
        source = memoryview(buffers[0])
        written = real(descriptor, [source[:4096]], offset)
        return 2 * 4096 - 100 if len(source) > 4096 and real(descriptor, [source[:8192]], offset) else written

    monkeypatch.setattr(os, "pwritev", cut)
    repack(source, tmp_path / "other", announce=quiet)
    assert digests(tmp_path / "other") == digests(store_path)


# ---- what may be written over


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
    with pytest.raises(StoreError, match="is no store"):
        repack(source, source, announce=quiet)


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


# ---- interruptions


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


KILLED = """
import os, signal, sys
from nemolab.store import files
from nemolab.store.repack import repack
from nemolab.store import manifest, target

source, folder, moment = sys.argv[1:]
die = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
if moment == "experts":
    import nemolab.store.writer as writer
    real, count = writer.BlockWriter.write, []
    def write(self, block, buffer):
        real(self, block, buffer)
        count.append(block)
        if len(count) == 8:
            die()
    writer.BlockWriter.write = write
elif moment == "dense":
    files.finished_file.__wrapped__
    real = sys.modules["nemolab.store.repack"].write_tensor_file
    sys.modules["nemolab.store.repack"].write_tensor_file = lambda path, *rest: (
        die() if path.name == files.DENSE else real(path, *rest))
elif moment == "before the manifest":
    target.Target.commit = die
repack(source, folder)
"""


@pytest.mark.parametrize("moment", ["experts", "dense", "before the manifest"])
def test_a_killed_repack_looks_unfinished_and_a_rerun_is_identical(source, tmp_path, store_path, moment):
    target = tmp_path / "killed"
    done = subprocess.run([sys.executable, "-c", KILLED, source, target, moment], stderr=subprocess.PIPE)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert (target / MARKER).exists() and not (target / files.MANIFEST).exists()
    assert (target / files.EXPERTS).exists() == (moment != "experts")
    with pytest.raises(StoreError, match="interrupted or is still at work"):
        Store.open(target)
    with pytest.raises(StoreError, match="unfinished repack of another kind: layout is 'neuron', 'source'"):
        repack(source, target, layout="source", announce=quiet)
    repack(source, target, announce=quiet)
    assert digests(target) == digests(store_path)


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
    with pytest.raises(StoreError, match=r"needs [\d,]+ bytes .* 40,960 .* are free: [\d,]+ are missing"):
        repack(source, tmp_path / "store", announce=quiet)
    monkeypatch.setattr(os, "statvfs", real)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("call", ["pwritev", "posix_fallocate"])
def test_a_disk_that_fills_up_leaves_nothing(source, tmp_path, monkeypatch, call):
    real, calls = getattr(os, call), []

    def fill_up(*arguments):
        calls.append(arguments)
        if len(calls) > (5 if call == "pwritev" else 0):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*arguments)

    monkeypatch.setattr(os, call, fill_up)
    with pytest.raises(StoreError, match="the disk is full: [0-9,]+ bytes are needed"):
        repack(source, tmp_path / "store", announce=quiet)
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


# ---- damage


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("plane", range(4))
def test_one_flipped_bit_in_a_block_is_found_and_placed(source, tmp_path, layout, plane):
    repack(source, tmp_path / "store", layout=layout, announce=quiet)
    store = Store.open(tmp_path / "store")
    place = store.block_layout.planes[plane]
    index = 11  # layer 4 (the second MoE layer), expert 3
    offset = index * store.block_bytes + place.offset_bytes + place.nbytes // 2 + 1
    damage(store.path / files.EXPERTS, offset, flip=0x10)
    by_sum = verify(store)
    assert by_sum.mismatches == 1 and "layer 4, expert 3 (block 11 at" in by_sum.details[0]
    by_source = verify(store, source=source)
    assert by_source.mismatches == 1
    assert f"layer 4, expert 3 (block 11 at {11 * store.block_bytes}), offset {offset} of" in by_source.details[0]
    assert place.name in by_source.details[0]


def test_damaged_padding_is_found(source, store_path):
    store = Store.open(store_path)
    assert store.payload_bytes < store.block_bytes
    damage(store_path / files.EXPERTS, store.block_bytes - 1)
    assert verify(store, source=source).details[0].endswith("the padding is not zero")
    assert verify(store).mismatches == 1


def test_a_wrong_permutation_is_found_though_it_inverts_itself(source, tmp_path, monkeypatch):
    """Swapped nibbles survive there-and-back: only a reading of its own sees them."""
    module = import_module("nemolab.store.repack")
    real = module.choose_transpose

    def swapped(packed, out):
        transpose_nibbles(packed, out)
        out[...] = (out >> 4) | (out << 4)

    monkeypatch.setattr(module, "choose_transpose", lambda total_bytes: swapped)
    repack(source, tmp_path / "store", announce=quiet)
    monkeypatch.setattr(module, "choose_transpose", real)
    assert verify(tmp_path / "store").mismatches == 0, "the checksums are those of what was written"
    found = verify(tmp_path / "store", source=source)
    assert found.mismatches == found.checked == 16 and "down_values" in found.details[0]


def test_damaged_dense_tensors_are_named(source, store_path):
    entry = Store.open(store_path).dense_tensors["backbone.norm_f.weight"]
    damage(store_path / files.DENSE, entry.offset_bytes + 3)
    assert [("norm_f" in line) for line in verify(store_path).details] == [True]
    found = verify(store_path, source=source)
    assert found.details == [f"{files.DENSE}: backbone.norm_f.weight differs at offset {entry.offset_bytes + 3}"]


def test_damaged_globals_checksums_and_small_files_are_named(source, store_path):
    damage(store_path / "tokenizer.json", 100)
    assert verify(store_path).details == ["tokenizer.json: its checksum is another one"]
    assert verify(store_path, source=source).details == ["tokenizer.json: another one, the source has it"]
    damage(store_path / "tokenizer.json", 100)

    _, entries = read_header(store_path / files.GLOBALS)
    damage(store_path / files.GLOBALS, entries["weight_scale_2"].offset_bytes + 8 * 3)
    assert verify(store_path).details == [f"{files.GLOBALS}: its checksum is another one"]
    assert "layer 1, expert 3" in verify(store_path, source=source).details[0]
    damage(store_path / files.GLOBALS, entries["weight_scale_2"].offset_bytes + 8 * 3)

    damage(store_path / files.CHECKSUMS, (store_path / files.CHECKSUMS).stat().st_size - 4)
    assert len(verify(store_path).details) == 2  # the last block, and the file itself
    assert "the bytes agree" in verify(store_path, source=source).details[0]


@pytest.mark.parametrize("shape", [(7,), (1 << 40,), (4, 4)])
def test_checksums_of_another_shape_are_refused_before_they_are_read(store_path, shape):
    path = store_path / files.CHECKSUMS
    size = path.stat().st_size
    with open(path, "wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<u4", "fortran_order": False, "shape": shape})
        file.write(bytes(size - file.tell()))
    with pytest.raises(StoreError, match=r"checksums\.npy: uint32 .* uint32 \[16\] was expected"):
        verify(store_path)


def test_checksums_that_are_no_array_are_refused(store_path):
    path = store_path / files.CHECKSUMS
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(StoreError, match="not a readable array"):
        verify(store_path)


def test_verify_refuses_another_model(store_path, tmp_path):
    other = write_checkpoint(tmp_path / "other", experts=12)
    with pytest.raises(StoreError, match="it is not its source"):
        verify(store_path, source=other)


def test_samples_spread_over_the_store_from_first_to_last():
    for blocks in (1, 2, 199, 200, 201, 20480):
        chosen = sample_blocks(blocks)
        assert len(chosen) == len(set(chosen)) == min(200, blocks)
        assert chosen[0] == 0 and chosen[-1] == blocks - 1
    gaps = np.diff(sample_blocks(20480))
    assert gaps.max() - gaps.min() <= 1


# ---- opening


def test_a_store_without_manifest_is_no_store(source, store_path, tmp_path):
    (store_path / files.MANIFEST).unlink()
    with pytest.raises(StoreError, match="has no manifest"):
        Store.open(store_path)
    with pytest.raises(StoreError, match="looks like a checkpoint"):
        Store.open(source)
    with pytest.raises(StoreError, match="is no folder"):
        Store.open(tmp_path / "nowhere")


@pytest.mark.parametrize("name", [files.EXPERTS, files.DENSE, files.GLOBALS, files.CHECKSUMS, "tokenizer.json"])
def test_truncated_and_missing_files_are_named_at_open(store_path, name):
    size = (store_path / name).stat().st_size
    os.truncate(store_path / name, size - 1)
    with pytest.raises(StoreError, match=f"{name} has {size - 1} bytes, the manifest says {size}"):
        Store.open(store_path)
    (store_path / name).unlink()
    with pytest.raises(StoreError, match=f"{name} is missing"):
        Store.open(store_path)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"format": "zip"}, "format 'zip'"),
        ({"version": 2}, "version 2"),
        ({"layout": "columns"}, "unknown layout"),
        ({"layers": "two"}, "layers is 'two'; a int was expected"),
        ({"layers": True}, "layers is True"),
        ({"experts": -8}, "experts is -8"),
        ({"block_bytes": 1 << 60}, "block_bytes is"),
        ({"expert_inter": 10**12}, "block_bytes is"),
        ({"layout": "source"}, "planes is"),
        ({"layers": 3}, "bytes there; 24 blocks"),
        ({"files": {}}, "experts.bin is not listed"),
        ({"files": {"../../etc/passwd": {"bytes": 1}}}, "a plain name"),
        ({"files": {"experts.bin": 7}}, "a plain name with its bytes"),
        ({"source": None}, "source is None"),
        ({"expert_format": "mxfp4"}, "expert_format 'mxfp4'"),
    ],
)
def test_manifests_that_make_no_sense_are_refused(store_path, change, words):
    manifest = json.loads((store_path / files.MANIFEST).read_text())
    (store_path / files.MANIFEST).write_text(json.dumps(manifest | change))
    with pytest.raises(StoreError, match=words):
        Store.open(store_path)


def test_a_manifest_that_is_no_json_is_refused(store_path):
    (store_path / files.MANIFEST).write_text("{")
    with pytest.raises(StoreError, match="not valid JSON"):
        Store.open(store_path)


def test_a_config_of_other_sizes_is_refused(store_path):
    text = (store_path / "config.json").read_text()
    (store_path / "config.json").write_text(text.replace('"n_routed_experts": 8', '"n_routed_experts": 4'))
    with pytest.raises(StoreError, match="config.json describes 2 MoE layers of 4 experts"):
        Store.open(store_path)


def test_the_manifest_tells_a_foreign_reader_what_it_needs(store_path):
    raw = json.loads((store_path / files.MANIFEST).read_text())
    layout = BlockLayout("neuron", 96, 64)
    assert (raw["block_bytes"], raw["payload_bytes"]) == (layout.block_bytes, layout.payload_bytes)
    assert [plane["shape"] for plane in raw["planes"]] == [[96, 32], [96, 4], [96, 32], [6, 64]]


# ---- the cache folder


@pytest.fixture
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("NEMOLAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_store_is_made_once_and_found_again(source, cache_folder):
    said = []
    first = ensure_store(source, announce=said.append)
    assert cache_folder in first.parents and "making one" in said[0]
    said.clear()
    assert ensure_store(source, announce=said.append) == first and said == []
    other = ensure_store(source, layout="source", announce=quiet)
    assert other != first and Store.open(other).layout == "source"


def test_changed_weights_get_a_store_of_their_own(copied, cache_folder):
    first = ensure_store(copied, announce=quiet)
    entry = Checkpoint.open(copied).entry("backbone.layers.1.mixer.experts.3.up_proj.weight")
    damage(copied / entry.shard, entry.offset_bytes)
    second = ensure_store(copied, announce=quiet)
    assert second != first and verify(second, source=copied, all=True).mismatches == 0


def test_a_damaged_store_in_the_cache_folder_is_made_again(source, cache_folder):
    path = ensure_store(source, announce=quiet)
    os.truncate(path / files.EXPERTS, 4096)
    assert ensure_store(source, announce=quiet) == path
    assert verify(path, source=source, all=True).mismatches == 0


def test_a_killed_maker_does_not_spoil_the_cache_folder(source, cache_folder):
    path = ensure_store(source, announce=quiet)
    (path / files.MANIFEST).unlink()
    (path / MARKER).write_text("")
    assert ensure_store(source, announce=quiet) == path
    assert verify(path, source=source, all=True).mismatches == 0


def test_makers_at_the_same_time_get_one_good_store(source, cache_folder):
    script = "import sys; from nemolab.store import ensure_store; print(ensure_store(sys.argv[1]))"
    makers = [
        subprocess.Popen([sys.executable, "-c", script, source], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(4)
    ]
    answers = [maker.communicate() for maker in makers]
    assert [maker.returncode for maker in makers] == [0] * 4, [error.decode() for _, error in answers]
    assert len({out for out, _ in answers}) == 1
    assert sum(b"making one" in error for _, error in answers) == 1
    assert verify(answers[0][0].decode().strip(), source=source, all=True).mismatches == 0


def test_an_unwritable_cache_folder_is_said(source, cache_folder):
    cache_folder.write_text("a file in the way")
    with pytest.raises(StoreError, match="cache folder cannot be written .* NEMOLAB_CACHE"):
        ensure_store(source, announce=quiet)


def test_importing_the_store_does_not_import_torch():
    script = "import sys, nemolab.store; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
