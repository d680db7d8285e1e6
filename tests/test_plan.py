"""Bytes per token, per expert and per part. Golden numbers carry their arithmetic or the published count they are."""

import json
from dataclasses import replace

import pytest
from synthetic import write_checkpoint

from nemolab.checkpoint import Checkpoint, ModelConfig
from nemolab.errors import CheckpointError, NemolabError, UsageError
from nemolab.paths import configs_folder
from nemolab.plan import compare_models, plan, plan_checkpoint, plan_config, read_published
from nemolab.plan.geometry import module_shapes
from nemolab.plan.precision import read_precision

GIB = 2**30
KEYS = (
    "model_type, moe_layers, experts, top_k, expert_params, expert_bytes, pages_per_expert, bytes_per_token,"
    " routed_bytes, dense_bytes, parts"
).split(", ")


def config_of(name, **changes):
    return json.loads((configs_folder() / f"{name}.json").read_text()) | changes


def plan_of(config, experts_as=None):
    return plan_config(ModelConfig.from_dict(config), experts_as)


SMALL = {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "ME*E-",
    "vocab_size": 320,
    "hidden_size": 64,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "moe_latent_size": 32,
    "moe_shared_expert_intermediate_size": 128,
    "intermediate_size": 160,
}


# The numbers everything else stands on.


def test_super_is_exact_to_the_byte():
    counted = plan(configs_folder() / "nemotron-3-super.json")
    assert counted.expert_params == 2 * 2688 * 1024 == 5_505_024
    assert counted.expert_bytes == 5_505_024 // 2 + 5_505_024 // 16 == 3_096_576
    assert counted.pages_per_expert == 756
    assert counted.bytes_per_token == 40 * 22 * 3_096_576 == 2_724_986_880
    assert counted.routed_bytes == 40 * 512 * 3_096_576 == 59.0625 * GIB
    assert (counted.moe_layers, counted.experts, counted.top_k) == (40, 512, 22)
    assert counted.layers == {"mamba": 40, "moe": 40, "attention": 8, "mlp": 0}


def test_nano_is_exact_to_the_byte():
    counted = plan(configs_folder() / "nemotron-3-nano.json")
    assert counted.expert_bytes == 2 * 1856 * 2688 * 9 // 16 == 5_612_544
    assert counted.pages_per_expert == 1370.25
    assert counted.bytes_per_token == 23 * 6 * 5_612_544 == 774_531_072
    assert counted.routed_bytes == 23 * 128 * 5_612_544 == 16_523_329_536


def count_all(config):
    """(tensors, bytes) of a whole checkpoint as a config and its formats imply, MTP and scalars included."""
    parsed = ModelConfig.from_dict(config)
    modules, counted = module_shapes(parsed), plan_config(parsed)
    precision, tensors = read_precision(parsed, modules, "config"), 0
    for module in modules:
        format = precision.format_of(module)
        per_copy = 1 + module.biased + (format == "nvfp4")  # weight, bias, block scales
        tensors += module.copies * per_copy + precision.scalar_bytes(module, format) // 4
    return tensors, sum(counted.parts.values()) + counted.routed_scalar_bytes


# (tensors, bytes). Of 3-Super and Nano others counted them in the headers of the published files; of 3.5-Super (without
# vision: 396 tensors, 1,684,725,800 bytes) and Lightning another calculation from the same recipes gives them (of
# Lightning to five digits: 21.560e9).
KNOWN_TOTALS = {
    "nemotron-3-super": (165_860, 80_297_329_824),
    "nemotron-3-nano": (24_147, 19_339_781_632),
    "nemotron-3.5-super": (169_513 - 396, 75_050_124_912 - 1_684_725_800),
    "nemotron-3.5-lightning": (18_487, 21_559_589_596),
}


@pytest.mark.parametrize("name", KNOWN_TOTALS)
def test_totals_are_the_known_ones(name):
    assert count_all(config_of(name)) == KNOWN_TOTALS[name]


def test_the_unquantised_model_has_the_published_count_too():
    config = config_of("nemotron-3.5-super")
    del config["nemolab"]
    config["nemolab"] = {"formats": {"experts": "bf16"}}
    assert count_all(config) == (42_683, 248_906_833_960 - 1_684_725_800)


@pytest.mark.parametrize("name", KNOWN_TOTALS)
def test_totals_can_fail(name):
    config = config_of(name)
    config["nemolab"]["formats"]["in_proj"] = "bf16"
    assert count_all(config) != KNOWN_TOTALS[name]


# GiB to three places, and how they come about.
SUPER_ROWS = {
    ("mamba", "in_proj", "fp8"): 1.982,  # 28 x 18560 x 4096
    ("mamba", "in_proj", "bf16"): 1.699,  # 12 x 18560 x 4096 x 2
    ("mamba", "out_proj", "fp8"): 0.906,  # 29 x 4096 x 8192
    ("mamba", "out_proj", "bf16"): 0.688,  # 11 x 4096 x 8192 x 2
    ("head", "lm_head", "bf16"): 1.000,  # 131072 x 4096 x 2
    ("embeddings", "embeddings", "bf16"): 1.000,
    ("attention", "q_proj", "bf16"): 0.250,  # 8 x 4096 x 4096 x 2
    ("router", "gate", "bf16"): 0.156,  # 40 x 512 x 4096 x 2
}
SUPER_35_ROWS = {
    ("mamba", "in_proj", "fp8"): 2.832,  # 40 x 18560 x 4096
    ("mamba", "out_proj", "fp8"): 1.250,  # 40 x 4096 x 8192
    ("head", "lm_head", "fp8"): 0.500,
    ("attention", "o_proj", "fp8"): 0.125,  # 8 x 4096 x 4096
    ("embeddings", "embeddings", "bf16"): 1.000,
    ("router", "gate", "bf16"): 0.156,
}


@pytest.mark.parametrize(
    ("name", "rows"), [("nemotron-3-super", SUPER_ROWS), ("nemotron-3.5-super", SUPER_35_ROWS)], ids=["3", "3.5"]
)
def test_super_split_by_module_and_format(name, rows):
    shares = {(s.part, s.module, s.format): s.bytes for s in plan(configs_folder() / f"{name}.json").split}
    assert {row: round(shares[row] / GIB, 3) for row in rows} == rows


@pytest.mark.parametrize(
    ("name", "parts", "without_embeddings", "all_of_it"),
    [
        ("nemotron-3-super", {"shared": 1.693, "latent": 0.609, "attention": 0.500, "mamba": 5.280}, 9.239, 10.239),
        ("nemotron-3.5-super", {"shared": 0.923, "latent": 0.625, "attention": 0.266, "mamba": 4.086}, 6.557, 7.557),
        ("nemotron-3-nano", {}, 1.967, 2.623),
    ],
)
def test_dense_part(name, parts, without_embeddings, all_of_it):
    counted = plan(configs_folder() / f"{name}.json")
    assert {part: round(counted.parts[part] / GIB, 3) for part in parts} == parts
    assert round(counted.dense_bytes / GIB, 3) == all_of_it
    assert round((counted.dense_bytes - counted.parts["embeddings"]) / GIB, 3) == without_embeddings
    row_bytes = 2 * (2688 if "nano" in name else 4096)
    assert counted.dense_bytes_per_token == counted.dense_bytes - counted.parts["embeddings"] + row_bytes


def test_state_of_a_conversation():
    large, small = (plan(configs_folder() / f"{name}.json") for name in ("nemotron-3-super", "nemotron-3-nano"))
    ssm, window = 40 * 128 * 64 * 128 * 4, 40 * (128 * 64 + 2 * 8 * 128) * 4 * 2
    assert (ssm, window) == (167_772_160, 3_276_800)
    assert large.mamba_state_bytes == ssm + window
    assert large.kv_bytes_per_token == 8 * 2 * 2 * 128 * 2 == 8_192
    assert small.mamba_state_bytes == 23 * (64 * 64 * 128 * 4 + (64 * 64 + 2 * 8 * 128) * 4 * 2) == 49_364_992
    assert small.kv_bytes_per_token == 6 * 2 * 2 * 128 * 2 == 6_144


# Shapes against transformers' own model.


def transformers_shapes(config):
    """{canonical name: shape} of the weights of transformers' model, built without memory."""
    import torch
    from transformers import NemotronHConfig, NemotronHForCausalLM

    with torch.device("meta"):
        model = NemotronHForCausalLM(NemotronHConfig(**config))
    shapes = {}
    for name, tensor in model.state_dict().items():
        name = name.replace("model.", "backbone.", 1) if name.startswith("model.") else name
        if ".experts." in name:  # stacked: [experts, rows, columns]
            copies, *shape = tensor.shape
            name = name.replace(".experts.", ".experts.0.")
            shapes[name] = (*shape, copies)
        else:
            shapes[name.removesuffix(".weight")] = tuple(tensor.shape)
    return shapes


def our_shapes(config):
    shapes = {}
    for module in module_shapes(ModelConfig.from_dict(config)):
        shapes[module.name] = (*module.shape, module.copies) if module.part == "routed" else module.shape
        if module.biased:
            shapes[f"{module.name}.bias"] = module.shape[:1]
    return shapes


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"moe_latent_size": None},
        {"mlp_bias": True},
        {"use_bias": True, "use_conv_bias": False},
        {"hybrid_override_pattern": "*EM", "n_groups": 1, "conv_kernel": 3},
    ],
    ids=str,
)
def test_modules_are_those_transformers_builds(changes):
    config = SMALL | changes
    assert our_shapes(config) == transformers_shapes(config)


def test_modules_of_transformers_can_fail():
    assert our_shapes(SMALL) != transformers_shapes(SMALL | {"moe_latent_size": 48})


# A folder: its tensors decide.


@pytest.fixture(scope="module")
def mixed_folder(tmp_path_factory):
    """Formats that differ by layer, MTP, vision and cache scales; blocks of no whole pages."""
    return write_checkpoint(
        tmp_path_factory.mktemp("plan") / "mixed",
        pattern="MEM*E-",
        overrides={
            "backbone.layers.0.mixer.in_proj": "bf16",
            "backbone.layers.4.mixer.shared_experts.up_proj": "nvfp4",
            "backbone.layers.1.mixer.fc1_latent_proj": "fp8",
        },
        mtp=True,
        vision="timm",
        kv_scales=True,
    )


def stored_bytes(folder):
    """{name: bytes} of every tensor, by the safetensors library."""
    from safetensors import safe_open

    sizes = {}
    for shard in sorted(folder.glob("*.safetensors")):
        with safe_open(shard, "pt") as file:
            for name in file.keys():
                tensor = file.get_tensor(name)
                sizes[name] = tensor.numel() * tensor.element_size()
    return sizes


@pytest.mark.parametrize("which", ["tiny", "mixed"])
def test_a_folder_is_counted_to_the_last_byte(which, tiny_path, mixed_folder):
    folder = tiny_path if which == "tiny" else mixed_folder
    counted, stored = plan(folder), stored_bytes(folder)
    routed = {name: size for name, size in stored.items() if ".experts." in name and not name.startswith("mtp.")}
    blocks = sum(size for name, size in routed.items() if name.endswith((".weight", ".weight_scale")))
    dense = [size for name, size in stored.items() if name not in routed and name.startswith(("backbone.", "lm_head."))]
    assert counted.routed_bytes == counted.parts["routed"] == blocks
    assert counted.routed_scalar_bytes == sum(routed.values()) - blocks > 0
    assert counted.dense_bytes == sum(dense)
    assert sum(counted.parts.values()) + counted.routed_scalar_bytes == sum(stored.values())
    assert counted.dense_bytes == sum(
        size for part, size in counted.parts.items() if part not in ("routed", "mtp", "vision")
    )
    assert counted.bytes_per_token == counted.moe_layers * counted.top_k * counted.expert_bytes


def test_mtp_and_vision_are_counted_apart(mixed_folder, tmp_path):
    plain = plan(write_checkpoint(tmp_path / "plain", pattern="MEM*E-", kv_scales=True))
    assert {"mtp", "vision"} <= plan(mixed_folder).parts.keys()
    assert not {"mtp", "vision"} & plain.parts.keys()
    assert plan(mixed_folder).routed_bytes == plain.routed_bytes


@pytest.mark.parametrize("metadata", ["config", "hf_quant", "both"])
@pytest.mark.parametrize("uniform", [False, True], ids=["mixed", "uniform"])
def test_a_config_with_the_vendors_list_counts_like_its_folder(tmp_path, metadata, uniform):
    formats = {"shared": "nvfp4", "mamba": "nvfp4"} if uniform else {"shared": "fp8", "mamba": "fp8"}
    folder = write_checkpoint(tmp_path / "it", metadata=metadata, uniform=uniform, gate="bf16", **formats)
    from_tensors, from_config = plan(folder), plan(folder / "config.json")
    plain_vectors = {"A_log", "D", "dt_bias"}  # their dtype is in no list
    for counted in (from_tensors, from_config):
        assert counted.experts_as == "nvfp4"
    assert {s for s in from_config.split if s.module not in plain_vectors} == {
        s for s in from_tensors.split if s.module not in plain_vectors
    }
    where = "hf_quant_config.json" if metadata == "hf_quant" else "config.json: quantization_config"
    assert any(f"formats are those that {where}" in line for line in from_config.assumptions)


@pytest.mark.parametrize("mtp", [True, "nvfp4"])
def test_mtp_of_a_config_counts_like_the_stored_one(tmp_path, mtp):
    folder = write_checkpoint(tmp_path / "it", mtp=mtp, vision="hf", prefix="language_model.backbone.", gate="bf16")
    stored, counted = plan(folder), plan(folder / "config.json")
    assert counted.parts == {part: size for part, size in stored.parts.items() if part != "vision"}
    assert any("vision tower" in line for line in counted.assumptions)


def test_the_vendors_list_can_fail(tmp_path):
    folder = write_checkpoint(tmp_path / "it", metadata="none", gate="bf16", mamba="fp8")
    assert plan(folder / "config.json").parts["mamba"] != plan(folder).parts["mamba"]


def test_experts_as_does_not_touch_a_folder(mixed_folder):
    counted, asked = plan(mixed_folder), plan(mixed_folder, "bf16")
    assert replace(asked, assumptions=()) == replace(counted, assumptions=())
    assert "experts_as bf16 was not used: the tensors of a folder decide" in asked.assumptions


@pytest.mark.parametrize("routed", ["fp8", "bf16"])
def test_a_folder_with_experts_in_another_format(tmp_path, routed):
    counted = plan(write_checkpoint(tmp_path / "it", routed=routed))
    assert counted.experts_as == routed
    assert counted.expert_bytes == counted.expert_params * {"fp8": 1, "bf16": 2}[routed]
    assert counted.routed_scalar_bytes == {"fp8": 2 * 8 * 2 * 2 * 4, "bf16": 0}[routed]  # layers, experts, up/down, two


def test_layers_with_experts_of_different_formats_are_refused(tmp_path):
    overrides = {f"backbone.layers.4.mixer.experts.{e}.{m}_proj": "fp8" for e in range(8) for m in ("up", "down")}
    folder = write_checkpoint(tmp_path / "it", overrides=overrides)
    with pytest.raises(CheckpointError, match=r"not all of one form: .*layers\.1.*nvfp4.*layers\.4.*fp8"):
        plan(folder)


@pytest.mark.parametrize("prefix", ["language_model.backbone.", "model."])
def test_the_prefix_does_not_change_the_count(tmp_path, prefix):
    here = plan(write_checkpoint(tmp_path / "a"))
    there = plan(write_checkpoint(tmp_path / "b", prefix=prefix))
    assert there.parts == here.parts
    assert plan(tmp_path / "b" / "config.json").split == plan(tmp_path / "a" / "config.json").split


def test_a_tied_head_is_read_whole_from_the_table(tmp_path):
    counted = plan(write_checkpoint(tmp_path / "it", tie=True))
    assert "head" not in counted.parts
    assert counted.dense_bytes_per_token == counted.dense_bytes
    assert plan_of(SMALL | {"tie_word_embeddings": True}).dense_bytes_per_token > 0


def test_an_open_checkpoint_counts_the_same(tiny_path):
    assert plan_checkpoint(Checkpoint.open(tiny_path)) == plan(tiny_path)


# A bare config: formats are an option, and said.


@pytest.mark.parametrize(
    ("experts_as", "expert_bytes"),
    [
        ("nvfp4", 5_505_024 // 2 + 5_505_024 // 16),  # one E4M3 scale for 16 values
        ("mxfp4", 5_505_024 // 2 + 5_505_024 // 32),  # one E8M0 scale for 32 values
        ("fp8", 5_505_024),
        ("bf16", 2 * 5_505_024),
    ],
)
def test_formats_of_experts(experts_as, expert_bytes):
    counted = plan(configs_folder() / "nemotron-3-super.json", experts_as)
    assert counted.expert_bytes == expert_bytes
    assert counted.bytes_per_token == 880 * expert_bytes
    assert counted.experts_as == experts_as
    assert counted.dense_bytes == plan(configs_folder() / "nemotron-3-super.json").dense_bytes
    assert any(f"counted as {experts_as}, as asked" in line for line in counted.assumptions)


def test_the_default_format_is_said():
    counted = plan_of(SMALL)
    assert counted.experts_as == "nvfp4"
    assert "routed experts are counted as nvfp4, the default; experts_as changes it" in counted.assumptions
    assert any("lists no formats" in line and "BF16" in line for line in counted.assumptions)
    assert {s.format for s in counted.split if s.part != "routed"} == {"bf16", "f32"}


def test_what_a_config_states_wins_over_the_default_and_yields_to_the_option():
    config = SMALL | {"nemolab": {"formats": {"experts": "fp8"}}}
    assert plan_of(config).experts_as == "fp8"
    assert plan_of(config, "mxfp4").experts_as == "mxfp4"
    assert any("not as the fp8 the config states" in line for line in plan_of(config, "mxfp4").assumptions)


def test_the_vendors_table_gives_what_our_facts_give():
    """3-Super's facts, written the way its own config.json writes them, one line a module."""
    facts = config_of("nemotron-3-super")
    algorithms = {"fp8": "FP8", "nvfp4": "NVFP4"}
    modules, table = module_shapes(ModelConfig.from_dict(facts)), {}
    precision = read_precision(ModelConfig.from_dict(facts), modules, "config")
    for module in modules:
        format = precision.format_of(module)
        if format in algorithms and module.part == "routed":
            table[module.name.partition(".0.")[0]] = {"quant_algo": algorithms[format], "group_size": 16}
        elif format in algorithms:
            table[module.name] = {"quant_algo": algorithms[format]}
    assert len(table) == 139 + 1 + 40
    listed = {key: value for key, value in facts.items() if key != "nemolab"}
    listed["quantization_config"] = {"quant_algo": "MIXED_PRECISION", "quantized_layers": table}
    cache_scales = 16 * 4  # not in that table
    assert plan_of(listed).dense_bytes == plan_of(facts).dense_bytes - cache_scales
    assert plan_of(listed).parts["shared"] == plan_of(facts).parts["shared"]


def test_an_unquantised_table_is_no_table():
    assert plan_of(SMALL | {"quantization_config": None}) == plan_of(SMALL)
    for empty in ({"quantized_layers": None}, {"quant_algo": "MIXED_PRECISION", "ignore": ["lm_head"]}):
        assert plan_of(SMALL | {"quantization_config": empty}) == plan_of(SMALL)


def test_entries_that_name_nothing_are_reported():
    config = SMALL | {"nemolab": {"formats": {"in_porj": "fp8", "o_proj": {"fp8": [0]}}}}
    assert any("2 of its entries name no module" in line and "in_porj" in line for line in plan_of(config).assumptions)
    assert not any("name no module" in line for line in plan_of(config_of("nemotron-3-super")).assumptions)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "qwen3_moe"}, "qwen3_moe.*Nemotron-H"),
        ({"model_type": None}, "Nemotron-H"),
        ({"hybrid_override_pattern": None}, "hybrid_override_pattern"),
        ({"hybrid_override_pattern": "M*-"}, "no MoE layer"),
        ({"n_routed_experts": None}, "n_routed_experts"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9"),
        ({"moe_intermediate_size": 100}, r"experts.*\[100, 32\]|100 columns"),
        ({"nemolab": {"formats": {"in_proj": "int4"}}}, "nemolab.formats.in_proj is 'int4'"),
        ({"nemolab": {"formats": {"in_proj": {"fp8": 3}}}}, "list of layer numbers"),
        ({"nemolab": {"formats": {"norm_f": "fp8"}}}, r"norm_f \[64\] is no matrix .* bf16, f16, f32 was expected"),
        ({"nemolab": {"formats": ["fp8"]}}, "an object was expected"),
        ({"nemolab": {"formats": {}, "weight_only": 5}}, "weight_only is '5'"),
        ({"quantization_config": {"quant_algo": "FOO"}}, "unknown quant_algo 'FOO'"),
        ({"quantization_config": {"quantized_layers": {"lm_head": {"quant_algo": "FOO"}}}}, "lm_head .*'FOO'"),
        ({"quantization_config": {"quantized_layers": ["lm_head"]}}, "is a list"),
    ],
    ids=str,
)
def test_configs_that_cannot_be_counted_are_refused(changes, message):
    with pytest.raises(CheckpointError, match=message):
        plan_of(SMALL | changes)


def test_experts_that_differ_in_a_table_are_refused():
    names = [f"backbone.layers.1.mixer.experts.{expert}.up_proj" for expert in range(8)]
    layers = {name: {"quant_algo": "FP8" if "experts.5" in name else "NVFP4"} for name in names}
    with pytest.raises(CheckpointError, match=r"experts\.5\.up_proj' is fp8"):
        plan_of(SMALL | {"quantization_config": {"quantized_layers": layers}})


def test_a_format_that_does_not_fit_the_shape_names_the_module():
    with pytest.raises(CheckpointError, match=r"layers\.1\.mixer\.experts\.0\.down_proj \[32, 80\].*groups of 32"):
        plan_of(SMALL | {"moe_intermediate_size": 80}, "mxfp4")


def test_an_unknown_format_is_bad_usage():
    with pytest.raises(UsageError, match="nvfp4, mxfp4, fp8, bf16, published was expected"):
        plan_of(SMALL, "int3")


def test_a_config_that_claims_two_thousand_million_experts_is_only_arithmetic():
    counted = plan_of(SMALL | {"n_routed_experts": 2**31 - 1})
    assert counted.routed_bytes == 2 * (2**31 - 1) * counted.expert_bytes


def test_paths_that_are_no_model(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        plan(tmp_path / "nothing")
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    with pytest.raises(CheckpointError, match=r"no \*.safetensors.*config.json"):
        plan(tmp_path)
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="no folder and no .json"):
        plan(tmp_path / "weights.bin")
    (tmp_path / "experts.bin").write_bytes(b"")
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is a store"):
        plan(tmp_path)
    with pytest.raises(CheckpointError, match=r"published.json has no model_type"):
        plan(configs_folder() / "published.json")


# What scripts and notebooks get.


def test_json_has_the_promised_keys_and_plain_types(tiny_path):
    for path in (tiny_path, configs_folder() / "nemotron-3-nano.json"):
        answer = plan(path).to_dict()
        assert [key for key in KEYS if key not in answer] == []
        assert json.loads(json.dumps(answer)) == answer
    assert answer["pages_per_expert"] == 1370.25
    pages = plan(configs_folder() / "nemotron-3-super.json").to_dict()["pages_per_expert"]
    assert (pages, type(pages)) == (756, int)


def test_the_text_names_what_matters():
    text = str(plan(configs_folder() / "nemotron-3-super.json"))
    for words in (
        "3,096,576 bytes = 756 pages",
        "40 layers x 22 of 512",
        "2,724,986,880 bytes = 2.725 GB",
        "59.06 GiB",
    ):
        assert words in text


def test_the_frame_adds_up():
    counted = plan(configs_folder() / "nemotron-3-super.json")
    frame = counted.frame()
    assert frame.groupby("part")["bytes"].sum().to_dict() == counted.parts
    assert list(frame["bytes"]) == sorted(frame["bytes"], reverse=True)


def test_models_side_by_side():
    frame = compare_models().set_index("model")
    assert list(frame.index) == [
        "tiny",
        "Nemotron-3-Super-120B-A12B-NVFP4",
        "Nemotron-3-Nano-30B-A3B-NVFP4",
        "Qwen3.8-Flash-Next",
        "DeepSeek-V4.1-Flash",
    ]
    assert frame["bytes_per_token"].to_dict() == {
        "tiny": plan(configs_folder().parent / "tiny").bytes_per_token,
        "Nemotron-3-Super-120B-A12B-NVFP4": 2_724_986_880,
        "Nemotron-3-Nano-30B-A3B-NVFP4": 774_531_072,
        "Qwen3.8-Flash-Next": 48 * 10 * 2_764_800,
        "DeepSeek-V4.1-Flash": 40 * 6 * 18_800_640,
    }
    assert round(frame.loc["DeepSeek-V4.1-Flash", "gib_per_token"], 2) == 4.20
    assert round(frame.loc["DeepSeek-V4.1-Flash", "gb_per_token"], 2) == 4.51
    assert frame.loc["Qwen3.8-Flash-Next", "routed_gib"] == 63.28125


def test_another_model_takes_the_first_row(mixed_folder):
    assert compare_models(mixed_folder)["model"].iloc[0] == "mixed"


def test_published_blocks_are_recomputed_from_their_parameters(tmp_path):
    published = read_published()
    assert {model.name: model.expert_bytes for model in published} == {
        "Qwen3.8-Flash-Next": 3 * 2560 * 640 * 9 // 16,
        "DeepSeek-V4.1-Flash": 17_694_720 + 1_105_920,
    }


def test_published_blocks_can_fail(tmp_path):
    data = json.loads((configs_folder() / "published.json").read_text())
    data["models"][0]["expert_bytes"] += 1
    (tmp_path / "published.json").write_text(json.dumps(data))
    with pytest.raises(NemolabError, match="Qwen3.8-Flash-Next states 2,764,801"):
        read_published(tmp_path / "published.json")
