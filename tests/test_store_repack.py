"""What a store holds: every byte of the checkpoint in its place, written past the page cache where that works."""

import errno
import fcntl
import os
import shutil
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from stores import digests, quiet
from synthetic import write_checkpoint

from nemolab.checkpoint import Checkpoint
from nemolab.errors import CheckpointError, StoreError
from nemolab.store import ExpertCache, Store, files, repack, verify
from nemolab.store.layout import LAYOUTS

pytest_plugins = ["store_fixtures"]
SHM = Path("/dev/shm")
SHAPES = {
    "plain": {},
    "no latent": {"latent": None},
    "whole pages": {"latent": 128, "inter": 256, "experts": 4},
    "many experts": {"pattern": "E*", "experts": 201, "latent": 16, "inter": 16},
    "all the extras": {"prefix": "language_model.backbone.", "mtp": True, "vision": "timm", "kv_scales": True},
    "without input scales": {"input_scale": False, "single_file": True, "metadata": "hf_quant"},
}


@pytest.fixture(scope="module")
def forms(tmp_path_factory):
    """Each shape, written when it is first asked for."""
    folder, made = tmp_path_factory.mktemp("forms"), {}

    def form(shape):
        if shape not in made:
            made[shape] = write_checkpoint(folder / shape.replace(" ", "-"), **SHAPES[shape])
        return made[shape]

    return form


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


def test_checksums_are_zlibs_crc32_of_the_padded_blocks(store_path):
    """Whichever library computed them, so that a store made with one is verified with the other."""
    blocks = np.fromfile(store_path / files.EXPERTS, np.uint8).reshape(16, -1)
    assert np.load(store_path / files.CHECKSUMS).tolist() == [zlib.crc32(block) for block in blocks]


def test_a_store_in_place_of_a_checkpoint_is_named_as_one(store_path):
    with pytest.raises(CheckpointError, match="is a store made by repack"):
        Checkpoint.open(store_path)


def test_two_repacks_are_identical_to_the_last_byte(source, tmp_path, store_path):
    repack(source, tmp_path / "again", announce=quiet)
    assert digests(tmp_path / "again") == digests(store_path)


def test_progress_reaches_its_total(source, tmp_path):
    calls = []
    repack(source, tmp_path / "store", progress=lambda done, total: calls.append((done, total)), announce=quiet)
    assert calls[-1][0] == calls[-1][1] > 0
    assert calls == sorted(calls) and len({total for _, total in calls}) == 1


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
