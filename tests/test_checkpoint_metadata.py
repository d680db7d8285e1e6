"""Quantisation metadata: either form, both or neither; it is compared with the tensors and decides nothing."""

import json

import pytest
from patching import edit_json, refusal
from synthetic import copy_checkpoint, write_checkpoint

from nemolab.checkpoint import Checkpoint, quant_metadata
from nemolab.errors import CheckpointError

FC1 = "backbone.layers.1.mixer.fc1_latent_proj"
IN_PROJ = "backbone.layers.0.mixer.in_proj"


def complaints(folder):
    return [
        note for note in Checkpoint.open(folder).notes if " says " in note or " lists " in note or "metadata" in note
    ]


def edit_quant(folder, edit):
    edit_json(folder / "hf_quant_config.json", lambda quant: edit(quant["quantization"]))


@pytest.fixture
def folder(tmp_path):
    """hf_quant_config.json only, mixed by module."""
    return copy_checkpoint(tmp_path / "model", metadata="hf_quant")


@pytest.mark.parametrize("metadata", ["both", "config", "hf_quant"])
@pytest.mark.parametrize("prefix", ["backbone.", "language_model.backbone.", "model."])
def test_true_metadata_is_confirmed_silently(tmp_path, metadata, prefix):
    folder = write_checkpoint(tmp_path, metadata=metadata, prefix=prefix, mtp=True, vision="timm")
    assert complaints(folder) == []


def test_no_metadata_at_all_is_said(tmp_path):
    assert complaints(write_checkpoint(tmp_path, metadata="none")) == [
        "no quantisation metadata: neither hf_quant_config.json nor quantization_config in config.json;"
        " formats were taken from the tensors"
    ]


def test_the_older_uniform_form_is_read(tmp_path):
    formats = dict(shared="nvfp4", mamba="nvfp4", mamba_heads=4, latent=None)
    assert complaints(write_checkpoint(tmp_path / "a", uniform=True, **formats)) == []
    overrides = {IN_PROJ: "fp8"}
    notes = complaints(
        write_checkpoint(tmp_path / "b", uniform=True, metadata="hf_quant", overrides=overrides, **formats)
    )
    assert notes == [
        "hf_quant_config.json says backbone.layers.*.mixer.in_proj is nvfp4, the tensors are fp8 (layer 0)"
    ]


def test_two_forms_that_contradict_each_other_are_refused_with_the_module_and_both_verdicts(tmp_path):
    folder = write_checkpoint(tmp_path, metadata="both")
    edit_quant(folder, lambda quant: quant["quantized_layers"].update({IN_PROJ: {"quant_algo": "NVFP4"}}))
    message = refusal(folder)
    assert message.startswith(
        f"config.json: quantization_config says {IN_PROJ} is fp8, hf_quant_config.json says it is nvfp4; its tensors in"
        " model-00001-of-00003.safetensors are fp8"
    )


@pytest.mark.parametrize(
    ("edit", "verdicts", "many"),
    [
        (lambda q: q["quantized_layers"].pop(IN_PROJ) and None, "hf_quant_config.json says it is not quan", False),
        (lambda q: q.update(quantized_layers={}, quant_algo="FP8"), "hf_quant_config.json says it is fp8", True),
        (lambda q: q["quantized_layers"].update({"lm_head": "FP8"}), "says lm_head is not quantised", False),
        (lambda q: q.update(quantized_layers={"*.layers.1.*": "FP8"}), "config.json says it is not quantised", True),
    ],
)  # fmt: skip
def test_contradictions_of_every_kind_are_found(tmp_path, edit, verdicts, many):
    folder = copy_checkpoint(tmp_path / "model", metadata="both")
    edit_quant(folder, edit)
    message = refusal(folder)
    assert verdicts in message and "its tensors in model-0000" in message and ("more modules" in message) == many


HARMLESS = {
    "globs for names": lambda q: q.update(
        quantized_layers={"backbone.layers.*.mixer.experts.*": "NVFP4", "*shared_experts*": "FP8",
                          "*.in_proj": "FP8", "*.out_proj": "FP8"}),
    "containers for modules": lambda q: q.update(
        quantized_layers={"backbone.layers.1.mixer.experts": {"quant_algo": "W4A16_NVFP4"},
                          "backbone.layers.4.mixer.experts": {"quant_algo": "NVFP4", "group_size": 16},
                          "backbone.layers.1.mixer.shared_experts": "FP8",
                          "backbone.layers.4.mixer.shared_experts": "FP8",
                          "backbone.layers.0.mixer": "FP8", "backbone.layers.2.mixer": "FP8"}),
    "another prefix": lambda q: q.update(
        quantized_layers={f"model.{name[9:]}": entry for name, entry in q["quantized_layers"].items()}),
    "excluded beside a table": lambda q: q.update(exclude_modules=["mtp*", "lm_head", "*gate", "*conv1d", "*norm*"]),
    "silent": lambda q: (q.clear(), q.update(quant_algo="MIXED_PRECISION", kv_cache_quant_algo="FP8"))[0],
    "entries for what is not stored": lambda q: q["quantized_layers"].update({"backbone.layers.99.x": "FP8"}),
    "about the MTP block only": lambda q: q["quantized_layers"].update({"mtp*": "FP8"}),
}  # fmt: skip


@pytest.mark.parametrize("case", HARMLESS)
def test_two_forms_may_say_the_same_differently(tmp_path, case):
    folder = copy_checkpoint(tmp_path / "model", metadata="both", mtp=True)
    edit_quant(folder, HARMLESS[case])
    Checkpoint.open(folder)


def test_targets_that_are_patterns_contradict_nobody(tmp_path):
    folder = copy_checkpoint(tmp_path / "model", metadata="both")
    edit_json(
        folder / "config.json",
        lambda config: config.update(quantization_config={"config_groups": groups(4, ["re:.*experts.*"])}),
    )
    Checkpoint.open(folder)


@pytest.mark.parametrize(
    "edit",
    [
        lambda q: q["quantized_layers"].update({IN_PROJ: {"quant_algo": "NVFP4", "group_size": 32}}),
        lambda q: q.update(quant_algo="NVFP4", group_size=32, quantized_layers=None),
        lambda q: q.update(config_groups={"g": {"weights": {"type": "float", "num_bits": 4, "group_size": 32}}}),
    ],
)
def test_another_group_size_is_refused(folder, edit):
    edit_quant(folder, edit)
    message = refusal(folder)
    assert "hf_quant_config.json" in message and "group_size is 32; NVFP4 has groups of 16" in message


def test_modules_that_are_listed_as_excluded_but_stored_quantised_are_reported_by_layer(tmp_path):
    folder = write_checkpoint(tmp_path, metadata="hf_quant", overrides={FC1: "fp8"})
    edit_quant(folder, lambda quant: quant["quantized_layers"].pop(FC1) and None)
    edit_quant(folder, lambda quant: quant.update(exclude_modules=["*fc1_latent_proj"]))
    assert complaints(folder) == [
        "hf_quant_config.json says backbone.layers.*.mixer.fc1_latent_proj is not quantised, the tensors are fp8"
        " (layer 1)"
    ]


def test_thousands_of_disagreements_make_one_line(folder):
    def lie(quant):
        quant["quantized_layers"] = {"backbone.layers.1.mixer.experts": {"quant_algo": "FP8"}}

    edit_quant(folder, lie)
    said = "hf_quant_config.json says backbone.layers.*.mixer.experts.*.up_proj is fp8, the tensors are nvfp4"
    assert f"{said} (8 modules, layer 1)" in complaints(folder)


def test_keys_at_container_level_speak_for_what_they_hold(folder):
    def contain(quant):
        for layer in (1, 4):
            names = [name for name in quant["quantized_layers"] if f"layers.{layer}.mixer.experts." in name]
            for name in names:
                del quant["quantized_layers"][name]
            quant["quantized_layers"][f"backbone.layers.{layer}.mixer.experts"] = {"quant_algo": "NVFP4"}

    edit_quant(folder, contain)
    assert complaints(folder) == []


def test_a_null_table_is_an_empty_one(folder):
    edit_quant(folder, lambda quant: quant.update(quantized_layers=None, exclude_modules=None))
    assert complaints(folder) == []


def test_globs_and_the_w4a16_spelling_are_understood(folder):
    def rewrite(quant):
        quant["quantized_layers"] = {
            "backbone.layers.*.mixer.experts.*": {"quant_algo": "W4A16_NVFP4"},
            "*.in_proj": {"quant_algo": "FP8"},
            "*.out_proj": {"quant_algo": "FP8"},
            "*shared_experts*": {"quant_algo": "FP8"},
        }
        quant["exclude_modules"] = ["mtp*", "lm_head", "*latent_proj"]

    edit_quant(folder, rewrite)
    assert complaints(folder) == []


def test_table_entries_for_nothing_stored_are_reported(folder):
    edit_quant(
        folder,
        lambda quant: quant["quantized_layers"].update({"backbone.layers.77.mixer.in_proj": {"quant_algo": "FP8"}}),
    )
    assert complaints(folder) == [
        "hf_quant_config.json lists 1 modules that are not stored, such as backbone.layers.77.mixer.in_proj"
    ]


def groups(bits=4, targets=("Linear",)):
    return {"group_0": {"weights": {"type": "float", "num_bits": bits, "group_size": 16}, "targets": list(targets)}}


def test_config_groups_are_read_where_there_is_no_table(tmp_path):
    folder = write_checkpoint(tmp_path, metadata="config")

    def regroup(config):
        table = config["quantization_config"].pop("quantized_layers")
        by_algorithm = {}
        for name, entry in table.items():
            by_algorithm.setdefault(entry["quant_algo"], []).append(name)
        config["quantization_config"]["config_groups"] = {
            "group_0": groups(8, by_algorithm["FP8"])["group_0"],
            "group_1": groups(4, by_algorithm["NVFP4"])["group_0"],
        }

    edit_json(folder / "config.json", regroup)
    assert complaints(folder) == []
    edit_json(folder / "config.json", lambda config: config["quantization_config"].update(config_groups=groups()))
    assert any(
        "config_groups says lm_head is nvfp4, the tensors are not quantised" in note for note in complaints(folder)
    )


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda q: q.update(quant_algo="FOO"), "hf_quant_config.json has the unknown quant_algo 'FOO'; known are NV"),
        (lambda q: q["quantized_layers"].update({FC1: {"quant_algo": "FOO"}}), f"{FC1} has the unknown quant_algo"),
        (lambda q: q["quantized_layers"].update({FC1: {"quant_algo": None}}), "unknown quant_algo 'None'"),
        (lambda q: q["quantized_layers"].update({FC1: {}}), "unknown quant_algo 'None'"),
        (lambda q: q.update(quantized_layers=[]), "quantized_layers is a list; an object was expected"),
        (lambda q: q.update(exclude_modules="lm_head"), "a list of module names was expected"),
        (lambda q: q.update(exclude_modules=[3]), "a list of module names was expected"),
        (lambda q: q.update(config_groups=[]), "config_groups is a list"),
        (lambda q: q.update(config_groups={"g": {"weights": {"type": "int", "num_bits": 4}}}), "float of 4 or 8 bits"),
        (lambda q: q.update(config_groups={"g": 3}), "float of 4 or 8 bits"),
        (lambda q: q.update(quant_method="compressed-tensors"), "quant_method 'compressed-tensors': only ModelOpt's"),
    ],
)  # fmt: skip
def test_unknown_and_foreign_metadata_is_refused(folder, edit, words):
    edit_quant(folder, edit)
    assert words in refusal(folder)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"quantization": 3}', '{"quantization": {"quant_algo": []}}'])
def test_a_broken_metadata_file_is_refused(folder, content):
    (folder / "hf_quant_config.json").write_text(content)
    with pytest.raises(CheckpointError, match="hf_quant_config.json"):
        Checkpoint.open(folder)


def test_nested_configs_may_carry_their_own(tmp_path):
    folder = write_checkpoint(tmp_path, metadata="config", prefix="language_model.backbone.")

    def nest(config):
        config["llm_config"]["quantization_config"] = config.pop("quantization_config") | {"quant_algo": "FOO"}

    edit_json(folder / "config.json", nest)
    with pytest.raises(
        CheckpointError, match="config.json: llm_config: quantization_config has the unknown quant_algo"
    ):
        Checkpoint.open(folder)


def test_a_stranger_s_endless_list_of_globs_is_cut_short_and_that_is_said(folder, monkeypatch):
    """At full size 10,000 globs on 40,000 modules would take minutes to say nothing."""
    monkeypatch.setattr(quant_metadata, "_MOST_MATCHES", 20_000)  # 384 for each of 52 matrices
    stars = [f"*{number}*a*b*c*" for number in range(10_000)]
    text = json.dumps({"quantization": {"quant_algo": "MIXED_PRECISION", "exclude_modules": stars}})
    (folder / "hf_quant_config.json").write_text(text)
    (note,) = [note for note in Checkpoint.open(folder).notes if "globs" in note]
    assert note == "hf_quant_config.json: only the first 384 of 10,000 globs were compared"
