"""What the writer lists for whole models, without drawing a value: names, shapes, formats, metadata, files."""

import dataclasses
import json
from functools import cache

import pytest
from published import nano_tensors, super_tensors

from nemolab.checkpoint.layer_lists import read_layer_list
from nemolab.errors import UsageError
from nemolab.synthetic import SHAPES, list_tensors, make_form
from nemolab.synthetic.metadata import config_json, hf_quant_json
from nemolab.synthetic.shapes import LAYERS_AS, find_shape, parse_settings
from nemolab.synthetic.shards import index_json, split

# Counted by others in the real files; 3.5-Super-VL: its geometry (exact) in the likeliest formats.
PUBLISHED = {
    "super": (165_860, 80_297_329_824),
    "nano": (24_147, 19_339_781_632),
    "lightning": (18_487, 21_559_589_596),
    "super35-vl": (169_513, 75_050_124_912),
}


@pytest.fixture(scope="module", params=PUBLISHED)
def whole(request):
    """(shape, form, tensors) of a whole published model."""
    return request.param, *list_whole(request.param)


@cache
def list_whole(shape):
    form = make_form(shape)
    return form, list_tensors(form)


def formats_said(form):
    return [entry["quant_algo"] for entry in hf_quant_json(form)["quantization"]["quantized_layers"].values()]


def test_a_whole_model_has_the_published_tensors_and_bytes(whole):
    shape, _, tensors = whole
    assert (len(tensors), sum(tensor.nbytes for tensor in tensors)) == PUBLISHED[shape]
    assert len({tensor.name for tensor in tensors}) == len(tensors)


def test_names_dtypes_and_shapes_are_those_of_the_description(whole):
    shape, _, tensors = whole
    if shape not in ("super", "nano"):
        pytest.skip(f"{shape} has no tensor by tensor description to compare with")
    described = {"super": super_tensors, "nano": nano_tensors}[shape]()
    assert {(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors} == set(described)


def test_metadata_counts_the_formats(whole):
    shape, form, _ = whole
    quantised = hf_quant_json(form)["quantization"]
    config = config_json(form)
    if shape == "nano":
        assert "quantization_config" not in config and quantised["quant_algo"] == "NVFP4"
        excluded = quantised["exclude_modules"]
        assert len(excluded) == 1 + 6 * 4 + 6 * 2 + 23 and "lm_head" in excluded
        assert "backbone.layers.4.mixer.in_proj" in excluded and "backbone.layers.2.mixer.in_proj" not in excluded
        return
    said = formats_said(form)
    if shape == "super":
        assert (said.count("FP8"), said.count("NVFP4")) == (139, 40_961)
    if shape == "lightning":
        assert (said.count("FP8"), said.count("W4A16_NVFP4"), len(quantised["exclude_modules"])) == (46, 5_935, 72)
        assert not any(tensor.endswith("experts.0.up_proj.input_scale") for tensor in (t.name for t in whole[2]))
    assert config["quantization_config"]["quantized_layers"] == quantised["quantized_layers"]
    targets = [name for group in config["quantization_config"]["config_groups"].values() for name in group["targets"]]
    assert set(targets) == set(quantised["quantized_layers"])


def test_the_vision_tower_has_the_published_bytes():
    timm = [tensor for tensor in list_whole("super35-vl")[1] if tensor.key.startswith(("vision", "mlp1"))]
    tower = sum(tensor.nbytes for tensor in timm if tensor.key.startswith("vision_model"))
    assert len(timm) == 396 and tower == 1_307_223_080
    assert round(sum(tensor.nbytes for tensor in timm) / 1e9, 3) == 1.685


def test_a_super_fills_seventeen_files_whose_borders_cut_experts():
    shards = split(list_whole("super")[1], None, None, None)
    assert len(shards) == 17 and all(shard.data_bytes < 5e9 for shard in shards)
    name, text = index_json(shards)
    index = json.loads(text)
    assert name == "model.safetensors.index.json" and index["metadata"]["total_size"] == PUBLISHED["super"][1]
    for before, after in zip(shards, shards[1:], strict=False):
        owners = {
            side.rsplit("_proj.")[0].rpartition(".")[0] for side in (before.tensors[-1].name, after.tensors[0].name)
        }
        assert len(owners) == 1 and ".experts." in owners.pop()


@pytest.mark.parametrize("shape", ["super", "super35", "nano"])
def test_layers_are_the_same_in_every_spelling(shape):
    texts = {name: make_form(shape, moe_layers=4, layers_as=name).text for name in LAYERS_AS}
    assert len({json.dumps(text, sort_keys=True) for text in texts.values()}) == len(LAYERS_AS)
    assert len({read_layer_list(text, name) for name, text in texts.items()}) == 1


@pytest.mark.parametrize(
    ("moe_layers", "pattern"), [(1, "ME*"), (3, "MEMEME*"), (4, "MEMEMEM*E"), (8, "MEMEMEM*EMEMEMEM*E"), (40, None)]
)
def test_the_first_moe_layers_come_with_attention(moe_layers, pattern):
    text = make_form("super", moe_layers=moe_layers).text
    assert text["hybrid_override_pattern"] == (pattern or make_form("super").text["hybrid_override_pattern"])
    assert text["num_hidden_layers"] == len(text["hybrid_override_pattern"])


def test_formats_of_layers_follow_their_layers():
    cut, whole = (make_form("super", moe_layers=count) for count in (5, 40))
    said = [hf_quant_json(form)["quantization"]["quantized_layers"] for form in (cut, whole)]
    own = {name: entry for name, entry in said[0].items() if name.startswith("backbone.")}
    assert own and all(said[1][name] == entry for name, entry in own.items())
    assert own["backbone.layers.1.mixer.shared_experts.down_proj"]["quant_algo"] == "NVFP4"
    assert "backbone.layers.8.mixer.shared_experts.down_proj" not in own


def test_aliases_and_capitals_name_shapes():
    assert [find_shape(word) for word in ("Super", "nemotron-3-nano-NVFP4", "VL", "super3.5")] == [
        "super", "nano", "super35-vl", "super35",
    ]  # fmt: skip
    assert all(find_shape(shape) == shape for shape in SHAPES)


@pytest.mark.parametrize(
    ("shape", "arguments", "words"),
    [
        ("giant", {}, "shape 'giant' is unknown; known are super"),
        ("super", {"settings": {"n_routed_expert": 4}}, "did you mean n_routed_experts.*known are"),
        ("super", {"settings": {"vit_hidden_size": 32}}, "vit_hidden_size is no field"),
        ("super", {"settings": {"hidden_size": 0}}, "hidden_size is '0'"),
        ("super", {"settings": {"hidden_size": -64}}, "hidden_size is '-64'"),
        ("super", {"settings": {"hidden_size": "wide"}}, "hidden_size is 'wide'"),
        ("super", {"settings": {"n_routed_experts": 4}}, "num_experts_per_tok is 22; <= n_routed_experts 4"),
        ("super", {"settings": {"num_attention_heads": 5}}, "num_key_value_heads is 2; a divisor of 5 heads"),
        ("super", {"settings": {"mamba_num_heads": 12}}, "n_groups is 8; a divisor of 12 Mamba heads"),
        ("super", {"settings": {"moe_latent_size": 40}}, "40.* cannot be NVFP4: .*groups of 16"),
        ("super", {"settings": {"moe_intermediate_size": 100}}, "moe_intermediate_size is 100"),
        ("super", {"settings": {"pattern": "MEX"}}, "unknown letter 'X'"),
        ("super", {"settings": {"num_hidden_layers": 99}}, "num_hidden_layers is 99; the list of layers has 88"),
        ("super", {"settings": {"n_group": 3}}, "n_group is 3; a divisor of 512"),
        ("super", {"settings": {"pattern": None}}, "list of layers is null"),
        ("super", {"settings": {"vocab_size": 4}}, "vocab_size is 4; at least 16"),
        ("super", {"settings": {"hidden_size": 4}}, "hidden_size is 4; at least 8"),
        ("super", {"settings": {"routed_scaling_factor": 0}}, "routed_scaling_factor is 0.0; a number > 0"),
        ("super", {"settings": {"layer_norm_epsilon": 100}}, "layer_norm_epsilon is 100.0; at most 1"),
        ("super", {"settings": {"pattern": "M*-"}}, "no MoE layer"),
        ("super", {"settings": {"n_routed_experts": 10**9}}, "n_routed_experts is 1000000000; at most 200,000"),
        ("nano", {"settings": {"n_routed_experts": 1, "top_k": 1}}, "n_routed_experts is 1; at least 2"),
        ("super", {"settings": {"num_nextn_predict_layers": 2}}, "num_nextn_predict_layers is 2; 0 or 1"),
        ("super", {"settings": {"mlp_hidden_act": "silu"}}, "mlp_hidden_act is 'silu'; relu2"),
        ("super", {"settings": {"eos_token_id": [2, 131072]}}, "eos_token_id is 131072; ids below vocab_size 131,072"),
        ("super", {"moe_layers": 41}, "41 MoE layers were asked for; from 1 to 40"),
        ("nano", {"vision_as": "hf"}, "nano has no vision tower"),
        ("super35-vl", {"vision_as": "clip"}, "known are timm, hf"),
        ("super35-vl", {"settings": {"patch_size": 0}}, "patch_size is 0"),
        ("super", {"layers_as": "letters"}, "known are pattern"),
        ("super", {"sparsity": 0.2}, "sparsity is 0.2"),
        ("super", {"skew": -1}, "skew is -1"),
    ],
)
def test_what_cannot_be_is_refused_in_words(shape, arguments, words):
    with pytest.raises(UsageError, match=words):
        make_form(shape, **arguments)


def test_settings_are_json_or_words():
    words = ("n_routed_experts=48", "pattern=ME*", "moe_latent_size=null", "time_step_limit=[0, 1.5]")
    assert parse_settings(words) == {
        "n_routed_experts": 48, "pattern": "ME*", "moe_latent_size": None, "time_step_limit": [0, 1.5],
    }  # fmt: skip


@pytest.mark.parametrize("words", [("x",), ("=3",), ("a=1", "a=2"), ("a=Infinity",), ("a=NaN",)])
def test_settings_that_cannot_be_read_are_refused(words):
    with pytest.raises(UsageError, match="--set"):
        parse_settings(words)


def test_a_form_says_what_its_files_say():
    form = make_form("super35-vl", moe_layers=1)
    config = config_json(form)
    assert config["model_type"] == "nemotron_h_omni" and config["llm_config"]["layers_block_type"] == [
        "linear_attention", "moe", "full_attention",
    ]  # fmt: skip
    assert all(name.startswith("language_model.") for name in config["quantization_config"]["quantized_layers"])
    assert hf_quant_json(dataclasses.replace(form, metadata="config")) is None
    assert "quantization_config" not in config_json(dataclasses.replace(form, metadata="hf_quant"))
