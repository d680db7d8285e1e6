"""The reference is transformers' own model: streamed block by block, loaded strictly, causal, and equal to itself."""

import dataclasses
import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from synthetic import write_checkpoint
from transformers.cache_utils import DynamicCache

from nemolab.checkpoint import Checkpoint
from nemolab.compare import reference as reference_module
from nemolab.compare.measures import kl_rows
from nemolab.compare.reference import Reference, cache_keyword, inverse_softplus, transformers_config
from nemolab.compare.weights import decode
from nemolab.errors import CheckpointError, NemolabError

SELF_CHECK = 1e-6
# Chunks are 16 tokens in these checkpoints: more than two of them, and no whole number.
IDS = torch.randint(32, 288, (43,), generator=torch.Generator().manual_seed(0)).tolist()


def whole_model(checkpoint, weights):
    """NemotronHForCausalLM loaded the ordinary way, from our own decoding (not transformers' helper)."""
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHForCausalLM

    model = NemotronHForCausalLM(transformers_config(checkpoint.config)).float().eval()
    state = {}
    for name, value in weights.items():
        layer, found, rest = name.partition(".mixer.experts.")
        if not found:
            state[name.replace("backbone.", "model.", 1)] = value
    for index in checkpoint.config.moe_layers:
        for kind in ("up_proj", "down_proj"):
            experts = range(checkpoint.config.n_experts)
            prefix = f"backbone.layers.{index}.mixer.experts"
            stacked = [weights[f"{prefix}.{expert}.{kind}.weight"] for expert in experts]
            state[f"model.layers.{index}.mixer.experts.{kind}"] = torch.stack(stacked)
    model.load_state_dict(state, strict=True)
    for block in model.model.layers:
        if hasattr(block.mixer, "time_step_limit"):
            block.mixer.time_step_limit = checkpoint.config.time_step_limit
    return model


def decoded(checkpoint):
    weights = {}
    for name, module in checkpoint.modules.items():
        if module.part in ("mtp", "vision"):
            continue
        entry = module.tensors["weight"].name
        weights[entry] = checkpoint.decode(name)
        if "bias" in module.tensors:
            weights[f"{name}.bias"] = checkpoint.tensor(f"{name}.bias").float()
    return weights


@pytest.mark.parametrize("sizes", [{}, {"latent": None}, {"pattern": "M-E*ME", "mamba": "bf16", "attention": "fp8"}])
def test_streamed_reference_equals_the_whole_model_to_the_bit(tmp_path, sizes):
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "model", **sizes))
    model = whole_model(checkpoint, decoded(checkpoint))
    with torch.inference_mode():
        expected = model(torch.tensor([IDS])).logits[0]
    assert torch.equal(Reference(checkpoint).logits(IDS), expected)


def test_streamed_stepwise_equals_the_whole_model_fed_one_token_at_a_time(tmp_path):
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "model"))
    model = whole_model(checkpoint, decoded(checkpoint))
    cache = {cache_keyword(model.model.layers[0]): DynamicCache(config=model.config)}
    with torch.inference_mode():
        rows = [model(torch.tensor([[token]]), use_cache=True, **cache).logits[0, 0] for token in IDS]
    difference = (Reference(checkpoint).logits_stepwise(IDS) - torch.stack(rows)).abs().max()
    assert difference < 1e-5


def test_texts_read_together_are_as_those_read_alone(tmp_path):
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "model"))
    reference = Reference(checkpoint)
    together = reference.read({"a": IDS, "b": IDS[5:30], "c": IDS[:1]})
    for name, reading in together.items():
        alone = Reference(checkpoint).logits(reading.ids)
        # Matrix products round by the number of rows, so not to the bit.
        assert (reading.logits() - alone).abs().max() < 1e-5, name
    assert (together["a"].logits(3, 9) - together["a"].logits()[3:9]).abs().max() < 1e-5


@pytest.mark.parametrize("length", [16, 40])
def test_a_later_token_changes_nothing_before_it(tmp_path, length):
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "model"))
    changed = list(IDS[:length])
    changed[length - 4] = 40 if changed[length - 4] != 40 else 41
    before, after = Reference(checkpoint).logits(IDS[:length]), Reference(checkpoint).logits(changed)
    # An expert that gets other rows rounds its earlier ones anew, so not to the bit.
    assert (before - after)[: length - 4].abs().max() < 1e-5
    assert (before - after)[length - 4 :].abs().amax(1).min() > 1e-3


def test_causality_check_can_fail_without_an_attention_implementation(tmp_path):
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "model"))
    changed = [*IDS[:30], 40 if IDS[30] != 40 else 41]
    readings = []
    for ids in (IDS[:31], changed):
        reference = Reference(checkpoint)
        reference.config._attn_implementation = "eager"  # as a block outside a model has it: masked by nobody
        readings.append(reference.logits(ids))
    assert (readings[0] - readings[1])[:30].abs().max() > 1e-3


def with_small_steps(folder):
    """dt_bias = -9: softplus gives 1.2e-4, an eighth of transformers' floor."""
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name in tensors:
            if name.endswith("dt_bias"):
                tensors[name] = torch.full_like(tensors[name], -9.0)
        save_file(tensors, file, metadata={"format": "pt"})
    return folder


def self_kl(reference):
    readings = reference.read({"whole": IDS, "steps": IDS}, stepwise=("steps",))
    return kl_rows(reference=readings["whole"].logits(), engine=readings["steps"].logits()).mean()


def test_one_pass_equals_token_by_token_when_time_steps_are_small(tmp_path):
    reference = Reference(Checkpoint.open(with_small_steps(write_checkpoint(tmp_path / "model"))))
    assert self_kl(reference) < 1e-10
    assert reference.settings["time_step_limit"] == [(0.0, math.inf)]


def test_self_check_can_fail_on_the_floor_that_transformers_sets(tmp_path):
    stock = Reference(Checkpoint.open(with_small_steps(write_checkpoint(tmp_path / "model"))), stock=True)
    assert self_kl(stock) > SELF_CHECK
    assert stock.settings["time_step_limit"] == [(0.001, math.inf)]


@pytest.mark.parametrize("limit", [[0.01, 0.05], [0.0, 0.02], [0.01, "Infinity"]])
def test_a_limit_in_the_config_is_kept_on_both_paths(tmp_path, limit):
    folder = write_checkpoint(tmp_path / "model", config_extra={"time_step_limit": limit})
    checkpoint = Checkpoint.open(folder)
    assert self_kl(Reference(checkpoint)) < 1e-10
    config = dataclasses.replace(checkpoint.config, time_step_limit=(0.0, math.inf))
    checkpoint.config = config
    limited, free = Reference(Checkpoint.open(folder)).logits(IDS), Reference(checkpoint).logits(IDS)
    assert (limited - free).abs().max() > 1e-3, "the limit did nothing: this test shows nothing"


@pytest.mark.parametrize("value", [0.0, 1e-4, 0.01, 1.0, 29.0, 31.0, math.inf])
def test_inverse_softplus_undoes_softplus(value):
    back = torch.nn.functional.softplus(torch.tensor(inverse_softplus(value), dtype=torch.float64))
    assert back.item() == pytest.approx(value, rel=1e-9)


def test_patterns_without_attention_can_be_checked_too(tmp_path):
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "model", pattern="MEM"))
    assert self_kl(Reference(checkpoint)) < 1e-10


@pytest.mark.parametrize(
    "form",
    [
        {"prefix": "language_model.backbone.", "vision": "timm", "mtp": True},
        {"prefix": "model.", "metadata": "none", "single_file": True},
        {"tie": True, "scalar_shape": (1,), "input_scale": False},
        {"head": "fp8", "gate": "bf16", "kv_scales": True, "layer_spelling": "layer_types"},
        {"head": "nvfp4", "shared": "nvfp4", "shards": 2, "mtp": "nvfp4"},
        {"routed": "bf16"},
        {"routed": "fp8"},
    ],
)
def test_every_form_of_the_vendor_is_read(tmp_path, form):
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "model", **form))
    reference = Reference(checkpoint)
    logits = reference.logits(IDS[:5])
    assert logits.shape == (5, checkpoint.config.vocab_size) and torch.isfinite(logits).all()
    aside = [name for name in reference.weights.unused() if not name.startswith(("mtp.", "vision", "mlp1."))]
    assert all(name.endswith(("input_scale", "k_scale", "v_scale")) for name in aside)


def test_decoder_of_transformers_agrees_with_ours_on_every_code_and_scale():
    from nemolab.checkpoint.formats import decode_nvfp4

    packed = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 32).view(torch.float8_e4m3fn)
    theirs = decode(packed.view(torch.int8), scales.float() * torch.tensor(1e-3))
    assert torch.equal(theirs.nan_to_num(9.0), decode_nvfp4(packed, scales, 1e-3).nan_to_num(9.0))


def test_large_matrices_are_decoded_in_pieces_of_the_same_values(monkeypatch):
    generator = torch.Generator().manual_seed(3)
    packed = torch.randint(-128, 128, (37, 24), generator=generator).to(torch.int8)
    scales = torch.rand(37, 3, generator=generator)
    at_once = decode(packed, scales)
    monkeypatch.setattr("nemolab.compare.weights.VALUES_AT_ONCE", 100)
    assert torch.equal(decode(packed, scales), at_once)


def test_a_tensor_left_out_is_named(tmp_path):
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "model"))
    for name in ("backbone.layers.0.mixer.D", "backbone.layers.1.mixer.experts.5.down_proj.weight", "lm_head.weight"):
        tensors = {key: entry for key, entry in checkpoint.tensors.items() if key != name}
        changed = Checkpoint.open(checkpoint.path)
        changed.tensors = tensors
        with pytest.raises(CheckpointError, match=name.replace(".", r"\.") + " is missing"):
            Reference(changed).logits(IDS[:2])


@pytest.mark.parametrize("suffix", ["_scale", "_scale_2"])
def test_a_weight_without_its_scale_is_never_cast(tmp_path, suffix):
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "model"))
    del checkpoint.tensors["backbone.layers.1.mixer.experts.5.down_proj.weight" + suffix]
    with pytest.raises(CheckpointError, match="without its scale"):
        Reference(checkpoint).logits(IDS[:2])


@pytest.mark.parametrize(
    "extra",
    [
        "backbone.layers.0.mixer.extra.weight",
        "backbone.layers.1.mixer.experts.8.up_proj.weight",
        "backbone.stray.weight",
    ],
)
def test_a_tensor_too_many_is_named(tmp_path, extra):
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "model"))
    checkpoint.tensors[extra] = dataclasses.replace(checkpoint.tensors["backbone.norm_f.weight"], name=extra)
    with pytest.raises(CheckpointError, match="no place for: " + extra.replace(".", r"\.")):
        Reference(checkpoint).logits(IDS[:2])


def test_a_misshapen_tensor_is_named_with_both_shapes(tmp_path):
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "model"))
    checkpoint.tensors["backbone.layers.0.norm.weight"] = checkpoint.tensors["backbone.layers.0.mixer.D"]
    with pytest.raises(CheckpointError, match=r"backbone.layers.0.norm.weight has shape \(4,\).*\(64,\)"):
        Reference(checkpoint).logits(IDS[:2])


def test_a_token_outside_the_table_is_refused(tmp_path):
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "model"))
    with pytest.raises(CheckpointError, match="token 288"):
        Reference(checkpoint).logits([3, 288])


def test_nothing_to_read_is_refused(tmp_path):
    reference = Reference(Checkpoint.open(write_checkpoint(tmp_path / "model")))
    for texts in ({}, {"a": []}):
        with pytest.raises(NemolabError, match="nothing to read"):
            reference.read(texts)


def test_a_config_transformers_refuses_is_our_error(tmp_path):
    folder = write_checkpoint(tmp_path / "model")
    config = Checkpoint.open(folder).config
    with pytest.raises(CheckpointError, match="transformers refuses"):
        transformers_config(dataclasses.replace(config, hidden_size="wide"))
    assert json.loads((folder / "config.json").read_text())["hidden_size"] == 64


def test_only_one_expert_is_held_at_a_time(tmp_path, monkeypatch):
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "model"))
    alive, most = set(), [0]

    class Counted(reference_module.LazyExperts):
        def __getitem__(self, expert):
            import weakref

            matrix = super().__getitem__(expert)
            alive.add(id(matrix))
            weakref.finalize(matrix, alive.discard, id(matrix))
            most[0] = max(most[0], len(alive))
            return matrix

    monkeypatch.setattr(reference_module, "LazyExperts", Counted)
    Reference(checkpoint).logits(IDS)
    assert most[0] == 1 and not alive


def test_routing_gap_is_the_distance_to_the_expert_not_chosen(tmp_path):
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "model", experts=8, top_k=8))
    assert Reference(checkpoint).read({"a": IDS})["a"].gap.isinf().all()  # nobody is left out
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "other", top_k=2))
    gap = Reference(checkpoint).read({"a": IDS})["a"].gap
    assert gap.shape == (len(IDS),) and (gap >= 0).all() and gap.max() < 1


def test_groups_of_one_expert_are_refused_in_words(tmp_path):
    folder = write_checkpoint(tmp_path / "model", config_extra={"n_group": 8, "topk_group": 4})
    with pytest.raises(CheckpointError, match="8 experts in 8 group"):
        Reference(Checkpoint.open(folder))
