"""Every form of the family at a small size, end to end: plan, repack, verify, engine against reference, controls."""

import json

import pytest
import torch

from nemolab.checkpoint import Checkpoint
from nemolab.compare import KL_BOUND
from nemolab.compare.comparison import Comparison
from nemolab.compare.controls import CONTROLS
from nemolab.compare.engine_side import read_text
from nemolab.plan import plan
from nemolab.store import repack, verify
from nemolab.synthetic import write

SIZES = {
    "hidden_size": 64, "vocab_size": 300, "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 16,
    "n_groups": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 96, "moe_latent_size": 64,
    "moe_shared_expert_intermediate_size": 96, "chunk_size": 16,
}  # fmt: skip
NO_LATENT = {name: size for name, size in SIZES.items() if name != "moe_latent_size"}
TOWER = {"vit_hidden_size": 32, "projector_hidden_size": 64, "vision_config.num_hidden_layers": 2, "patch_size": 4}
# Blocks of a page and a quarter, as Nano's are 1370 and a quarter.
QUARTER = {"hidden_size": 64, "moe_intermediate_size": 80}

FORMS = {
    "super": ("super", SIZES, {"moe_layers": 5}, "neuron"),
    "super35": ("super35", SIZES, {"moe_layers": 2}, "source"),
    "nano": ("nano", NO_LATENT | QUARTER, {"moe_layers": 3}, "neuron"),
    "lightning": ("lightning", NO_LATENT, {"moe_layers": 2}, "source"),
    "vl-timm": ("super35-vl", SIZES | TOWER, {"moe_layers": 1, "vision_as": "timm"}, "neuron"),
    "vl-hf": ("super35-vl", SIZES | TOWER, {"moe_layers": 1, "vision_as": "hf", "layers_as": "layer_types"}, "source"),
}
TEXT = {"random": torch.randint(32, 288, (60,), generator=torch.Generator().manual_seed(2)).tolist()}


@pytest.fixture(scope="module", params=FORMS)
def form(request, tmp_path_factory):
    """(name, what was written, checkpoint, path of its store)"""
    shape, settings, options, layout = FORMS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    written = write(folder / "model", shape, settings=settings, **options)
    repack(folder / "model", folder / "store", layout=layout, announce=lambda line: None)
    return request.param, written, Checkpoint.open(folder / "model"), folder / "store"


def test_it_opens_without_a_contradiction(form):
    _, written, checkpoint, _ = form
    assert len(checkpoint.tensors) == written.tensors
    allowed = ("not used", "counted, not run")
    assert [note for note in checkpoint.notes if not any(words in note for words in allowed)] == []


def test_the_plan_counts_what_was_written(form):
    _, written, checkpoint, _ = form
    counted = plan(checkpoint.path).to_dict()
    assert (counted["expert_bytes"], counted["bytes_per_token"]) == (
        written.facts.expert_bytes, written.facts.bytes_per_token,
    )  # fmt: skip


def test_the_store_is_the_source(form):
    _, written, checkpoint, store = form
    found = verify(store, source=checkpoint.path, all=True)
    assert (found.mismatches, found.checked) == (0, written.facts.blocks)


def test_what_is_left_out_is_listed(form):
    name, written, checkpoint, store = form
    left = json.loads((store / "manifest.json").read_text())["left_out"]
    facts = written.facts
    assert len(left.get("mtp", [])) == facts.mtp_tensors and (facts.mtp_tensors > 0) == (name != "nano")
    assert len(left.get("vision", [])) == facts.vision_tensors and (facts.vision_tensors > 0) == name.startswith("vl")
    scales = [t.source_name for t in checkpoint.tensors.values() if t.name.endswith("input_scale")]
    in_language = [scale for scale in scales if "mtp." not in scale]
    assert sorted(left.get("input_scale", [])) == sorted(in_language) and in_language
    if name == "lightning":
        assert not any(".experts." in scale or "lm_head" in scale for scale in scales)


def test_formats_are_the_release_s(form):
    name, _, checkpoint, _ = form
    table = {}
    for module in checkpoint.modules.values():
        if len(module.shape) == 2 and module.part not in ("vision", "mtp"):
            table.setdefault(module.name.rpartition("mixer.")[2].split(".")[-1], set()).add(module.format)
    expected = {
        "super": {"in_proj": {"fp8"}, "out_proj": {"fp8", "bf16"}, "gate": {"bf16"}, "lm_head": {"bf16"}},
        "super35": {"q_proj": {"fp8"}, "in_proj": {"fp8"}, "lm_head": {"fp8"}, "fc1_latent_proj": {"bf16"}},
        "nano": {"in_proj": {"nvfp4", "bf16"}, "q_proj": {"bf16"}, "gate": {"f32"}, "lm_head": {"bf16"}},
        "lightning": {"in_proj": {"fp8"}, "q_proj": {"bf16"}, "lm_head": {"nvfp4"}, "gate": {"f32"}},
        "vl-timm": {"q_proj": {"fp8"}, "lm_head": {"fp8"}},
        "vl-hf": {"q_proj": {"fp8"}, "lm_head": {"fp8"}},
    }[name]
    assert {kind: table[kind] for kind in expected} == expected


def test_engine_and_reference_agree_and_controls_fail(form):
    _, _, checkpoint, store = form
    comparison = Comparison(checkpoint.path, store=store, texts=TEXT)
    (text,) = comparison.texts
    with comparison.make_engine() as engine:
        reading = read_text(engine, text.ids)
    references, _ = comparison.read_reference({text.name: reading})
    measured = comparison.measure(text, reading, references[text.name])
    assert measured.prompt.mean <= KL_BOUND and measured.decode.mean <= KL_BOUND
    for control in CONTROLS:
        found = comparison.run_control(control, references)
        assert found["failed_as_it_must"], found


def test_biases_of_every_kind_are_run(tmp_path):
    """transformers' attention has none; the vendor's has, and so have engine and reference."""
    biases = dict.fromkeys(("attention_bias", "mlp_bias", "use_bias"), True)
    write(tmp_path / "m", "super", settings=SIZES | biases | {"pattern": "M*E"}, mtp=False)
    checkpoint = Checkpoint.open(tmp_path / "m")
    biased = {name.split(".")[-2] for name in checkpoint.tensors if name.endswith(".bias")}
    assert biased >= {"q_proj", "o_proj", "in_proj", "out_proj", "up_proj", "down_proj", "fc1_latent_proj"}
    repack(tmp_path / "m", tmp_path / "s", announce=lambda line: None)
    comparison = Comparison(tmp_path / "m", store=tmp_path / "s", texts=TEXT)
    (text,) = comparison.texts
    with comparison.make_engine() as engine:
        reading = read_text(engine, text.ids)
    references, _ = comparison.read_reference({text.name: reading})
    assert comparison.measure(text, reading, references[text.name]).prompt.mean <= KL_BOUND


def test_nano_s_blocks_are_no_whole_pages(form):
    name, written, _, _ = form
    if name != "nano":
        pytest.skip("the others' are checked by the plan")
    assert written.facts.pages % 1
