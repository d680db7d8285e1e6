"""ModelConfig: three spellings of the layers, nested configs, odd infinities, and errors that name the field."""

import json
import math

import pytest
from published import NANO_CONFIG, SUPER_CONFIG
from synthetic import write_checkpoint

from nemolab.checkpoint import Checkpoint, ModelConfig
from nemolab.errors import CheckpointError

BASE = {
    "model_type": "nemotron_h", "hybrid_override_pattern": "MEM*E-", "hidden_size": 64, "vocab_size": 300,
    "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "mamba_num_heads": 4,
    "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 96, "moe_shared_expert_intermediate_size": 96, "moe_latent_size": 32,
}  # fmt: skip
LAYERS = ("mamba", "moe", "mamba", "attention", "moe", "mlp")


def read(**changes):
    return ModelConfig.from_dict({key: value for key, value in (BASE | changes).items() if value != "absent"})


def refusal(**changes):
    with pytest.raises(CheckpointError) as caught:
        read(**changes)
    return str(caught.value)


def test_all_three_spellings_give_the_same_layers():
    words = ["mamba", "moe", "mamba", "attention", "moe", "mlp"]
    renamed = ["linear_attention", "moe", "linear_attention", "full_attention", "moe", "mlp"]
    spelled = [{"hybrid_override_pattern": "MEM*E-"}, {"layers_block_type": words}, {"layers_block_type": renamed}]
    spelled += [{"layer_types": renamed}, {"layer_types": words}]
    for spelling in spelled:
        assert read(**({"hybrid_override_pattern": "absent"} | spelling)).layer_types == LAYERS


def test_the_same_checkpoint_in_three_spellings_opens_the_same(tmp_path):
    opened = [
        Checkpoint.open(write_checkpoint(tmp_path / spelling, layer_spelling=spelling))
        for spelling in ("pattern", "layers_block_type", "layer_types")
    ]
    assert opened[0].config == opened[1].config == opened[2].config
    assert opened[0].modules == opened[1].modules == opened[2].modules


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hybrid_override_pattern": "MEX*"}, "unknown letter 'X' at position 2; known are M, E, *, -"),
        ({"hybrid_override_pattern": ""}, "has 0 layers"),
        ({"hybrid_override_pattern": "M" * 10_001}, "has 10001 layers"),
        ({"hybrid_override_pattern": 7}, "is a int"),
        ({"hybrid_override_pattern": "absent"}, "no list of layers: hybrid_override_pattern, layers_block_type"),
        (
            {"layer_types": ["mamba", "sliding"], "hybrid_override_pattern": "absent"},
            "unknown word 'sliding' at position 1",
        ),
        ({"layer_types": ["mamba", 3], "hybrid_override_pattern": "absent"}, "unknown word '3' at position 1"),
        ({"layers_block_type": ["mamba", "moe"]}, "disagree in length"),
        ({"layers_block_type": ["mamba", "moe", "mamba", "moe", "moe", "mlp"]}, "disagree at layer 3"),
    ],
)
def test_broken_layer_lists_are_refused_with_the_place(changes, words):
    assert words in refusal(**changes)


@pytest.mark.parametrize(("said", "notes"), [(7, 1), (6, 0), (None, 0), ("absent", 0), ("six", 1)])
def test_a_contradictory_count_of_layers_is_noted_and_the_list_used(said, notes):
    config = read(num_hidden_layers=said)
    assert config.num_hidden_layers == 6 and len(config.notes) == notes
    if notes:
        assert f"num_hidden_layers says {said}, the list of layers has 6" in config.notes[0]


def test_nested_configs_are_found():
    inner = {key: value for key, value in BASE.items() if key != "model_type"}
    for key in ("llm_config", "text_config"):
        config = ModelConfig.from_dict(
            {"model_type": "nemotron_h_omni", key: inner, "vision_config": {"hidden_size": 9}}
        )
        assert config.hidden_size == 64 and config.layer_types == LAYERS and config.model_type == "nemotron_h_omni"


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ("absent", (0.0, math.inf)),
        (None, (0.0, math.inf)),
        ([0.0, {"__float__": "Infinity"}], (0.0, math.inf)),
        ([0, "Infinity"], (0.0, math.inf)),
        ([0, "inf"], (0.0, math.inf)),
        ([0.001, math.inf], (0.001, math.inf)),
        ([0.001, None], (0.001, math.inf)),
        ([0.001, 0.1], (0.001, 0.1)),
    ],
)
def test_every_way_to_write_the_time_step_limit_is_read(limit, expected):
    assert read(time_step_limit=limit).time_step_limit == expected


@pytest.mark.parametrize(
    "limit",
    [[0.1, 0.001], [0.0], "Infinity", [-1, 1], [math.nan, 1], [0, {"__float__": "NaN"}], [0, {"x": 1}], [0, "much"],
     [math.inf, math.inf], [True, 2], ["-Infinity", 1], [0, 10**400]],
)  # fmt: skip
def test_impossible_time_step_limits_are_refused(limit):
    assert "time_step_limit is" in refusal(time_step_limit=limit)


def test_json_infinity_is_read_from_a_file(tmp_path):
    text = json.dumps(BASE | {"time_step_limit": [0.0, math.inf]})
    assert "Infinity" in text
    (tmp_path / "config.json").write_text(text)
    assert ModelConfig.load(tmp_path).time_step_limit == (0.0, math.inf)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": "absent"}, "has no hidden_size, which every model needs"),
        ({"hidden_size": None}, "has no hidden_size"),
        ({"hidden_size": 0}, "hidden_size is '0'; a whole number >= 1 was expected"),
        ({"hidden_size": -4}, "hidden_size is '-4'"),
        ({"hidden_size": 64.0}, "hidden_size is '64.0'"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"hidden_size": True}, "hidden_size is 'True'"),
        ({"hidden_size": 2**40}, "hidden_size is"),
        ({"hidden_size": [64]}, r"hidden_size is '[64]'"),
        ({"n_routed_experts": "absent"}, "has no n_routed_experts, which a model with moe layers needs"),
        ({"mamba_num_heads": "absent"}, "a model with mamba layers needs"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9; <= n_routed_experts 8 was expected"),
        ({"n_group": 3}, "n_group is 3; a divisor of 8 experts"),
        ({"topk_group": 2}, "topk_group is 2; <= n_group 1"),
        ({"n_group": 8, "topk_group": 1}, "num_experts_per_tok is 2; <= the 1 experts"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3; a divisor of 4 heads"),
        ({"n_groups": 3}, "n_groups is 3; a divisor of 4 Mamba heads"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob is 'yes'; true or false"),
        ({"layer_norm_epsilon": math.nan}, "layer_norm_epsilon is 'nan'; a finite number"),
        ({"routed_scaling_factor": math.inf}, "routed_scaling_factor is 'inf'"),
        ({"mlp_hidden_act": None}, "mlp_hidden_act is null; a word"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ({"moe_latent_size": 0}, "moe_latent_size is '0'"),
        ({"model_type": "mixtral"}, "model_type 'mixtral' is not of the Nemotron-H family"),
        ({"model_type": "absent"}, "has no model_type; nemotron_h was expected"),
    ],
)
def test_bad_fields_are_refused_by_name(changes, words):
    assert words in refusal(**changes)


def test_sizes_of_layers_that_are_not_there_are_not_asked_for():
    config = read(
        hybrid_override_pattern="M", n_routed_experts="absent", num_attention_heads="absent", intermediate_size="absent"
    )
    assert config.moe_layers == ()


def test_defaults_are_those_of_transformers():
    from transformers import NemotronHConfig

    theirs, ours = NemotronHConfig(layers_block_type=["linear_attention"]), read(hybrid_override_pattern="M")
    for name in (
        "attention_bias", "mlp_bias", "use_bias", "use_conv_bias", "norm_topk_prob", "chunk_size", "layer_norm_epsilon",
        "routed_scaling_factor", "time_step_min", "mlp_hidden_act", "mamba_hidden_act", "n_group", "topk_group",
        "conv_kernel", "n_shared_experts", "tie_word_embeddings", "num_nextn_predict_layers", "max_position_embeddings",
    ):  # fmt: skip
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.time_step_limit == tuple(theirs.time_step_limit)
    assert ours.eos_token_ids == (theirs.eos_token_id,)


def test_older_names_are_understood():
    config = read(n_groups="absent", mamba_n_groups=4, mamba_d_conv=3, mamba_dt_limit=[0.0, 0.5])
    assert (config.n_groups, config.conv_kernel, config.time_step_limit) == (4, 3, (0.0, 0.5))


def test_stop_ids_come_from_the_generation_config_where_there_is_one(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(BASE | {"eos_token_id": [2, 2, 5]}))
    assert ModelConfig.load(tmp_path).eos_token_ids == (2, 5)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 11]}')
    assert ModelConfig.load(tmp_path).eos_token_ids == (2, 11)
    assert ModelConfig.load(tmp_path / "config.json").eos_token_ids == (2, 5)
    (tmp_path / "generation_config.json").write_text("{}")
    assert ModelConfig.load(tmp_path).eos_token_ids == (2, 5)


def test_derived_sizes_of_the_published_models():
    config = ModelConfig.from_dict(SUPER_CONFIG)
    assert (config.num_hidden_layers, len(config.moe_layers), config.expert_in, config.expert_inter) == (
        88,
        40,
        1024,
        2688,
    )
    assert (config.mamba_inner, config.mamba_conv_dim, config.mamba_in_rows) == (8192, 10240, 18560)
    assert (config.top_k, config.n_experts) == (22, 512) and config.mtp_layer_types == ("attention", "moe")
    assert config.layers_of("attention") == (7, 16, 25, 36, 47, 58, 69, 78)
    nano = ModelConfig.from_dict(NANO_CONFIG)
    assert (nano.expert_in, nano.moe_latent_size, len(nano.moe_layers)) == (2688, None, 23)
    assert nano.layers_of("attention") == (5, 12, 19, 26, 33, 42)


def test_the_config_file_itself_may_be_broken(tmp_path):
    path = tmp_path / "config.json"
    for content, words in (
        ("", "is empty"),
        ("[]", "an object was needed"),
        ("{", "not valid JSON"),
        ('{"a":1,"a":2}', "names 'a' twice"),
    ):
        path.write_text(content)
        with pytest.raises(CheckpointError, match=words):
            ModelConfig.load(tmp_path)
