"""An opened checkpoint: prefixes, reads, decoding, experts, fingerprints, heads, the table; and the one that ships."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from patching import drop_tensor, edit_json, edit_tensors, refusal, replace_tensor
from safetensors.torch import load_file
from synthetic import copy_checkpoint, write_checkpoint

from nemolab.checkpoint import Checkpoint, Inventory
from nemolab.checkpoint.checkpoint import check_expert_scales
from nemolab.checkpoint.formats import decode_nvfp4, encode_fp8, encode_nvfp4
from nemolab.checkpoint.structure import PARTS
from nemolab.errors import CheckpointError

EXPERT = "backbone.layers.1.mixer.experts.5"


@pytest.fixture
def folder(tmp_path):
    return copy_checkpoint(tmp_path / "model")


@pytest.mark.parametrize(
    "prefix",
    ["backbone.", "model.", "language_model.backbone.", "language_model.model."],
)
def test_every_known_prefix_gives_the_same_canonical_model(tmp_path, prefix):
    plain = Checkpoint.open(write_checkpoint(tmp_path / "plain", mtp=True))
    other = Checkpoint.open(write_checkpoint(tmp_path / "other", mtp=True, prefix=prefix))
    assert other.prefix == prefix and set(other.modules) == set(plain.modules)
    assert other.tensors["backbone.norm_f.weight"].source_name == f"{prefix}norm_f.weight"
    for name in ("backbone.embeddings", "lm_head", f"{EXPERT}.up_proj", "mtp.layers.0.eh_proj"):
        assert torch.equal(plain.decode(name), other.decode(name))


def test_a_vision_prefix_in_the_model_namespace_is_understood(folder):
    rename = lambda name: f"model.language_model.{name[9:]}" if name.startswith("backbone.") else name  # noqa: E731
    edit_tensors(folder, lambda name, tensor: {rename(name): tensor})
    assert Checkpoint.open(folder).prefix == "model.language_model."


def test_an_unknown_prefix_shows_the_first_names_found(folder):
    edit_tensors(folder, lambda name, tensor: {f"decoder.{name}": tensor})
    message = refusal(folder)
    assert "the first names are decoder.backbone.embeddings.weight, decoder.backbone.layers.0.mixer.A_log" in message
    assert "expected names like backbone.layers.0.norm.weight" in message


def test_two_names_for_one_tensor_are_refused(tmp_path):
    folder = write_checkpoint(tmp_path, prefix="language_model.backbone.")
    head = "language_model.lm_head.weight"
    edit_tensors(folder, lambda name, t: {name: t, "lm_head.weight": t.clone()} if name == head else {name: t})
    with pytest.raises(CheckpointError, match="are both lm_head.weight"):
        Checkpoint.open(folder)


@pytest.mark.parametrize("layout", ["timm", "hf"])
def test_both_vision_layouts_are_listed(tmp_path, layout):
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path, prefix="language_model.backbone.", vision=layout))
    vision = [module for module in checkpoint.modules.values() if module.part == "vision"]
    assert len(vision) >= 8 and {"bf16", "i64"} <= {module.format for module in vision}
    assert any("vision tensors" in note for note in checkpoint.notes)


def test_reads_equal_those_of_the_reference_library(folder):
    checkpoint = Checkpoint.open(folder)
    for file in folder.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            ours = checkpoint.tensor(name)
            assert ours.dtype == tensor.dtype and ours.shape == tensor.shape
            as_bytes = tensor.reshape(-1).view(torch.uint8).numpy()
            assert np.array_equal(checkpoint.read_bytes(name), as_bytes)
            buffer = bytearray(len(as_bytes))
            checkpoint.read_into(name, buffer)
            assert bytes(buffer) == as_bytes.tobytes()


def test_read_into_refuses_a_buffer_of_another_size(folder):
    with pytest.raises(CheckpointError, match="backbone.norm_f.weight has 128 bytes, the buffer 100"):
        Checkpoint.open(folder).read_into("backbone.norm_f.weight", bytearray(100))


def test_unknown_names_are_refused(folder):
    checkpoint = Checkpoint.open(folder)
    for read in (checkpoint.tensor, checkpoint.read_bytes, checkpoint.decode):
        with pytest.raises(CheckpointError, match="has no (tensor|module) 'ghost'"):
            read("ghost")


def test_a_shard_that_shrinks_after_opening_is_told(folder):
    checkpoint = Checkpoint.open(folder)
    entry = checkpoint.tensors["lm_head.weight"]
    with open(folder / entry.shard, "r+b") as file:
        file.truncate(entry.offset_bytes + 10)
    with pytest.raises(CheckpointError, match=f"{entry.shard} ended early: wanted 36,864 bytes .* got 10"):
        checkpoint.tensor("lm_head.weight")


def store_weights(folder):
    """Put weights of our own into an NVFP4 and an FP8 module; returns them and the error each format may make."""
    generator = torch.Generator().manual_seed(3)
    mamba = "backbone.layers.0.mixer.in_proj"
    up, wide = (
        torch.randn(shape, generator=generator) for shape in ((96, 64), Checkpoint.open(folder).modules[mamba].shape)
    )
    parts = zip(("weight", "weight_scale", "weight_scale_2"), encode_nvfp4(up), strict=True)
    new = {f"{EXPERT}.up_proj.{part}": tensor for part, tensor in parts}
    new |= {
        f"{mamba}.{part}": tensor for part, tensor in zip(("weight", "weight_scale"), encode_fp8(wide), strict=True)
    }
    edit_tensors(folder, lambda name, tensor: {name: new.get(name, tensor)})
    return {f"{EXPERT}.up_proj": (up, 0.12), mamba: (wide, 0.04)}


def test_decoding_gives_the_encoded_weights_back(folder):
    weights = store_weights(folder)
    checkpoint = Checkpoint.open(folder)
    for name, (truth, most) in weights.items():
        decoded = checkpoint.decode(name)
        assert decoded.dtype == torch.float32 and decoded.shape == truth.shape == checkpoint.modules[name].shape
        assert (decoded - truth).norm() / truth.norm() < most


def test_decoding_the_encoded_weights_can_fail(folder):
    truth, _ = store_weights(folder)[f"{EXPERT}.up_proj"]
    neighbour = Checkpoint.open(folder).decode(EXPERT[:-1] + "6.up_proj")
    assert (neighbour - truth).norm() / truth.norm() > 1


def test_an_expert_s_bytes_decode_to_its_modules(folder):
    checkpoint = Checkpoint.open(folder)
    for ordinal, layer in enumerate(checkpoint.config.moe_layers):
        expert = checkpoint.expert(ordinal, 5)
        for matrix in ("up", "down"):
            values, scales = (torch.from_numpy(getattr(expert, f"{matrix}_{kind}")) for kind in ("values", "scales"))
            decoded = decode_nvfp4(values, scales, getattr(expert, f"{matrix}_scale_2"))
            assert torch.equal(decoded, checkpoint.decode(f"backbone.layers.{layer}.mixer.experts.5.{matrix}_proj"))


def test_synthetic_experts_hold_the_odd_codes_and_scales(folder):
    """What the writer promises to other tests: -0, the scales 448, 2^-9 and 1.0, factors more than 10x apart."""
    checkpoint = Checkpoint.open(folder)
    experts = [checkpoint.expert(0, number) for number in range(8)]
    values = np.concatenate([expert.up_values.ravel() for expert in experts])
    assert 8 in set((values & 15).tolist()) and 8 in set((values >> 4).tolist())
    for expert in experts:
        assert expert.up_scales[-1, -1] == 0x38 and not expert.up_values[-1, -8:].any()
        assert expert.up_scales[-2, -1] == 0x01
    assert 0x7E in {int(expert.up_scales[-3, -1]) for expert in experts}
    factors = [expert.up_scale_2 for expert in experts]
    assert max(factors) > 10 * min(factors)


@pytest.mark.parametrize(("layer", "expert"), [(2, 0), (-1, 0), (0, 8), (0, -1)])
def test_experts_that_are_not_there_are_refused(folder, layer, expert):
    with pytest.raises(CheckpointError, match=f"no expert {expert} in MoE layer {layer}: there are 2 layers of 8"):
        Checkpoint.open(folder).expert(layer, expert)


@pytest.mark.parametrize(("format", "words"), [("bf16", "is bf16, not NVFP4"), ("fp8", "is fp8, not NVFP4")])
def test_experts_of_other_formats_are_listed_but_have_no_blocks(tmp_path, format, words):
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path, routed=format))
    assert checkpoint.modules[f"{EXPERT}.up_proj"].format == format
    with pytest.raises(CheckpointError, match=words):
        checkpoint.expert(0, 5)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_an_impossible_scale_2_is_refused_when_it_is_read(folder, value):
    replace_tensor(folder, f"{EXPERT}.up_proj.weight_scale_2", lambda scale: torch.full_like(scale, value))
    with pytest.raises(CheckpointError, match=rf"{EXPERT}.up_proj.weight_scale_2 in model-.* is (nan|inf|-1.0)"):
        Checkpoint.open(folder).expert(0, 5)


def test_a_nan_block_scale_is_found_with_its_place(folder):
    def spoil(scales):
        scales.view(torch.uint8)[3, 2] = 0xFF
        return scales

    checkpoint = Checkpoint.open(folder)
    modules = [checkpoint.modules[f"{EXPERT}.{matrix}_proj"] for matrix in ("up", "down")]
    check_expert_scales(checkpoint.expert(0, 5), *modules)
    replace_tensor(folder, f"{EXPERT}.down_proj.weight_scale", spoil)
    checkpoint = Checkpoint.open(folder)
    with pytest.raises(
        CheckpointError, match=rf"{EXPERT}.down_proj.weight_scale in .* has the NaN byte 0xff at row 3, group 2"
    ):
        check_expert_scales(checkpoint.expert(0, 5), *modules)
    assert checkpoint.decode(f"{EXPERT}.down_proj")[3].isnan().sum() == 16


def test_fingerprints_tell_checkpoints_apart(tmp_path):
    a = Checkpoint.open(write_checkpoint(tmp_path / "a")).fingerprint()
    b = Checkpoint.open(write_checkpoint(tmp_path / "b")).fingerprint()
    c = Checkpoint.open(write_checkpoint(tmp_path / "c", inter=112)).fingerprint()
    assert a == b != c
    assert {file: facts["bytes"] for file, facts in a.items()} == {
        file.name: file.stat().st_size for file in (tmp_path / "a").glob("*.safetensors")
    }


def test_small_files_are_those_present(folder):
    names = {"config.json", "generation_config.json", "hf_quant_config.json", "chat_template.jinja"}
    names |= {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}
    assert set(Checkpoint.open(folder).small_files()) == names
    (folder / "chat_template.jinja").unlink()
    assert set(Checkpoint.open(folder).small_files()) == names - {"chat_template.jinja"}


def test_the_four_heads(tmp_path):
    """Stored or not, tied or not: absent and untied is refused, a stored head that differs from the tie is said."""
    untied = Checkpoint.open(write_checkpoint(tmp_path / "untied"))
    assert "lm_head" in untied.modules
    tied = Checkpoint.open(write_checkpoint(tmp_path / "tied", tie=True))
    assert "lm_head" not in tied.modules
    both = write_checkpoint(tmp_path / "both")
    edit_json(both / "config.json", lambda config: config.update(tie_word_embeddings=True))
    checkpoint = Checkpoint.open(both)
    assert "lm_head" in checkpoint.modules
    assert any(
        "tie_word_embeddings is true, but lm_head.weight is stored with other values" in n for n in checkpoint.notes
    )
    embeddings = checkpoint.tensor("backbone.embeddings.weight")
    replace_tensor(both, "lm_head.weight", lambda head: embeddings)
    assert not any("tie_word_embeddings" in note for note in Checkpoint.open(both).notes)
    neither = write_checkpoint(tmp_path / "neither")
    drop_tensor(neither, "lm_head.weight")
    with pytest.raises(CheckpointError, match=r"lm_head.weight is missing \(tie_word_embeddings is false"):
        Checkpoint.open(neither)


def test_the_inventory_adds_up(folder):
    checkpoint = Checkpoint.open(folder)
    inventory = Inventory(checkpoint)
    frame = inventory.frame()
    assert list(frame.columns) == ["tensor", "module", "part", "format", "shape", "bytes", "shard"]
    assert len(frame) == len(checkpoint.tensors) and set(frame["part"]) <= set(PARTS)
    stored_bytes = sum(header.file_bytes - header.data_start_bytes for header in checkpoint.headers.values())
    assert (
        frame["bytes"].sum()
        == inventory.by_part()["bytes"].sum()
        == inventory.by_format()["bytes"].sum()
        == stored_bytes
    )
    assert inventory.by_part().loc["routed", "modules"] == 2 * 8 * 2
    assert inventory.by_format().loc[("mamba", "fp8"), "modules"] == 4


def test_the_shipped_checkpoint_opens(tiny_path):
    checkpoint = Checkpoint.open(tiny_path)
    config = checkpoint.config
    assert len(config.moe_layers) >= 6 and config.n_experts >= 64 and config.top_k >= 6 and config.moe_latent_size
    by_format = Inventory(checkpoint).by_format()
    assert by_format.loc[("routed", "nvfp4"), "modules"] == 2 * len(config.moe_layers) * config.n_experts
    for name in (
        "lm_head",
        "backbone.layers.0.mixer.in_proj",
        f"backbone.layers.{config.moe_layers[0]}.mixer.experts.0.up_proj",
    ):
        decoded = checkpoint.decode(name)
        assert decoded.isfinite().all() and decoded.std() > 0
    expert = f"backbone.layers.{config.moe_layers[0]}.mixer.experts.0"
    modules = [checkpoint.modules[f"{expert}.{matrix}_proj"] for matrix in ("up", "down")]
    check_expert_scales(checkpoint.expert(0, 0), *modules)


def test_importing_the_room_does_not_import_torch_or_pandas():
    code = "import sys, nemolab.checkpoint; print({'torch', 'pandas', 'transformers'} & set(sys.modules))"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert ran.stdout.strip() == "set()"
