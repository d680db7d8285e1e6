"""Formats come from tensors alone; whatever is missing, misshapen, foreign or unknown is refused by its name."""

import tracemalloc

import pytest
import torch
from patching import add_tensor, drop_tensor, edit_json, edit_tensors, refusal, replace_tensor
from synthetic import copy_checkpoint, write_checkpoint

from nemolab.checkpoint import Checkpoint
from nemolab.checkpoint.structure import PARTS

EXPERT = "backbone.layers.1.mixer.experts.5.down_proj"
IN_PROJ = "backbone.layers.0.mixer.in_proj"


@pytest.fixture
def folder(tmp_path):
    return copy_checkpoint(tmp_path / "model")


def test_one_kind_of_module_may_have_three_formats(tmp_path):
    layers = "backbone.layers.{}.mixer.shared_experts.down_proj"
    overrides = {layers.format(1): "nvfp4", layers.format(4): "bf16", "backbone.layers.1.mixer.fc1_latent_proj": "fp8"}
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path, shared="fp8", overrides=overrides, pattern="MEM*EE"))
    formats = [checkpoint.modules[layers.format(layer)].format for layer in (1, 4, 5)]
    assert formats == ["nvfp4", "bf16", "fp8"]
    assert [checkpoint.modules[f"backbone.layers.{n}.mixer.fc1_latent_proj"].format for n in (1, 4)] == ["fp8", "bf16"]


def test_parts_cover_every_tensor_once(tmp_path):
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path, pattern="MEM*E-", mtp=True, vision="hf", kv_scales=True))
    held = [entry.name for module in checkpoint.modules.values() for entry in module.tensors.values()]
    assert sorted(held) == sorted(checkpoint.tensors)
    assert {module.part for module in checkpoint.modules.values()} == set(PARTS)


@pytest.mark.parametrize("suffix", ["weight_scale", "weight_scale_2"])
def test_a_missing_nvfp4_scale_is_named_with_layer_and_expert(folder, suffix):
    drop_tensor(folder, f"{EXPERT}.{suffix}")
    assert refusal(folder).startswith(f"layer 1, expert 5: {EXPERT}.{suffix} is missing; NVFP4 (its weight is U8)")


def test_a_missing_fp8_scale_is_named(folder):
    drop_tensor(folder, f"{IN_PROJ}.weight_scale")
    assert refusal(folder).startswith(f"layer 0: {IN_PROJ}.weight_scale is missing; FP8 (its weight is F8_E4M3)")


def test_a_missing_weight_beside_its_scales_is_named(folder):
    drop_tensor(folder, f"{EXPERT}.weight")
    assert f"{EXPERT}.weight is missing" in refusal(folder)


def test_a_missing_expert_is_named(folder):
    edit_tensors(folder, lambda name, tensor: {} if name.startswith(f"{EXPERT}.") else {name: tensor})
    message = refusal(folder)
    assert message.startswith(f"layer 1, expert 5: {EXPERT}.weight is missing")
    assert "config.json says layer 1 is moe with 8 experts" in message


@pytest.mark.parametrize(
    "name",
    ["backbone.norm_f.weight", "backbone.layers.3.norm.weight", "backbone.layers.0.mixer.A_log",
     "backbone.layers.0.mixer.conv1d.bias", "backbone.layers.1.mixer.gate.e_score_correction_bias",
     "backbone.embeddings.weight", "backbone.layers.3.mixer.o_proj.weight"],
)  # fmt: skip
def test_any_missing_tensor_is_named(folder, name):
    drop_tensor(folder, name)
    assert f"{name} is missing" in refusal(folder)


def test_scalars_of_either_shape_give_the_same_values(tmp_path):
    plain = Checkpoint.open(write_checkpoint(tmp_path / "a", scalar_shape=()))
    folder = write_checkpoint(tmp_path / "b", scalar_shape=(1,))
    flip = lambda name, tensor: {name: tensor.reshape(()) if ".experts.3." in name and tensor.numel() == 1 else tensor}  # noqa: E731
    edit_tensors(folder, flip)
    mixed = Checkpoint.open(folder)
    assert {entry.shape for entry in mixed.tensors.values() if entry.name.endswith("weight_scale_2")} == {(), (1,)}
    for name in plain.modules:
        assert torch.equal(plain.decode(name), mixed.decode(name))


@pytest.mark.parametrize("change", [lambda t: t.reshape(1).repeat(2), lambda t: t.reshape(1, 1), lambda t: t.double()])
def test_scalars_of_other_shapes_are_refused(folder, change):
    replace_tensor(folder, f"{EXPERT}.weight_scale_2", change)
    message = refusal(folder)
    assert message.startswith(f"layer 1, expert 5: {EXPERT}.weight_scale_2") and "[] or [1], was expected" in message


def test_input_scales_make_no_difference_and_are_noted_once(tmp_path):
    with_scales = Checkpoint.open(write_checkpoint(tmp_path / "a", input_scale=True))
    without = Checkpoint.open(write_checkpoint(tmp_path / "b", input_scale=False))
    assert sum("input_scale" in note for note in with_scales.notes) == 1
    assert not any("input_scale" in note for note in without.notes)
    for name in without.modules:
        assert torch.equal(without.decode(name), with_scales.decode(name))


@pytest.mark.parametrize(
    ("suffix", "form"),
    [
        ("weight_packed", "compressed-tensors"),
        ("weight_global_scale", "compressed-tensors"),
        ("weight_scale_inv", "block-wise FP8"),
        ("pre_quant_scale", "AWQ"),
        ("qweight", "GPTQ or AWQ"),
        ("weight_zero_point", "zero points"),
    ],
)
def test_foreign_forms_are_refused_by_what_they_are(folder, suffix, form):
    edit_tensors(folder, lambda name, t: {f"{EXPERT}.{suffix}" if name == f"{EXPERT}.weight" else name: t})
    message = refusal(folder)
    assert f"{EXPERT}.{suffix}" in message and form in message and "not ModelOpt's" in message


def test_stacked_experts_are_refused_as_what_they_are(folder):
    add_tensor(folder, "backbone.layers.1.mixer.experts.up_proj", torch.zeros(8, 96, 64))
    assert "stacked form" in refusal(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.view(torch.uint8).repeat(2, 1)[:128, :].repeat(1, 2)[:, :8].contiguous().view(torch.float8_e4m3fn),
         "padded, swizzled"),
        (lambda t: t.view(torch.uint8)[:, :3].contiguous().view(torch.float8_e4m3fn), "one scale for 32 columns"),
        (lambda t: t.view(torch.uint8)[:, :5].contiguous().view(torch.float8_e4m3fn), "[64, 6] was expected"),
        (lambda t: t.view(torch.uint8), "MXFP4"),
        (lambda t: t.float(), "NVFP4 needs F8_E4M3"),
    ],
)  # fmt: skip
def test_block_scales_of_another_layout_are_refused(folder, change, words):
    replace_tensor(folder, f"{EXPERT}.weight_scale", change)
    message = refusal(folder)
    assert message.startswith(f"layer 1, expert 5: {EXPERT}.weight_scale") and words in message


def test_a_shape_against_the_config_is_refused_with_both(folder):
    edit_json(folder / "config.json", lambda config: config.update(moe_intermediate_size=112))
    message = refusal(folder)
    assert "layer 1, expert 0: backbone.layers.1.mixer.experts.0.up_proj.weight" in message
    assert "has shape [96, 64] (stored as U8 [96, 32]); by config.json [112, 64] was expected" in message


@pytest.mark.parametrize(
    ("field", "value", "tensor"),
    [
        ("hidden_size", 80, "backbone.embeddings.weight"),
        ("vocab_size", 300, "backbone.embeddings.weight"),
        ("mamba_num_heads", 8, "backbone.layers.0.mixer"),
        ("ssm_state_size", 32, "backbone.layers.0.mixer"),
        ("head_dim", 32, "backbone.layers.3.mixer"),
        ("conv_kernel", 3, "backbone.layers.0.mixer.conv1d.weight"),
        ("moe_latent_size", 32, "backbone.layers.1.mixer"),
        ("moe_shared_expert_intermediate_size", 32, "backbone.layers.1.mixer.shared_experts"),
    ],
)
def test_every_size_of_the_config_is_checked_against_a_tensor(folder, field, value, tensor):
    edit_json(folder / "config.json", lambda config: config.update({field: value}))
    message = refusal(folder)
    assert tensor in message and "by config.json" in message


@pytest.mark.parametrize("count", [7, 9])
def test_another_number_of_experts_than_the_config_says_is_refused(folder, count):
    edit_json(folder / "config.json", lambda config: config.update(n_routed_experts=count))
    assert "layer 1" in refusal(folder)


def test_another_kind_of_layer_than_the_config_says_is_told(folder):
    edit_json(folder / "config.json", lambda config: config.update(hybrid_override_pattern="MEE*E"))
    message = refusal(folder)
    assert "unknown tensor" in message and "config.json says layer 2 is moe" in message
    edit_json(folder / "config.json", lambda config: config.update(hybrid_override_pattern="MEM*"))
    assert "config.json has layers 0 to 3" in refusal(folder)


def test_experts_of_one_layer_must_share_a_format(tmp_path):
    folder = write_checkpoint(tmp_path, overrides={EXPERT: "bf16"})
    message = refusal(folder)
    assert message.startswith("layer 1, expert 5:") and "is bf16" in message and "share one format" in message


def test_unknown_tensors_with_bytes_are_refused_and_empty_ones_noted(folder):
    add_tensor(folder, "backbone.layers.1.mixer.surprise", torch.empty(0))
    assert any("backbone.layers.1.mixer.surprise" in note for note in Checkpoint.open(folder).notes)
    add_tensor(folder, "backbone.layers.1.mixer.surprise", torch.ones(3))
    message = refusal(folder)
    assert "layer 1: backbone.layers.1.mixer.surprise" in message and "unknown tensor F32 [3], 12 bytes" in message


@pytest.mark.parametrize("name", ["sound_encoder.weight", "backbone.extra.weight", "other.lm_head.weight", "weight"])
def test_tensors_outside_the_model_are_refused_too(folder, name):
    add_tensor(folder, name, torch.ones(3, 3))
    assert f"{name} in model-00003-of-00003.safetensors: unknown tensor" in refusal(folder)


def test_weights_of_an_unread_dtype_are_refused(folder):
    replace_tensor(folder, "backbone.norm_f.weight", lambda tensor: tensor.double())
    assert "backbone.norm_f.weight in model-00003-of-00003.safetensors has dtype F64" in refusal(folder)
    replace_tensor(folder, "backbone.norm_f.weight", lambda tensor: tensor.to(torch.int8))
    assert "has dtype I8" in refusal(folder)


def test_a_scale_beside_an_unquantised_weight_is_refused(folder):
    name = "backbone.layers.3.mixer.q_proj.weight_scale"
    add_tensor(folder, name, torch.tensor(1.0))
    assert f"{name} in model-00003-of-00003.safetensors is a scale beside a weight of dtype BF16" in refusal(folder)


def test_a_second_scale_beside_an_fp8_weight_is_refused(folder):
    add_tensor(folder, f"{IN_PROJ}.weight_scale_2", torch.tensor(1.0))
    assert "FP8 has one scale only" in refusal(folder)


def test_scales_by_row_of_an_fp8_weight_are_refused(folder):
    replace_tensor(folder, f"{IN_PROJ}.weight_scale", lambda scale: scale.repeat(196))
    assert f"{IN_PROJ}.weight_scale" in refusal(folder)


def test_biases_must_be_those_of_the_config(folder):
    add_tensor(folder, "backbone.layers.3.mixer.q_proj.bias", torch.zeros(64))
    assert "config.json says this module has no bias" in refusal(folder)
    edit_json(folder / "config.json", lambda config: config.update(attention_bias=True))
    assert "backbone.layers.3.mixer.k_proj.bias is missing" in refusal(folder)
    for name, rows in (("k", 32), ("v", 32), ("o", 64)):
        add_tensor(folder, f"backbone.layers.3.mixer.{name}_proj.bias", torch.zeros(rows))
    assert "bias" in Checkpoint.open(folder).modules["backbone.layers.3.mixer.o_proj"].tensors
    replace_tensor(folder, "backbone.layers.3.mixer.o_proj.bias", lambda bias: bias[:-1].clone())
    assert "a float [64] was expected" in refusal(folder)


def test_cache_scales_belong_beside_their_projections(folder):
    add_tensor(folder, "backbone.layers.3.mixer.k_proj.k_scale", torch.tensor(1.0))
    assert any(note.startswith("k_scale: 1 present") for note in Checkpoint.open(folder).notes)
    add_tensor(folder, "backbone.layers.3.mixer.o_proj.k_scale", torch.tensor(1.0))
    assert "k_scale belongs beside a k_proj only" in refusal(folder)


def test_formats_do_not_depend_on_names_or_metadata(tmp_path):
    """The same tensors under metadata that claims the opposite: same modules, and the claim is reported."""
    folder = write_checkpoint(tmp_path / "a", metadata="hf_quant")
    told = Checkpoint.open(folder)
    edit_json(
        folder / "hf_quant_config.json", lambda quant: quant["quantization"].update(quantized_layers={IN_PROJ: "NVFP4"})
    )
    lied_to = Checkpoint.open(folder)
    assert lied_to.modules == told.modules
    assert len(lied_to.notes) > len(told.notes)


@pytest.mark.parametrize(
    "claim",
    [{"n_routed_experts": 2**31 - 1}, {"n_routed_experts": 10**6, "hybrid_override_pattern": "E" * 10_000}],
)
def test_a_claim_of_millions_of_experts_takes_no_memory(folder, claim):
    edit_json(folder / "config.json", lambda config: config.update(claim))
    tracemalloc.start()
    message = refusal(folder)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "n_routed_experts" in message and peak_bytes < 16 << 20
