"""Odd but legal: what real files have and should not have must load, and make the same store, bit for bit."""

import json
import math

import numpy as np
import pytest
import torch
from faults import FORMS, run_cli
from patching import INDEX, add_tensor, drop_tensor, edit_header, edit_json, edit_tensors, read_raw_header, write_raw
from synthetic import copy_checkpoint

from nemolab.checkpoint import Checkpoint, Inventory
from nemolab.checkpoint.inventory import LEFT_OUT, REPORTED, UNUSED, USED

FIRST, SECOND, THIRD = (f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3))


def rewrite(path, arrange=lambda names: names, pad=b"", between=()):
    """A shard with its tensors in another order, its header padded, and empty tensors put between the others."""
    header, data_start = read_raw_header(path)
    data = path.read_bytes()[data_start:]
    metadata = header.pop("__metadata__", {})
    made, chunks, place = {"__metadata__": metadata}, [], 0
    for number, name in enumerate(arrange(sorted(header))):
        start, end = header[name]["data_offsets"]
        if between:
            made[f"{between[0]}.{number}"] = {"dtype": "F32", "shape": [0, 7], "data_offsets": [place, place]}
        made[name] = header[name] | {"data_offsets": [place, place + end - start]}
        chunks.append(data[start:end])
        place += end - start
    write_raw(path, json.dumps(made).encode() + pad, b"".join(chunks))


def of_shards(change):
    def spoil(folder):
        for path in sorted(folder.glob("*.safetensors")):
            change(path)

    return spoil


def scalars(shape_of):
    """Another shape for every one-element F32 scale: [] or [1]."""
    return lambda folder: edit_tensors(
        folder, lambda n, t: {n: t.reshape(shape_of(n)) if t.numel() == 1 and n.endswith("_scale_2") else t}
    )


def config(**fields):
    return lambda folder: edit_json(folder / "config.json", lambda c: c.update(fields))


def without(ending):
    return lambda folder: edit_tensors(folder, lambda n, t: {} if n.endswith(ending) else {n: t})


def quant(edit):
    return lambda folder: edit_json(folder / "hf_quant_config.json", lambda q: edit(q["quantization"]))


def both(*changes):
    return lambda folder: [change(folder) for change in changes] and None


def drop_config_table(folder):
    edit_json(folder / "config.json", lambda c: c.pop("quantization_config") and None)


IN_PROJ = "backbone.layers.0.mixer.in_proj"
# How a copy is made odd, and words of the note that says so ("": nothing need be said).
ODDITIES = {
    "scalars of one element": (scalars(lambda name: (1,)), ""),
    "scalars of either shape": (scalars(lambda name: (1,) if "up_proj" in name else ()), ""),
    "no input scales": (without("input_scale"), ""),
    "input scales of zero": (
        lambda f: edit_tensors(f, lambda n, t: {n: torch.zeros_like(t) if n.endswith("input_scale") else t}),
        "input_scale: "),
    "input scales of any shape": (
        lambda f: edit_tensors(f, lambda n, t: {n: torch.ones(3, 2) if n.endswith("input_scale") else t}), ""),
    "more metadata": (of_shards(lambda p: edit_header(p, lambda h: h.update(__metadata__={"a": "ü", "": ""}))), ""),
    "no metadata": (of_shards(lambda p: edit_header(p, lambda h: h.pop("__metadata__") and None)), ""),
    "padded headers": (of_shards(lambda p: rewrite(p, pad=b" " * 333)), ""),
    "headers of an odd length": (
        of_shards(lambda p: rewrite(p, pad=b" " * (1 + p.stat().st_size % 2))), ""),
    "tensors backwards": (of_shards(lambda p: rewrite(p, lambda names: names[::-1])), ""),
    "tensors by length of name": (of_shards(lambda p: rewrite(p, lambda names: sorted(names, key=len))), ""),
    "empty tensors everywhere": (
        lambda f: (f / INDEX).unlink() or of_shards(lambda p: rewrite(p, between=[f"void.{p.stem}"]))(f),
        "empty and of no use, left aside: void."),
    "an empty tensor the index leaves out": (
        lambda f: rewrite(f / SECOND, between=["void"]), "(empty) lies in"),
    "an empty bias": (lambda f: add_tensor(f, "backbone.layers.3.mixer.q_proj.bias", torch.empty(0)), "left aside"),
    "an empty scale": (
        lambda f: add_tensor(f, "backbone.layers.3.mixer.q_proj.weight_scale", torch.empty(0)), "left aside"),
    "an index without totals": (lambda f: edit_json(f / INDEX, lambda i: i.pop("metadata") and None), ""),
    "an index with odd totals": (
        lambda f: edit_json(f / INDEX, lambda i: i.update(metadata={"total_size": "a lot", "x": None})), ""),
    "a wrong total": (lambda f: edit_json(f / INDEX, lambda i: i["metadata"].update(total_size=7)), "says 7 bytes"),
    "more in the index": (lambda f: edit_json(f / INDEX, lambda i: i.update(extra={"a": [1]})), ""),
    "no index": (lambda f: (f / INDEX).unlink(), f"{INDEX} is missing"),
    "other files beside": (
        lambda f: [(f / name).write_bytes(b"x") for name in ("README.md", "model.gguf", "a.py", ".cache")] and None,
        "left aside: model.gguf"),
    "more in the config": (config(extra={"deep": [1, {"x": None}]}, auto_map={"AutoModel": "x.Y"}), ""),
    "no limit of time steps": (config(time_step_limit=None), ""),
    "an infinite limit": (config(time_step_limit=[0.0, math.inf]), ""),
    "an infinite limit as an object": (config(time_step_limit=[0.0, {"__float__": "Infinity"}]), ""),
    "several ends": (config(eos_token_id=[2, 11]), ""),
    "a wrong number of layers": (config(num_hidden_layers=99), "num_hidden_layers says 99"),
    "no number of layers": (config(num_hidden_layers=None), ""),
    "words for layers": (
        config(hybrid_override_pattern=None,
               layer_types=["linear_attention", "moe", "linear_attention", "full_attention", "moe", "mlp"]), ""),
    "no architectures": (config(architectures=None), ""),
    "a null table": (
        both(drop_config_table, quant(lambda q: q.update(quantized_layers=None, quant_algo="MIXED_PRECISION"))), ""),
    "formats in the config only": (lambda f: (f / "hf_quant_config.json").unlink(), ""),
    "formats beside the config only": (drop_config_table, ""),
    "formats nowhere": (
        both(drop_config_table, lambda f: (f / "hf_quant_config.json").unlink()),
        "neither hf_quant_config.json nor quantization_config in config.json"),
    "listed as left plain, stored in FP8": (
        both(drop_config_table,
             quant(lambda q: q.update(exclude_modules=["*in_proj"]) or q["quantized_layers"].pop(IN_PROJ) and None)),
        "in_proj is not quantised, the tensors are fp8"),
    "a stored head that is said to be tied": (config(tie_word_embeddings=True), "the stored head is used"),
    "no MTP, though promised": (
        lambda f: edit_tensors(f, lambda n, t: {} if n.startswith("mtp.") else {n: t}), "promises an MTP block"),
    "MTP with a gap": (lambda f: drop_tensor(f, "mtp.layers.0.enorm.weight"), "mtp.layers.0.enorm is promised"),
    "MTP of another shape": (
        lambda f: edit_tensors(f, lambda n, t: {n: t[:-1].clone() if n == "mtp.layers.0.hnorm.weight" else t}),
        "mtp.layers.0.hnorm has shape [63], by config.json [64]"),
}  # fmt: skip


def contents(store):
    """What a store holds of the weights, without where they came from."""
    experts = np.fromfile(store / "experts.bin", np.uint8)
    dense = {name: (array.dtype, array.shape, array.tobytes()) for name, array in raw_arrays(store).items()}
    return experts, dense


def raw_arrays(store):
    found = {}
    for path in sorted(store.glob("*.safetensors")):
        header, data_start = read_raw_header(path)
        header.pop("__metadata__", None)
        data = np.fromfile(path, np.uint8)[data_start:]
        found |= {name: data[slice(*entry["data_offsets"])] for name, entry in header.items()}
    return found


@pytest.fixture(scope="module")
def untouched(tmp_path_factory):
    """The contents of a store of the same checkpoint as it was written."""
    parent = tmp_path_factory.mktemp("untouched")
    folder = copy_checkpoint(parent / "model", **FORMS["super"])
    assert run_cli("repack", folder, "--to", parent / "store")[0] == 0
    return contents(parent / "store")


@pytest.mark.parametrize("case", ODDITIES)
def test_what_is_odd_but_legal_makes_the_same_store(tmp_path, untouched, case):
    change, note = ODDITIES[case]
    folder = copy_checkpoint(tmp_path / "model", **FORMS["super"])
    change(folder)
    code, out, err = run_cli("plan", folder)
    assert code == 0 and note in out, (out, err)
    code, _, err = run_cli("repack", folder, "--to", tmp_path / "store")
    assert code == 0, err
    experts, dense = contents(tmp_path / "store")
    assert np.array_equal(experts, untouched[0]) and dense == untouched[1]
    assert_adds_up(Checkpoint.open(folder))


def assert_adds_up(checkpoint):
    """Every byte of every file is accounted for: header, or a tensor with a verdict."""
    inventory = Inventory(checkpoint)
    accounting, files = inventory.accounting(), inventory.file_bytes()
    on_disk = sum((checkpoint.path / name).stat().st_size for name in checkpoint.headers)
    assert files["files"] == on_disk == files["headers"] + files["data"]
    assert accounting["bytes"].sum() == files["data"]
    assert accounting["tensors"].sum() == len(checkpoint.tensors)
    assert set(accounting["verdict"]) <= {USED, UNUSED, LEFT_OUT, REPORTED}
    assert accounting[accounting["verdict"] == REPORTED]["bytes"].sum() == 0


def test_a_store_of_other_weights_is_not_the_same(tmp_path, untouched):
    folder = copy_checkpoint(tmp_path / "model", **FORMS["super"])
    edit_tensors(folder, lambda n, t: {n: t.flip(0) if n == "backbone.layers.1.mixer.experts.0.up_proj.weight" else t})
    assert run_cli("repack", folder, "--to", tmp_path / "store")[0] == 0
    assert not np.array_equal(contents(tmp_path / "store")[0], untouched[0])


PREFIXES = ("language_model.backbone.", "model.", "language_model.model.", "model.language_model.")


@pytest.mark.parametrize("prefix", PREFIXES)
def test_every_known_prefix_makes_the_same_store(tmp_path, untouched, prefix):
    """Metadata keeps the names it had: it is matched under any of the prefixes."""
    folder = copy_checkpoint(tmp_path / "model", **FORMS["super"])
    root = "language_model." if prefix.startswith("language_model.") else ""

    def rename(name, tensor):
        if name.startswith("backbone."):
            return {prefix + name.removeprefix("backbone."): tensor}
        return {root + name: tensor}

    edit_tensors(folder, rename)
    assert run_cli("repack", folder, "--to", tmp_path / "store")[0] == 0
    experts, dense = contents(tmp_path / "store")
    assert np.array_equal(experts, untouched[0]) and dense == untouched[1]


@pytest.mark.parametrize("form", FORMS)
def test_the_accounting_names_what_a_store_leaves_out(tmp_path, form):
    folder = copy_checkpoint(tmp_path / "model", **FORMS[form])
    add_tensor(folder, "void", torch.empty(0))
    assert run_cli("repack", folder, "--to", tmp_path / "store")[0] == 0
    checkpoint = Checkpoint.open(folder)
    assert_adds_up(checkpoint)
    accounting = Inventory(checkpoint).accounting().set_index(["verdict", "reason"])["tensors"]
    left_out = json.loads((tmp_path / "store" / "manifest.json").read_text())["left_out"]
    assert left_out["empty"] == ["void"] and accounting[REPORTED, "empty"] == 1
    for reason, names in left_out.items():
        assert reason == "empty" or accounting[LEFT_OUT, reason] == len(names)
    stored = len(raw_arrays(tmp_path / "store")) - 1  # the experts' factors are one tensor there
    dense = accounting.get((USED, "dense"), 0) + sum(accounting.get((UNUSED, s), 0) for s in ("k_scale", "v_scale"))
    assert stored == dense


@pytest.mark.parametrize("form", FORMS)
def test_inventory_shows_the_accounting(tmp_path, form):
    folder = copy_checkpoint(tmp_path / "model", **FORMS[form])
    add_tensor(folder, "void", torch.empty(0))
    code, out, _ = run_cli("inventory", folder, "--json")
    shown = json.loads(out)
    assert code == 0 and sum(row["bytes"] for row in shown["accounting"]) == shown["file_bytes"]["data"]
    assert {"verdict": REPORTED, "reason": "empty", "tensors": 1, "bytes": 0} in shown["accounting"]
    assert shown["file_bytes"]["files"] == sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert "left out" in run_cli("inventory", folder)[1]
