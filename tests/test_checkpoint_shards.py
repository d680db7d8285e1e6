"""Index and files: both must say the same; what is missing, moved, doubled or extra is named."""

import json
import os
import shutil

import pytest
import torch
from patching import INDEX, drop_tensor, edit_json, refusal
from safetensors.torch import load_file, save_file
from synthetic import copy_checkpoint, write_checkpoint

from nemolab.checkpoint import Checkpoint

SECOND = "model-00002-of-00003.safetensors"


@pytest.fixture
def folder(tmp_path):
    return copy_checkpoint(tmp_path / "model")


def test_every_boundary_between_shards_cuts_through_an_expert(folder):
    files = sorted(folder.glob("*.safetensors"))
    owners = [{name.split("_proj.")[0].rpartition(".")[0] for name in load_file(file)} for file in files]
    assert len(files) == 3
    for before, after in zip(owners, owners[1:], strict=False):
        assert any(".experts." in owner for owner in before & after)


def test_an_untouched_checkpoint_opens_without_complaint(folder):
    checkpoint = Checkpoint.open(folder)
    assert len(checkpoint.headers) == 3
    assert all("present, not used" in note for note in checkpoint.notes)


def test_a_missing_shard_is_named_with_the_bytes_to_fetch(folder):
    missing_bytes = sum(tensor.numel() * tensor.element_size() for tensor in load_file(folder / SECOND).values())
    (folder / SECOND).unlink()
    message = refusal(folder)
    assert f"names 3 files, 1 of them not there: {SECOND} ({missing_bytes:,} bytes of tensors in all)" in message


def test_a_dangling_link_counts_as_missing(folder):
    (folder / SECOND).unlink()
    (folder / SECOND).symlink_to(folder / "blob-that-is-gone")
    assert f"not there: {SECOND}" in refusal(folder)


def test_linked_shards_are_followed(folder, tmp_path):
    for file in folder.glob("*.safetensors"):
        shutil.move(file, tmp_path / f"blob-{file.name}")
        file.symlink_to(tmp_path / f"blob-{file.name}")
    Checkpoint.open(folder)


def test_a_tensor_mapped_to_the_wrong_shard_is_named_with_both_files(folder):
    name = "backbone.embeddings.weight"
    edit_json(folder / INDEX, lambda index: index["weight_map"].update({name: SECOND}))
    assert f"says {name} is in {SECOND}, but it lies in model-00001-of-00003.safetensors" in refusal(folder)


def test_a_mapped_tensor_that_no_shard_holds_is_named(folder):
    edit_json(folder / INDEX, lambda index: index["weight_map"].update({"backbone.ghost": SECOND}))
    assert f"says backbone.ghost is in {SECOND}, but no file of the index holds it" in refusal(folder)


def test_a_stored_tensor_that_the_index_leaves_out_is_named(folder):
    edit_json(folder / INDEX, lambda index: index["weight_map"].pop("lm_head.weight") and None)
    assert "lm_head.weight lies in model-00003-of-00003.safetensors" in refusal(folder)


def test_a_stray_copy_beside_an_index_is_left_aside_and_reported(folder):
    save_file({"backbone.embeddings.weight": torch.zeros(2, 2)}, folder / "model.safetensors")
    checkpoint = Checkpoint.open(folder)
    assert any("left aside: model.safetensors" in note for note in checkpoint.notes)
    assert checkpoint.tensors["backbone.embeddings.weight"].shape == (288, 64)


def test_a_stray_copy_without_an_index_is_refused(folder):
    save_file({"backbone.embeddings.weight": torch.zeros(2, 2)}, folder / "model.safetensors")
    (folder / INDEX).unlink()
    message = refusal(folder)
    assert "backbone.embeddings.weight is stored twice" in message
    assert "model.safetensors" in message and "model-00001-of-00003.safetensors" in message


def test_a_missing_index_is_noted_and_the_files_are_read(folder):
    with_index = Checkpoint.open(folder)
    (folder / INDEX).unlink()
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.tensors == with_index.tensors
    assert any(f"{INDEX} is missing" in note for note in checkpoint.notes)


def test_a_missing_index_does_not_hide_a_missing_shard(folder):
    (folder / INDEX).unlink()
    (folder / SECOND).unlink()
    assert f"not there: {SECOND}" in refusal(folder)


def test_one_file_needs_no_index(tmp_path):
    folder = write_checkpoint(tmp_path, single_file=True)
    checkpoint = Checkpoint.open(folder)
    assert list(checkpoint.headers) == ["model.safetensors"]
    assert not any("index" in note for note in checkpoint.notes)


def test_a_wrong_total_is_noted(folder):
    edit_json(folder / INDEX, lambda index: index["metadata"].update(total_size=5))
    assert any("total_size says 5 bytes" in note for note in Checkpoint.open(folder).notes)


@pytest.mark.parametrize(
    "file", ["../model.safetensors", "/etc/passwd", "a\\b.safetensors", "weights.bin", 7, None, "a\n.safetensors"]
)
def test_the_index_cannot_lead_out_of_the_folder(folder, file):
    edit_json(folder / INDEX, lambda index: index["weight_map"].update({"backbone.embeddings.weight": file}))
    assert "the plain name of a .safetensors file was expected" in refusal(folder)


@pytest.mark.parametrize(
    "index", ["{}", '{"weight_map": {}}', '{"weight_map": []}', "[]", "", "{", '{"weight_map": null}']
)
def test_a_broken_index_is_refused(folder, index):
    (folder / INDEX).write_text(index)
    assert INDEX in refusal(folder)


def test_two_indices_under_other_names_are_refused(folder):
    shutil.copy(folder / INDEX, folder / "old.safetensors.index.json")
    Checkpoint.open(folder)
    os.rename(folder / INDEX, folder / "new.safetensors.index.json")
    assert "several indices (new.safetensors.index.json, old.safetensors.index.json)" in refusal(folder)


def test_folders_without_a_checkpoint_are_told_apart(folder, tmp_path):
    assert "does not exist" in refusal(tmp_path / "nowhere")
    assert "is a file" in refusal(folder / "config.json")
    (tmp_path / "empty").mkdir()
    assert "no config.json" in refusal(tmp_path / "empty")
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    assert "no .safetensors files" in refusal(folder)
    (folder / "pytorch_model.bin").write_bytes(b"x")
    assert "pytorch_model.bin cannot be read (pickles can run code)" in refusal(folder)


def test_the_same_tensor_in_two_listed_shards_is_refused(folder):
    first = folder / "model-00001-of-00003.safetensors"
    extra = {"backbone.embeddings.weight": load_file(first)["backbone.embeddings.weight"]}
    save_file(load_file(folder / SECOND) | extra, folder / SECOND)
    assert "backbone.embeddings.weight is stored twice" in refusal(folder)


def test_a_tensor_missing_from_shard_and_index_alike_is_named(folder):
    drop_tensor(folder, "backbone.layers.1.mixer.experts.5.down_proj.weight_scale_2")
    message = refusal(folder)
    assert message.startswith(
        "layer 1, expert 5: backbone.layers.1.mixer.experts.5.down_proj.weight_scale_2 is missing"
    )


def test_indices_with_a_name_twice_are_refused(folder):
    text = json.dumps(json.loads((folder / INDEX).read_text()))
    doubled = text.replace('"weight_map": {', f'"weight_map": {{"lm_head.weight": "{SECOND}", ', 1)
    (folder / INDEX).write_text(doubled)
    assert "names 'lm_head.weight' twice" in refusal(folder)
