"""config.json, hf_quant_config.json: what a release says about itself, in its own form."""

from __future__ import annotations

import re
from typing import Any

from nemolab.checkpoint.formats import GROUP
from nemolab.checkpoint.names import stored_name
from nemolab.synthetic.form import QUANTISED, Form
from nemolab.synthetic.tensors import list_linears

PRODUCER = {"name": "modelopt", "version": "0.0+nemolab.synthetic"}


def config_json(form: Form) -> dict[str, Any]:
    """config.json with whatever part of the metadata lies there."""
    whole = dict(form.text) if form.outer is None else {**form.outer, "llm_config": dict(form.text)}
    if form.metadata in ("both", "config"):
        whole["quantization_config"] = _flat(form)
    return whole


def hf_quant_json(form: Form) -> dict[str, Any] | None:
    """hf_quant_config.json, or None where the form has none."""
    if form.metadata not in ("both", "hf_quant"):
        return None
    algorithms, plain = _algorithms(form)
    if form.uniform:
        said = {"quant_algo": "NVFP4", "kv_cache_quant_algo": form.kv_cache, "group_size": GROUP}
        plain = plain + _not_linear(form, "mamba")
        return {"producer": PRODUCER, "quantization": said | {"exclude_modules": plain}}
    said = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": form.kv_cache}
    if form.weight_only:
        said["exclude_modules"] = _excluded(form, plain)
    return {"producer": PRODUCER, "quantization": said | {"quantized_layers": _table(algorithms)}}


def _flat(form: Form) -> dict[str, Any]:
    """The `quantization_config` of config.json."""
    algorithms, plain = _algorithms(form)
    if form.uniform:
        said = {"quant_algo": "NVFP4", "ignore": plain}
        said["config_groups"] = {"group_0": _group("NVFP4") | {"targets": ["Linear"]}}
    else:
        groups = {}
        for number, algorithm in enumerate(sorted(set(algorithms.values()))):
            targets = [module for module, found in algorithms.items() if found == algorithm]
            groups[f"group_{number}"] = _group(algorithm) | {"targets": targets}
        said = {
            "config_groups": groups,
            "quantized_layers": _table(algorithms),
            "ignore": _excluded(form, plain) if form.weight_only else [],
            "quant_algo": "MIXED_PRECISION",
        }
    if form.kv_cache:
        said["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    return said | {"producer": PRODUCER, "quant_method": "modelopt"}


def _algorithms(form: Form) -> tuple[dict[str, str], list[str]]:
    """({stored module name: algorithm}, the linear modules that are not quantised)."""
    names = {
        "nvfp4": "W4A16_NVFP4" if "nvfp4" in form.weight_only else "NVFP4",
        "fp8": "FP8",
    }
    algorithms, plain = {}, []
    for module, _, format in list_linears(form):
        stored = stored_name(module, form.prefix)
        if format in QUANTISED:
            algorithms[stored] = names[format]
        elif not re.search(r"embeddings$|gate$", module):
            plain.append(stored)
    return algorithms, plain


def _excluded(form: Form, plain: list[str]) -> list[str]:
    """What a weight-only release lists as left alone: MTP by one glob, and what is no linear layer too."""
    mtp = stored_name("mtp.", form.prefix)
    kept = [module for module in plain if not module.startswith(mtp)]
    globs = [f"{mtp.rstrip('.')}*"] if form.config.num_nextn_predict_layers else []
    return [stored_name("backbone.embeddings", form.prefix), *_not_linear(form, "mamba", "moe"), *kept, *globs]


def _not_linear(form: Form, *kinds: str) -> list[str]:
    """Modules of these layers that exporters name though they are no linear layers."""
    names = {"mamba": "conv1d", "moe": "gate"}
    return [
        stored_name(f"backbone.layers.{index}.mixer.{names[kind]}", form.prefix)
        for index, kind in enumerate(form.config.layer_types)
        if kind in kinds
    ]


def _table(algorithms: dict[str, str]) -> dict[str, dict[str, Any]]:
    return {
        module: {"quant_algo": algorithm} | ({} if algorithm == "FP8" else {"group_size": GROUP})
        for module, algorithm in algorithms.items()
    }


def _group(algorithm: str) -> dict[str, Any]:
    if algorithm == "FP8":
        numbers = {"dynamic": False, "num_bits": 8, "type": "float"}
    else:
        numbers = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": GROUP}
    return {"weights": numbers} if algorithm.startswith("W4A16") else {"input_activations": numbers, "weights": numbers}
