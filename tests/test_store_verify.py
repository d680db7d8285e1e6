"""Damage is found and placed, and what is no sound store is not opened."""

import errno
import json
import os
import pickle
import re
import shutil
import struct
import tracemalloc
from importlib import import_module

import numpy as np
import pytest
from stores import damage, quiet
from synthetic import write_checkpoint

from nemolab.checkpoint import Checkpoint
from nemolab.checkpoint.safetensors_header import read_header
from nemolab.errors import CheckpointError, StoreError
from nemolab.store import BlockLayout, Store, expert_file, files, repack, verify
from nemolab.store.layout import LAYOUTS
from nemolab.store.nibbles import transpose_nibbles
from nemolab.store.verify import check_source, sample_blocks

pytest_plugins = ["store_fixtures"]
BAD_NAMES = ("../../etc/passwd", "..", ".", "", "a/b", "/etc/passwd", "a\\b")


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
    """Swapped nibbles survive there-and-back: only a reading of its own sees them, at repack and afterwards."""

    def swapped(packed, out):
        transpose_nibbles(packed, out)
        out[...] = (out >> 4) | (out << 4)

    with monkeypatch.context() as patch:
        patch.setattr(expert_file, "choose_transpose", lambda total_bytes: swapped)
        with pytest.raises(StoreError, match=r"block \d+ .* is not what the source holds: down_values"):
            repack(source, tmp_path / "store", announce=quiet)
        assert not (tmp_path / "store").exists()
        patch.setattr(expert_file.ExpertFile, "check_sample", lambda *_: None)
        repack(source, tmp_path / "store", announce=quiet)
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
def test_checksums_of_another_shape_are_not_read(store_path, shape):
    path = store_path / files.CHECKSUMS
    size = path.stat().st_size
    with open(path, "wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<u4", "fortran_order": False, "shape": shape})
        file.write(bytes(size - file.tell()))
    found = verify(store_path)
    assert found.checked == 16, "the rest is looked at all the same"
    assert re.search(r"checksums\.npy holds '<u4' \([\d, ]+\); '<u4' \(16,\) was expected", found.details[0])
    assert found.details[1:] == ["checksums.npy: its checksum is another one"]


def npy(text):
    """A version 1.0 array whose header says `text`."""
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode("latin1")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        npy("{'descr': '|O', 'fortran_order': False, 'shape': (16,), }") + pickle.dumps([print] * 16),
        npy("{'descr': '<u4', 'fortran_order': False, 'shape': (16,"),
        npy("{'descr': '<u4'}"),
        npy("[" * 3000),
        npy("{'descr': ('<u4', 3.5), 'fortran_order': False, 'shape': (16,), }"),
        npy("{'descr': '<u4', 'fortran_order': 7, 'shape': 'x', }"),
        b"\x93NUMPY\x02\x00" + bytes(8),
    ],
)
def test_checksums_that_are_no_array_are_named_and_never_unpickled(store_path, content):
    path = store_path / files.CHECKSUMS
    path.write_bytes(content.ljust(path.stat().st_size, b" ")[: path.stat().st_size])
    found = verify(store_path)
    assert found.checked == 16 and re.search(r"checksums\.npy .* was expected", found.details[0])
    assert "\n" not in found.details[0]


def test_an_unreadable_block_is_named_and_the_others_are_looked_at(source, store_path, monkeypatch):
    """A sector that has died: layer, expert and offset are said, and the damage further on is found as well."""
    store, real = Store.open(store_path), os.preadv
    damage(store_path / files.EXPERTS, 13 * store.block_bytes + 5)

    def dying(descriptor, buffers, offset):
        experts = os.readlink(f"/proc/self/fd/{descriptor}").endswith(files.EXPERTS)
        if experts and 11 * store.block_bytes <= offset < 12 * store.block_bytes:
            raise OSError(errno.EIO, "Input/output error")
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", dying)
    for against in ({}, {"source": source, "all": True}):
        found = verify(store_path, **against)
        assert (found.checked, found.mismatches) == (16, 2)
        for words in ("layer 4, expert 3", f"offset {11 * store.block_bytes}", "Input/output error"):
            assert words in found.details[0]
        assert "layer 4, expert 5" in found.details[1]


def test_an_unreadable_source_is_named_block_by_block(store_path, copied, source):
    entry = Checkpoint.open(copied).entry("backbone.layers.4.mixer.experts.7.down_proj.weight")
    checkpoint = Checkpoint.open(copied)
    os.truncate(copied / entry.shard, entry.offset_bytes + 5)
    with pytest.raises(CheckpointError, match="ended early"):
        checkpoint.expert(1, 7)
    found = import_module("nemolab.store.verify")._compare(Store.open(store_path), checkpoint, True, None)
    assert found.checked == 16 and found.mismatches >= 1
    assert any("layer 4, expert 7" in line and entry.shard in line for line in found.details)


@pytest.mark.parametrize("name", [files.EXPERTS, files.DENSE, files.GLOBALS, files.CHECKSUMS, "tokenizer.json"])
def test_verify_goes_on_where_files_are_cut_or_missing(source, store_path, name):
    """Two faults at once: the file that is cut off or gone, and a flipped bit elsewhere."""
    other = files.DENSE if name != files.DENSE else files.EXPERTS
    damage(store_path / other, (store_path / other).stat().st_size // 2 + 1)
    size = (store_path / name).stat().st_size
    for against in ({}, {"source": source}):
        os.truncate(store_path / name, size - 1)
        found = verify(store_path, **against)
        assert f"{name} has {size - 1} bytes, the manifest says {size}" in found.details[0]
        assert any("experts.bin" in line or "block" in line or other in line for line in found.details[1:])
    (store_path / name).unlink()
    for against in ({}, {"source": source}):
        found = verify(store_path, **against)
        assert f"{name} is missing" in found.details[0]
        assert any("block" in line or other in line for line in found.details[1:])
        assert found.checked == (0 if name == files.EXPERTS else 16)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_global_scales_nobody_can_use_are_named(store_path, value):
    _, entries = read_header(store_path / files.GLOBALS)
    with open(store_path / files.GLOBALS, "r+b") as file:
        file.seek(entries["weight_scale_2"].offset_bytes + 4 * (2 * 11 + 1))
        file.write(np.float32(value).tobytes())
    words = f"layer 4, expert 3, down is {np.float32(value)}; a finite factor >= 0 was expected"
    with pytest.raises(StoreError, match=words):
        Store.open(store_path).globals  # noqa: B018
    assert any(words in line for line in verify(store_path).details)


@pytest.mark.parametrize("name", [files.EXPERTS, files.DENSE, files.GLOBALS, files.CHECKSUMS, "config.json"])
def test_files_of_another_store_of_the_same_form_are_found(store_path, tmp_path, name):
    repack(write_checkpoint(tmp_path / "other", seed=1), tmp_path / "stranger", announce=quiet)
    if name == "config.json":
        text = (store_path / name).read_text()
        (store_path / name).write_text(text.replace("1e-05", "2e-05"))
        assert (store_path / name).read_text() != text
    else:
        damage(tmp_path / "stranger" / name, (store_path / name).stat().st_size - 4)  # scales of two seeds may agree
        shutil.copy(tmp_path / "stranger" / name, store_path / name)
    assert verify(store_path).mismatches > 0


def test_blocks_and_checksums_of_another_store_are_found_together(store_path, tmp_path):
    """Both swapped, they agree with one another; the manifest knows better."""
    repack(write_checkpoint(tmp_path / "other", seed=1), tmp_path / "stranger", announce=quiet)
    for name in (files.EXPERTS, files.CHECKSUMS):
        shutil.copy(tmp_path / "stranger" / name, store_path / name)
    assert verify(store_path).details == ["checksums.npy: its checksum is another one"]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_a_pipe_a_folder_or_a_device_in_a_stores_place_is_not_read(store_path, make):
    (store_path / "tokenizer.json").unlink()
    make(store_path / "tokenizer.json")
    with pytest.raises(StoreError, match="tokenizer.json is no regular file"):
        Store.open(store_path)
    assert "tokenizer.json is no regular file" in verify(store_path).details[0]


def test_opening_allocates_nothing_on_the_word_of_a_manifest(store_path):
    """Four billion blocks that fit together: config, manifest and sparse files of the promised sizes."""
    raw = json.loads((store_path / files.MANIFEST).read_text())
    experts = 1 << 31
    config = (store_path / "config.json").read_text().replace('"n_routed_experts": 8', f'"n_routed_experts": {experts}')
    (store_path / "config.json").write_text(config)
    raw["experts"] = experts
    raw["files"]["config.json"]["bytes"] = len(config)
    raw["files"][files.EXPERTS]["bytes"] = 2 * experts * raw["block_bytes"]
    (store_path / files.MANIFEST).write_text(json.dumps(raw))
    tracemalloc.start()
    try:
        with pytest.raises(StoreError, match="4,194,304 blocks at most"):
            Store.open(store_path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


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
        *(({"files": {name: {"bytes": 1}}}, "a plain name") for name in BAD_NAMES),
        *(({"files": {name: {"bytes": 1}}}, "not printable") for name in ("a\nb", "a\x00b")),
        *(({"files": {"a": {"bytes": size}}}, "a plain name") for size in (-1, True, 1.5, "7", None, [])),
        ({"files": {"a": {"bytes": 1, "crc32": "x"}}}, "a plain name"),
        ({"files": [1]}, "files is"),
        ({"layers": 1.0}, "layers is 1.0"),
        ({"layers": 10**30, "experts": 10**30}, "blocks at most"),
        ({"layout": ["neuron"]}, "layout is"),
        ({"dense_crc32": {"a": "b"}}, "dense_crc32 is not of the form"),
        ({"left_out": {"mtp": 7}}, "left_out is not of the form"),
        ({"missing_small_files": [7]}, "missing_small_files is not of the form"),
        ({"source": {"files": [], "small_files": {}}}, "source.files is not of the form"),
        ({"source": {"files": {"a": 1}, "small_files": {}}}, "source.files is not of the form"),
        ({"source": {"files": {}, "small_files": {"a": 1}}}, "source.small_files is not of the form"),
        ({"direct_io": "yes"}, "direct_io is 'yes'"),
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


def test_weights_changed_behind_the_same_headers_are_found_by_a_look(tmp_path):
    folder = write_checkpoint(tmp_path / "model")
    repack(folder, tmp_path / "store")
    store = Store.open(tmp_path / "store")
    check_source(store, Checkpoint.open(folder), look=True)
    write_checkpoint(folder, seed=1)
    check_source(store, Checkpoint.open(folder))
    with pytest.raises(StoreError, match=r"other weights .* layer 1, expert 0"):
        check_source(store, Checkpoint.open(folder), look=True)


def test_a_copied_source_with_other_times_is_the_same(tmp_path):
    folder = write_checkpoint(tmp_path / "model")
    repack(folder, tmp_path / "store")
    for file in folder.iterdir():
        os.utime(file, ns=(0, 0))
    check_source(Store.open(tmp_path / "store"), Checkpoint.open(folder), look=True)
