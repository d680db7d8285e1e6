"""Any family's bare config: what an expert is, is seen from the model; totals are those that were published.

What the publishers say stands in each config of `data/configs/`, section `nemolab.published`, with its source.
"""

import json
import re
from math import floor

import pytest

from nemolab.checkpoint.json_files import read_json
from nemolab.cli import main
from nemolab.errors import CheckpointError, UsageError
from nemolab.paths import configs_folder
from nemolab.plan import compare_families, family_configs, plan
from nemolab.plan.any_model import plan_any
from nemolab.plan.comparison import _family_plan
from nemolab.plan.survey import survey
from nemolab.plan.weight_formats import weight_bytes

FAMILIES = [path.stem for path in family_configs()]
PUBLISHED = {name: read_json(configs_folder() / f"{name}.json")["nemolab"]["published"] for name in FAMILIES}
EXACT = [name for name, said in PUBLISHED.items() if isinstance(said.get("total_params"), int)]
ROUNDED = [name for name, said in PUBLISHED.items() if isinstance(said.get("total_params"), str)]
ACTIVE = [name for name, said in PUBLISHED.items() if "active_params" in said]


def counted(name):
    return _family_plan(configs_folder() / f"{name}.json")


def config_of(name, **changes):
    return read_json(configs_folder() / f"{name}.json") | changes


def plan_of(config, **options):
    return plan_any(config, "config.json", name="it", **options)


def says(value, text):
    """Whether a count is what a publisher writes as 12.9B: rounded, or cut off, at its last digit."""
    number, unit = re.fullmatch(r"([\d.]+)([BT])", text).groups()
    digits = len(number.partition(".")[2])
    scaled = value / {"B": 1e9, "T": 1e12}[unit] * 10**digits
    return round(float(number) * 10**digits) in (round(scaled), floor(scaled))


# Totals, as published.


def everything(one):
    """All parameters, of vision too: that part is in BF16 here, two bytes each."""
    return one.total_params + one.parts.get("vision", 0) // 2


@pytest.mark.parametrize("name", EXACT)
def test_totals_are_the_published_ones_to_the_last_parameter(name):
    assert everything(counted(name)) == PUBLISHED[name]["total_params"]


@pytest.mark.parametrize("name", ROUNDED)
def test_rounded_totals_are_the_published_ones(name):
    assert says(counted(name).total_params, PUBLISHED[name]["total_params"])


@pytest.mark.parametrize("name", ACTIVE)
def test_parameters_a_token_uses_are_as_published(name):
    """Publishers differ on whether the embedding table counts, of which a token reads one row."""
    one = counted(name)
    embeddings = one.parts["embeddings"] // 2
    values = (one.active_params_per_token, one.active_params_per_token + embeddings)
    assert any(says(value, PUBLISHED[name]["active_params"]) for value in values), values


def test_at_least_eight_families_state_exact_totals_and_their_sources():
    assert len({counted(name).model_type for name in EXACT}) >= 8
    for said in PUBLISHED.values():
        assert all(said.get(key.replace("params", "source")) for key in said if key.endswith("_params"))


def test_totals_can_fail():
    config = config_of("mixtral-8x7b", num_hidden_layers=31)
    assert plan_of(config).total_params != PUBLISHED["mixtral-8x7b"]["total_params"]
    assert not says(46_702_792_704, "45B") and says(46_702_792_704, "46B") and says(46_702_792_704, "47B")


# Experts: (moe_layers, experts, top_k, expert_bytes), each with its arithmetic.
MXFP4 = 17 / 32  # half a byte, and one of scale for 32
EXPERTS = {
    "mixtral-8x7b": (32, 8, 2, 3 * 4096 * 14336 * 2),
    "qwen3-30b-a3b": (48, 128, 8, 3 * 2048 * 768 * 2),
    "qwen3-235b-a22b": (94, 128, 8, 3 * 4096 * 1536 * 2),
    "qwen3-next-80b-a3b": (48, 512, 10, 3 * 2048 * 512 * 2),
    "gpt-oss-20b": (24, 32, 4, 3 * 2880 * 2880 * MXFP4 + 3 * 2880 * 2),  # and biases: gate, up, down
    "gpt-oss-120b": (36, 128, 4, 3 * 2880 * 2880 * MXFP4 + 3 * 2880 * 2),
    "deepseek-v3": (58, 256, 8, 3 * 7168 * 2048 + 3 * 4 * 56 * 16),  # F32 for 128 x 128: 56 x 16 blocks
    "kimi-k2": (60, 384, 8, 3 * 7168 * 2048 + 3 * 4 * 56 * 16),
    "glm-4.5-air": (45, 128, 8, 3 * 4096 * 1408 * 2),
    "olmoe-1b-7b": (16, 64, 8, 3 * 2048 * 1024 * 2),
    "granite-4.0-h-small": (40, 72, 10, 3 * 4096 * 768 * 2),
    "minimax-m2": (62, 256, 8, 3 * 3072 * 1536 + 3 * 4 * 24 * 12),
    "llama-4-scout": (48, 16, 1, 3 * 5120 * 8192 * 2),
    "ernie-4.5-21b-a3b": (27, 64, 6, 3 * 2560 * 1536 * 2),
    "phi-3.5-moe": (32, 16, 2, 3 * 4096 * 6400 * 2),
    "qwen3.8-flash-next": (48, 512, 10, 3 * 2560 * 640 * 2),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_experts_are_the_known_ones(name):
    one = counted(name)
    assert (one.moe_layers, one.experts, one.top_k, one.expert_bytes) == EXPERTS[name]
    assert one.bytes_per_token == one.moe_layers * one.top_k * one.expert_bytes
    assert one.routed_bytes == one.moe_layers * one.experts * one.expert_bytes == one.parts["routed"]


def test_formats_asked_for_count_their_scales():
    block = plan_of(config_of("qwen3.8-flash-next"), experts_as="nvfp4")
    assert block.expert_bytes == 3 * 2560 * 640 * 9 // 16 == 2_764_800
    assert block.bytes_per_token == 1_327_104_000
    assert block.routed_scalar_bytes == 48 * 512 * 3 * 4  # one F32 a matrix
    assert plan_of(config_of("olmoe-1b-7b"), experts_as="mxfp4").expert_bytes == 3 * 2048 * 1024 * 17 // 32
    assert plan_of(config_of("olmoe-1b-7b"), experts_as="fp8").expert_bytes == 3 * 2048 * 1024
    oss = plan_of(config_of("gpt-oss-20b"), experts_as="bf16")
    assert oss.expert_bytes == (3 * 2880 * 2880 + 3 * 2880) * 2
    assert "routed experts are counted as bf16, as asked, not as the mxfp4 the config states" in oss.assumptions


def test_experts_nobody_quantised_are_nvfp4_unless_asked_for_as_published():
    default, published = plan_of(config_of("olmoe-1b-7b")), plan_of(config_of("olmoe-1b-7b"), experts_as="published")
    assert default.expert_bytes == 3 * 2048 * 1024 * 9 // 16
    assert "routed experts are counted as nvfp4, the default; experts_as changes it" in default.assumptions
    assert published.expert_bytes == 3 * 2048 * 1024 * 2
    assert plan_of(config_of("gpt-oss-20b")).experts_as == "mxfp4"  # what a config states wins over the default
    odd = plan_of(SMALL | {"moe_intermediate_size": 40})  # rows of 40 are no whole groups of 16
    assert odd.experts_as == "bf16"


def test_dense_as_leaves_routers_tables_and_norms_alone():
    plain, fp8 = plan_of(SMALL), plan_of(SMALL, dense_as="fp8")
    for part in ("router", "embeddings", "norm", "routed"):
        assert fp8.parts[part] == plain.parts[part]
    matrices = {share.module: share.bytes for share in fp8.split if share.format == "fp8"}
    assert matrices["self_attn.q_proj"] == 2 * (64 * 64 + 4)  # two layers, one F32 a matrix
    assert matrices["lm_head"] == 128 * 64 + 4
    assert fp8.expert_bytes == plain.expert_bytes


def test_fp8_as_asked_keeps_the_blocks_a_config_states():
    config = config_of("deepseek-v3", num_hidden_layers=4)
    assert plan_of(config, experts_as="fp8").expert_bytes == EXPERTS["deepseek-v3"][3]


def test_the_router_is_no_mlp_that_has_as_many_neurons():
    """Qwen3-Next has 512 experts and a shared expert of 512 neurons."""
    one = counted("qwen3-next-80b-a3b")
    assert one.parts["router"] == 48 * 512 * 2048 * 2
    assert one.shared_expert_params == 3 * 2048 * 512 + 2048  # and its gate


def test_parts_add_up():
    for name in FAMILIES:
        one = counted(name)
        assert (
            sum(size for part, size in one.parts.items() if part not in ("routed", "mtp", "vision")) == one.dense_bytes
        )
        assert sum(share.bytes for share in one.split) == sum(one.parts.values())


def test_the_state_of_a_token_is_that_of_its_attention():
    assert counted("qwen3-30b-a3b").kv_bytes_per_token == 48 * 2 * 4 * 128 * 2
    assert counted("qwen3-30b-a3b").mamba_state_bytes == 0
    assert counted("deepseek-v3").kv_bytes_per_token == 61 * (512 + 64) * 2  # the latent and the shared key
    assert counted("qwen3-next-80b-a3b").mamba_state_bytes is None  # 36 of its layers keep another state


def test_what_is_declared_and_not_built_is_said():
    assert any("num_nextn_predict_layers 1) is declared" in line for line in counted("glm-4.5-air").assumptions)
    assert any("counted as deepseek_v3" in line for line in counted("kimi-k2").assumptions)
    assert any("does not describe the rest" in line for line in counted("qwen3.8-flash-next").assumptions)
    assert "vision" not in counted("qwen3.8-flash-next").parts


def test_families_side_by_side():
    frame = compare_families().set_index("model")
    assert list(frame["bytes_per_token"]) == sorted(frame["bytes_per_token"])
    assert frame.loc["Qwen3.8-Flash-Next", "gb_per_token_nvfp4"] == 1.3271040
    assert frame.loc["Nemotron-3-Super-120B-A12B-NVFP4", "bytes_per_token"] == 2_724_986_880
    assert frame.loc["Mixtral-8x7B-v0.1", "share_read"] == 2 / 8


# Small configs of other shapes.

SMALL = {
    "model_type": "qwen3_moe",
    "dtype": "bfloat16",
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}
DEEPSEEK = SMALL | {
    "model_type": "deepseek_v3",
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_group": 2,
    "topk_group": 1,
    "num_key_value_heads": 4,
}
LONGCAT = {
    "model_type": "longcat_flash",
    "vocab_size": 128,
    "hidden_size": 64,
    "num_layers": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "ffn_hidden_size": 96,
    "expert_ffn_hidden_size": 32,
    "n_routed_experts": 6,
    "zero_expert_num": 2,
    "moe_topk": 3,
    "kv_lora_rank": 16,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}


def one_group(config, **options):
    (group,) = plan_of(config, **options).groups
    return group


def test_top_k_is_seen_not_read():
    """The field is called otherwise in every family; what counts is how many a token is sent to."""
    for config, top_k in (
        (SMALL | {"num_experts_per_tok": 3}, 3),
        (DEEPSEEK | {"num_experts_per_tok": 4}, 4),
        (LONGCAT, 3),
        ({"model_type": "ernie4_5_moe", "moe_k": 5, "num_hidden_layers": 2, "moe_num_experts": 8}, 5),
        ({"model_type": "zaya", "num_hidden_layers": 2}, 1),
        ({"model_type": "jetmoe", "num_hidden_layers": 1, "num_experts_per_tok": 3}, 3),
        ({"model_type": "nllb-moe", "encoder_layers": 4, "decoder_layers": 4}, 2),
        ({"model_type": "switch_transformers"}, 1),
    ):
        assert {group.top_k for group in plan_of(config).groups} == {top_k}, config["model_type"]


def test_first_layers_may_be_dense_and_groups_are_no_experts():
    one = plan_of(DEEPSEEK)
    assert one.groups[0].layers == (1, 2, 3) and one.layers["mlp"] == 1
    assert one.groups[0].top_k == 2  # not topk_group 1, nor the two scores that rank a group
    assert one.shared_expert_params == 2 * 3 * 64 * 32


def test_only_every_other_layer_may_have_experts():
    one = plan_of(SMALL | {"num_hidden_layers": 4, "decoder_sparse_step": 2})
    assert one.groups[0].layers == (1, 3) and one.layers == {"mamba": 0, "moe": 2, "attention": 4, "mlp": 2}


def test_layers_may_differ_in_how_many_they_use():
    config = {
        "model_type": "hunyuan_v1_moe",
        "num_hidden_layers": 2,
        "num_experts": 8,
        "moe_topk": [1, 3],
        "head_dim": 16,
    }
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    one = plan_of(config | sizes | {"vocab_size": 128})
    assert [(group.layers, group.top_k) for group in one.groups] == [((0,), 1), ((1,), 3)]
    assert one.bytes_per_token == (1 + 3) * one.expert_bytes
    assert "of 2 kinds of experts" in str(one)


def test_experts_that_cost_nothing_are_no_experts():
    one = plan_of(LONGCAT)
    assert (one.experts, one.top_k, one.groups[0].identities) == (6, 3, 2)
    # transformers makes matrices for the zero-compute experts too; they are left out
    assert one.parts["routed"] == one.moe_layers * 6 * 3 * 64 * 32 * 9 // 16
    assert any("2 zero-compute experts, which read nothing" in line for line in one.assumptions)


def test_a_latent_space_is_seen():
    """The family by the other road: built by transformers, it gives what the arithmetic of `plan_config` gives."""
    config = config_of("nemotron-3-super")
    config.pop("nemolab")
    other, own = plan_of(config, experts_as="nvfp4"), plan(configs_folder() / "nemotron-3-super.json")
    for field in ("moe_layers", "experts", "top_k", "expert_bytes", "bytes_per_token", "expert_width", "layers"):
        assert getattr(other, field) == getattr(own, field), field
    assert other.total_params == own.total_params
    assert other.active_params_per_token == own.active_params_per_token
    assert other.shared_expert_params == own.shared_expert_params
    assert other.parts["latent"] == 40 * 2 * 4096 * 1024 * 2


def test_a_router_beside_the_experts_is_tried_alone():
    """Gemma 4 routes in the layer itself, which does not run without positions."""
    config = {
        "model_type": "gemma4_text", "enable_moe_block": True, "num_experts": 8, "top_k_experts": 2,
        "moe_intermediate_size": 32, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128,
        "layer_types": ["sliding_attention", "full_attention"], "vocab_size_per_layer_input": 128,
    }  # fmt: skip
    group = one_group(config)
    assert (group.experts, group.top_k, group.matrices) == (8, 2, ((32, 64), (32, 64), (64, 32)))


def test_shared_experts_in_a_stack_are_not_routed():
    text = {"num_hidden_layers": 2, "hidden_size": 64, "moe_intermediate_size": 32, "n_routed_experts": 16}
    one = plan_of({"model_type": "inkling_text", "vocab_size": 128, "num_experts_per_tok": 3} | text)
    assert {(group.experts, group.top_k) for group in one.groups} == {(16, 3)}
    assert one.parts["shared"] > 0


def test_a_tied_table_is_read_whole():
    tied, own_head = plan_of(SMALL | {"tie_word_embeddings": True}), plan_of(SMALL)
    assert "head" not in tied.parts and tied.dense_bytes_per_token == tied.dense_bytes
    assert own_head.dense_bytes - own_head.dense_bytes_per_token == 127 * 64 * 2  # all rows of the table but one


def test_a_dense_model_has_no_experts_and_says_so():
    one = plan_of({"model_type": "llama", "num_hidden_layers": 2, "vocab_size": 128} | {
        key: SMALL[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    })  # fmt: skip
    assert (one.moe_layers, one.bytes_per_token, one.routed_bytes) == (0, 0, 0)
    assert one.dense_bytes > 0 and "no routed experts" in str(one)
    assert any("the model is dense" in line for line in one.assumptions)
    assert json.loads(json.dumps(one.to_dict())) == one.to_dict()


# Formats that configs state.


@pytest.mark.parametrize(
    ("stated", "expert_format", "q_proj"),
    [
        ({"quant_method": "fp8"}, "fp8", "fp8"),
        ({"quant_method": "fp8", "weight_block_size": [16, 16]}, "fp8_16x16", "fp8_16x16"),
        ({"quant_method": "fp8", "modules_to_not_convert": ["self_attn"]}, "fp8", "bf16"),
        ({"quant_method": "mxfp4"}, "mxfp4", "bf16"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["model.layers.*.self_attn*"]}, "nvfp4", "bf16"),
        ({"quant_algo": "MIXED_PRECISION", "quantized_layers": {
            "model.layers.0.mlp.experts": {"quant_algo": "NVFP4"}, "model.layers.1.mlp.experts.0.up_proj": "NVFP4",
            "model.layers.0.self_attn.q_proj": "FP8", "model.layers.1.self_attn.q_proj": "FP8",
        }}, "nvfp4", "fp8"),
        ({"quant_method": "compressed-tensors", "ignore": ["lm_head", "re:.*self_attn.*"], "config_groups": {
            "group_0": {"weights": {"type": "int", "num_bits": 4, "group_size": 32}}}}, "int4_32", "bf16"),
        ({"quant_method": "gptq", "bits": 4}, "nvfp4", "bf16"),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_formats_a_config_states(stated, expert_format, q_proj):
    one = plan_of(SMALL | {"quantization_config": stated})
    assert {group.format for group in one.groups} == {expert_format}
    assert {share.format for share in one.split if share.module == "self_attn.q_proj"} == {q_proj}
    if stated.get("quant_method") == "gptq":
        assert any("'gptq', which is not read" in line for line in one.assumptions)


def test_formats_may_lie_beside_the_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    stated = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(stated))
    one = plan(tmp_path / "config.json")
    assert one.experts_as == "nvfp4" and any("hf_quant_config.json beside" in line for line in one.assumptions)
    assert {share.format for share in one.split if share.part == "head"} == {"bf16"}


def test_experts_for_pictures_are_no_part_of_a_token():
    sizes = {"num_hidden_layers": 2, "vocab_size": 128, "moe_intermediate_size": [32, 16]}
    one = plan_of({"model_type": "ernie4_5_vl_moe_text"} | sizes)
    assert {group.matrices[0] for group in one.groups} == {(32, 2560)}
    pictures = [share for share in one.split if (share.part, share.module) == ("vision", "experts")]
    assert [share.bytes for share in pictures] == [one.moe_layers * 64 * 3 * 2560 * 16 * 9 // 16]


def test_blocks_of_fp8_that_are_cut_off_have_a_scale_of_their_own():
    assert weight_bytes(130, 200, "fp8_128x128") == 130 * 200 + 4 * 2 * 2
    assert weight_bytes(128, 256, "fp8_128x128") == 128 * 256 + 4 * 1 * 2


def test_int4_counts_a_bf16_scale_for_each_group():
    groups = {"a": {"weights": {"type": "int", "num_bits": 4, "group_size": 32}}}
    stated = {"quant_method": "compressed-tensors", "config_groups": groups}
    assert one_group(SMALL | {"quantization_config": stated}).expert_bytes == 3 * 64 * 32 * (1 / 2 + 2 / 32)


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ("fp8", "quantization_config is a str; an object"),
        ({"quant_method": "fp8", "weight_block_size": [0, 1]}, r"weight_block_size is '\[0, 1\]'"),
        ({"quant_method": "modelopt", "quant_algo": "FOO"}, "unknown quant_algo 'FOO'"),
        ({"quant_method": "mxfp4", "modules_to_not_convert": "lm_head"}, "a list of module names"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "config_groups"),
    ],
    ids=str,
)
def test_formats_that_cannot_be_read_are_refused(stated, message):
    with pytest.raises(CheckpointError, match=message):
        plan_of(SMALL | {"quantization_config": stated})


def test_a_strangers_expression_that_could_run_for_hours_is_not_tried():
    stated = {"quant_method": "fp8", "modules_to_not_convert": ["re:(a+)+$", "re:((.*)*)*x"]}
    stated["modules_to_not_convert"] += ["re:" + ".?" * 40 + "Q0", "re:" + r"(?:.|\w)" * 20 + "Q0"]
    assert any("4 patterns" in line for line in plan_of(SMALL | {"quantization_config": stated}).assumptions)


# What configs leave unsaid, or say in other words.

DBRX = {
    "model_type": "dbrx",
    "d_model": 64,
    "n_heads": 4,
    "n_layers": 2,
    "vocab_size": 128,
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 500000, "model_type": ""},
    "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 6, "moe_top_k": 3, "model_type": ""},
}


def test_experts_one_below_the_other_in_a_matrix_are_seen():
    one = plan_of(DBRX, experts_as="bf16")
    assert (one.moe_layers, one.experts, one.top_k, one.expert_bytes) == (2, 6, 3, 2 * 3 * 64 * 48)
    assert one.parts["router"] == 2 * 6 * 64 * 2
    assert not any("the config states" in line for line in one.assumptions)


def test_a_number_of_experts_nothing_routes_to_is_said():
    one = plan_of(SMALL | {"mlp_only_layers": [0, 1]})
    assert one.moe_layers == 0
    assert any("yet the config states num_experts 8" in line for line in one.assumptions)
    assert not any("yet" in line for line in plan_of(SMALL | {"model_type": "qwen3", "num_experts": None}).assumptions)


def test_what_is_null_is_not_stated_where_a_token_is_sent():
    """Files leave the groups of a router null that has none; transformers wants a number there."""
    config = SMALL | {"model_type": "dots1", "n_routed_experts": 8, "n_shared_experts": 1, "n_group": None}
    assert one_group(config | {"topk_group": None, "num_experts_per_tok": 3}).top_k == 3


@pytest.mark.parametrize("top_k", [-2, 0, 9])
def test_no_token_is_sent_to_more_experts_than_there_are_or_to_none(top_k):
    with pytest.raises(CheckpointError, match=f"to {top_k} of 8 experts; from 1 to 8 were expected"):
        plan_of(SMALL | {"num_experts_per_tok": top_k})


def test_a_config_may_name_its_architecture_alone():
    config = {key: value for key, value in SMALL.items() if key != "model_type"}
    one = plan_of(config | {"architectures": ["Qwen3MoeForCausalLM"]})
    assert one.model_type == "qwen3_moe" and one.groups == plan_of(SMALL).groups
    assert any("it has no model_type, so it is counted as qwen3_moe" in line for line in one.assumptions)


def test_sizes_by_other_names_are_not_taken_in_silence():
    renamed = {key: value for key, value in SMALL.items() if key != "num_hidden_layers"} | {"num_layers": 3}
    said = [line for line in plan_of(renamed | {"hidden_size": 64}).assumptions if "transformers' own" in line]
    assert (
        len(said) == 1 and "num_hidden_layers 24 stand" in said[0] and "num_layers, which are no fields of" in said[0]
    )
    for config in (SMALL, DBRX):
        assert not any("transformers' own" in line for line in plan_of(config).assumptions)


# What cannot be counted, and how to help.


def test_a_family_nobody_knows_is_refused_with_a_way_out():
    with pytest.raises(CheckpointError) as refused:
        plan_of({"model_type": "mixtrall"})
    for words in ("'mixtrall' is unknown to transformers 5", "mixtral", "install a newer", '"expert_shapes"'):
        assert words in str(refused.value)
    facts = {"moe_layers": 48, "experts": 512, "top_k": 10, "expert_shapes": [[640, 2560], [640, 2560], [2560, 640]]}
    one = plan_of({"model_type": "mixtrall", "nemolab": facts | {"dense_params": 10**9}}, experts_as="nvfp4")
    assert (one.expert_bytes, one.bytes_per_token) == (2_764_800, 1_327_104_000)
    assert one.dense_bytes == 2 * 10**9
    assert any("nothing was built" in line for line in one.assumptions)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ([], "nemolab is a list"),
        ({"expert_shapes": [[1]]}, "expert_shapes"),
        ({"expert_shapes": [[4, 4]], "moe_layers": 2, "experts": 4}, "nemolab.top_k is 'None'"),
        ({"expert_shapes": [[4, 4]], "moe_layers": 2, "experts": 4, "top_k": 5}, "at most the 4 experts"),
        ({"expert_shapes": [[4, 4]], "moe_layers": 10**12, "experts": 4, "top_k": 1}, "moe_layers"),
        ({"top_k": True}, "nemolab.top_k is 'True'"),
    ],
    ids=str,
)
def test_facts_that_make_no_sense_are_refused(facts, message):
    with pytest.raises(CheckpointError, match=message):
        plan_of(SMALL | {"nemolab": facts})


def test_experts_nobody_chooses_from_are_named_and_top_k_may_be_stated():
    """DeepSeek-V2's router chooses only by methods its config names; without one nothing is seen."""
    config = DEEPSEEK | {"model_type": "deepseek_v2", "topk_method": "none"}
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts with 8 x .*did not show .*\"top_k\": K"):
        plan_of(config)
    assert one_group(config | {"nemolab": {"top_k": 2}}).top_k == 2


ODD = [None, "x", -1, 0, 2**31 - 1, 10**12, 10**4000, 1.5, float("nan"), float("inf"), True, [], {}, [None]]
FIELDS = ["num_hidden_layers", "hidden_size", "num_experts", "num_experts_per_tok", "moe_intermediate_size"]


@pytest.mark.parametrize("field", [*FIELDS, "vocab_size", "head_dim", "model_type", "architectures", "dtype"])
def test_odd_values_are_counted_or_refused_in_one_line(field):
    for value in ODD:
        try:
            plan_of(SMALL | {field: value})
        except CheckpointError as refused:
            assert "\n" not in str(refused) and len(str(refused)) < 600, (value, refused)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 10**12}, "num_hidden_layers is 1,000,000,000,000"),
        ({"num_hidden_layers": 5000}, "num_hidden_layers is 5,000; a count of layers of at most 1,000"),
        ({"hidden_size": 10**4000}, "hidden_size is a number of 4001 digits"),
        ({"num_experts": float("nan")}, "num_experts is NaN"),
        ({"mlp_only_layers": [0] * 100_001}, "mlp_only_layers has 100,001 entries"),
        ({"num_experts": "8"}, "cannot read it as qwen3_moe"),
        ({"model_type": None}, "has no model_type"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_odd_values_are_refused_by_name(changes, message):
    with pytest.raises(CheckpointError, match=message):
        plan_of(SMALL | changes)


def test_a_model_without_end_is_not_built(monkeypatch):
    monkeypatch.setattr("nemolab.plan.meta_model.MOST_MODULES", 20)
    with pytest.raises(CheckpointError, match="more than 20 modules"):
        plan_of(SMALL)


def test_building_stops_in_time(monkeypatch):
    monkeypatch.setattr("nemolab.plan.meta_model.MOST_SECONDS", -1.0)
    with pytest.raises(CheckpointError, match="took more than"):
        plan_of(SMALL)


def test_code_that_comes_with_a_model_is_not_run():
    one = plan_of(SMALL | {"auto_map": {"AutoModelForCausalLM": "evil.Model"}})
    assert any("auto_map is ignored" in line for line in one.assumptions)


def test_an_unknown_format_is_bad_usage():
    for options in ({"experts_as": "int3"}, {"dense_as": "int3"}):
        with pytest.raises(UsageError, match="nvfp4, mxfp4, fp8, bf16(, published)? was expected"):
            plan_of(SMALL, **options)


# The verb.


def test_the_verb_takes_any_config(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    arguments = ["plan", str(tmp_path / "config.json"), "--experts-as", "nvfp4", "--dense-as", "fp8", "--json"]
    assert main(arguments) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["expert_bytes"] == 3 * 64 * 32 * 9 // 16
    assert document["name"] == tmp_path.name and document["source"].startswith("transformers' model of")
    for key in ("total_params", "active_params_per_token", "groups", "n_layers", "shared_expert_params", "parts"):
        assert key in document


def test_a_folder_of_another_family_is_sent_to_its_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"tensors of a qwen3_moe are not read.*config\.json"):
        plan(tmp_path)


def test_the_survey_says_what_each_family_is():
    found = {model_type: kind for model_type, kind, _ in survey(["olmoe", "llama", "nobody"])}
    assert found == {"olmoe": "experts", "llama": "dense", "nobody": "failed"}
