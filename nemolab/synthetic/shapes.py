"""The named shapes: which published model a form copies, how much of it, and with which sizes changed.

Geometry and formats come from `data/configs/`; here stands what those files do not say: how each release writes its
metadata and names.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from nemolab import paths
from nemolab.checkpoint.config import ModelConfig
from nemolab.checkpoint.json_files import read_json
from nemolab.checkpoint.layer_lists import LETTERS, MTP_SPELLINGS, SPELLINGS, read_layer_list
from nemolab.checkpoint.names import kind_of
from nemolab.checkpoint.quant_metadata import read_metadata
from nemolab.errors import CheckpointError, UsageError
from nemolab.synthetic.form import Form, FormatTable, check_form, layer_type_of
from nemolab.synthetic.vision import LAYOUTS, Vision

_LINEAR_WORDS = {"mamba": "linear_attention", "attention": "full_attention"}
# How a config may say its layers -> (field, field for MTP, the words of a list; None: letters).
LAYERS_AS = {
    "pattern": ("hybrid_override_pattern", "mtp_hybrid_override_pattern", None),
    "block_types": ("layers_block_type", "mtp_layers_block_type", {}),
    "linear_block_types": ("layers_block_type", "mtp_layers_block_type", _LINEAR_WORDS),
    "layer_types": ("layer_types", "mtp_layer_types", _LINEAR_WORDS),
}


@dataclass(frozen=True)
class Shape:
    """One release. `config`: its file below `data/`; the rest as in `Form`."""

    config: str
    layers_as: str = "pattern"
    metadata: str = "both"
    uniform: bool = False
    kv_cache: str | None = "FP8"
    dtype_field: str = "dtype"
    multimodal: bool = False


SHAPES = {
    "super": Shape("configs/nemotron-3-super.json"),
    "super35": Shape("configs/nemotron-3.5-super.json", "linear_block_types"),
    "super35-vl": Shape("configs/nemotron-3.5-super.json", "linear_block_types", multimodal=True),
    "nano": Shape("configs/nemotron-3-nano.json", metadata="hf_quant", uniform=True, dtype_field="torch_dtype"),
    "lightning": Shape("configs/nemotron-3.5-lightning.json", "block_types"),
    "tiny": Shape("tiny/config.json", kv_cache=None),
}
ALIASES = {
    "nemotron-3-super": "super", "super3": "super", "nemotron-3.5-super": "super35", "super3.5": "super35",
    "super-3.5": "super35", "nemotron-3.5-super-vl": "super35-vl", "super3.5-vl": "super35-vl", "vl": "super35-vl",
    "super-vl": "super35-vl", "nemotron-3-nano": "nano", "nano3": "nano", "nemotron-3.5-lightning": "lightning",
    "lightning35": "lightning",
}  # fmt: skip

# Fields every release writes that decide no tensor's size.
_COMMON = {
    "attention_dropout": 0.0, "chunk_size": 128, "expand": 2, "hidden_dropout": 0.0, "initializer_range": 0.02,
    "mamba_proj_bias": False, "mamba_ssm_cache_dtype": "float32", "moe_shared_expert_overlap": False, "norm_eps": 1e-5,
    "num_logits_to_keep": 1, "partial_rotary_factor": 1.0, "rescale_prenorm_residual": True, "residual_in_fp32": False,
    "rope_theta": 10000, "sliding_window": None, "time_step_floor": 1e-4, "time_step_max": 0.1, "time_step_min": 0.001,
    "use_cache": True, "use_mamba_kernels": True, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
# Fields that may be set though not every release has them.
_OPTIONAL = ("moe_latent_size", "time_step_limit", "num_nextn_predict_layers", *SPELLINGS, *MTP_SPELLINGS)
_FIXED = ("architectures", "model_type", "num_hidden_layers", "dtype", "torch_dtype", "nemolab", "quantization_config")
_SHORT_NAMES = {
    "pattern": "hybrid_override_pattern", "layers": "hybrid_override_pattern", "experts": "n_routed_experts",
    "top_k": "num_experts_per_tok", "latent": "moe_latent_size", "mtp_pattern": "mtp_hybrid_override_pattern",
}  # fmt: skip
_VISION_FIELDS = {
    "vit_hidden_size": "width", "vision_config.num_hidden_layers": "blocks", "projector_hidden_size": "inner",
    "patch_size": "patch",
}  # fmt: skip


def make_form(
    shape: str,
    *,
    moe_layers: int | None = None,
    settings: Mapping[str, Any] | None = None,
    layers_as: str | None = None,
    vision_as: str | None = None,
    mtp: bool = True,
    **options: Any,
) -> Form:
    """The form of a named shape. Raises UsageError for what cannot be, naming the field; arguments as in `write`."""
    if "seed" in options:
        check_seed(options["seed"])
    known = SHAPES[find_shape(shape)]
    fields, facts = _read_base(known)
    table, kv_scales, weight_only = _read_facts(fields, facts, known)
    settings = dict(settings or {})
    tower = _tower(settings, vision_as or "timm") if known.multimodal else None
    fields, given_layers = _apply(fields, settings, multimodal=known.multimodal)
    layers = list(given_layers or read_layer_list(fields, known.config))
    if moe_layers is not None:
        layers = cut_layers(layers, moe_layers)
    if not mtp:
        fields["num_nextn_predict_layers"] = 0
    mtp_layers = read_layer_list(fields, known.config, MTP_SPELLINGS)
    text = _text_config(fields, known, layers, mtp_layers, layers_as or known.layers_as)
    form = Form(
        text=text,
        outer=_outer(tower) if tower else None,
        name=f"{facts.get('name', shape)} (synthetic)",
        formats=table,
        prefix="language_model.backbone." if known.multimodal else "backbone.",
        metadata=known.metadata,
        uniform=known.uniform,
        kv_cache=known.kv_cache,
        kv_scales=kv_scales,
        weight_only=weight_only,
        vision=tower,
        **options,
    )
    if vision_as and not known.multimodal:
        raise UsageError(f"{shape} has no vision tower, whose names could be {vision_as}; super35-vl has one")
    if not 0.5 <= form.sparsity <= 0.99:
        raise UsageError(
            f"sparsity is {form.sparsity}; a share of zeros from 0.5 (nothing planted) to 0.99 was expected"
        )
    if not 0 <= form.skew <= 5:
        raise UsageError(f"skew is {form.skew}; an exponent from 0 (all experts alike) to 5 was expected")
    try:
        form.config  # noqa: B018  read now, so that contradictions are refused before anything is made
    except CheckpointError as error:
        raise UsageError(str(error)) from error
    check_form(form)
    return form


def find_shape(name: str) -> str:
    """The name in SHAPES of a shape or one of its aliases, whatever its capitals."""
    wanted = name.lower().replace("_", "-").removesuffix("-nvfp4")
    wanted = ALIASES.get(wanted, wanted)
    if wanted not in SHAPES:
        raise UsageError(f"shape {name!r} is unknown; known are {', '.join(SHAPES)}")
    return wanted


def cut_layers(layers: list[str], moe_layers: int) -> list[str]:
    """The layers up to the N-th MoE layer; an attention layer is put behind where none is among them.

    transformers' models of the family need one, and a whole model always has one.
    """
    places = [place for place, kind in enumerate(layers) if kind == "moe"]
    if not 1 <= moe_layers <= len(places):
        raise UsageError(f"{moe_layers} MoE layers were asked for; from 1 to {len(places)} are there")
    if moe_layers == len(places):
        return layers
    kept = layers[: places[moe_layers - 1] + 1]
    return kept if "attention" in kept else [*kept, "attention"]


def _read_base(known: Shape) -> tuple[dict[str, Any], dict[str, Any]]:
    raw = read_json(paths.data_folder() / known.config)
    return {key: value for key, value in raw.items() if key != "nemolab"}, raw.get("nemolab", {})


def _read_facts(fields: dict, facts: dict, known: Shape) -> tuple[FormatTable, bool, frozenset[str]]:
    """Formats by kind and layer, from the `nemolab` section of a shipped config or from the vendor's own table."""
    config = ModelConfig.from_dict(fields, known.config)
    stated: dict[str, Any] = dict(facts.get("formats", {}))
    if not stated:
        for source in read_metadata(None, config)[:1]:
            for module, format in source.table.items():
                kind, layer = kind_of(module, ""), int(module.split(".layers.")[1].split(".")[0])
                layers = stated.setdefault(kind, {}).setdefault(format, [])
                layers += [] if layers and layers[-1] == layer else [layer]
    kinds = {}
    for kind, said in stated.items():
        if isinstance(said, dict):
            by_layer = {layer: format for format, layers in said.items() for layer in layers}
            said = tuple(by_layer.get(layer, "bf16") for layer in config.layers_of(layer_type_of(kind) or "moe"))
        kinds[kind] = said
    return FormatTable(kinds), facts.get("kv_cache_scales") is True, frozenset(facts.get("weight_only", ()))


def _apply(fields: dict, settings: dict, *, multimodal: bool) -> tuple[dict[str, Any], tuple[str, ...] | None]:
    """The base fields with the settings laid over them, and the list of layers if one of them was it."""
    fields = {key: value for key, value in fields.items() if key != "quantization_config"}
    whole = _COMMON | fields
    known = sorted({*whole, *_OPTIONAL, *_SHORT_NAMES, *(_VISION_FIELDS if multimodal else ())} - {*_FIXED})
    count = settings.pop("num_hidden_layers", None)
    for name, value in list(settings.items()):
        full = _SHORT_NAMES.get(name, name)
        if full not in known:
            near = get_close_matches(full, known, 3)
            hint = f"did you mean {' or '.join(near)}? " if near else ""
            raise UsageError(f"{name} is no field that can be set; {hint}known are {', '.join(known)}")
        if full in SPELLINGS or full in MTP_SPELLINGS:
            for other in SPELLINGS if full in SPELLINGS else MTP_SPELLINGS:
                whole.pop(other, None)
        whole[full] = value
    if isinstance(whole.get("mtp_hybrid_override_pattern"), str) and not whole["mtp_hybrid_override_pattern"]:
        whole["num_nextn_predict_layers"] = 0
        whole.pop("mtp_hybrid_override_pattern")
    try:
        layers = read_layer_list(whole, "the settings")
    except CheckpointError as error:
        raise UsageError(str(error)) from error
    if layers is None:
        raise UsageError("the list of layers is null; a pattern such as MEM*E was expected")
    if count is not None and (type(count) is not int or not 1 <= count <= len(layers)):
        raise UsageError(
            f"num_hidden_layers is {count!r}; the list of layers has {len(layers)}, set the pattern instead"
        )
    return whole, layers[:count] if count else layers


def _text_config(fields: dict, known: Shape, layers, mtp_layers, layers_as: str) -> dict[str, Any]:
    if layers_as not in LAYERS_AS:
        raise UsageError(f"layers as {layers_as!r} is unknown; known are {', '.join(LAYERS_AS)}")
    text = {key: value for key, value in fields.items() if key not in (*SPELLINGS, *MTP_SPELLINGS, "dtype")}
    text |= {known.dtype_field: "bfloat16", "num_hidden_layers": len(layers)}
    field, mtp_field, words = LAYERS_AS[layers_as]
    text[field] = spell_layers(layers, words)
    if text.get("num_nextn_predict_layers"):
        text[mtp_field] = spell_layers(mtp_layers or ("attention", "moe"), words)
    else:
        text.pop("num_nextn_predict_layers", None)
    return text


def spell_layers(layers, words: dict[str, str] | None) -> str | list[str]:
    """Kinds of layers as a pattern (no words) or as a list, the words given in place of the usual ones."""
    if words is None:
        letters = {kind: letter for letter, kind in LETTERS.items()}
        return "".join(letters[layer] for layer in layers)
    return [words.get(layer, layer) for layer in layers]


def _tower(settings: dict, layout: str) -> Vision:
    """The vision tower; takes its own sizes out of `settings`."""
    if layout not in LAYOUTS:
        raise UsageError(f"vision names as {layout!r} are unknown; known are {', '.join(LAYOUTS)}")
    sizes = {}
    for name, field in _VISION_FIELDS.items():
        sizes[field] = settings.pop(name, getattr(Vision, field))
        if type(sizes[field]) is not int or not 1 <= sizes[field] <= 2**20:
            raise UsageError(f"{name} is {sizes[field]!r}; a whole number >= 1 was expected")
    return Vision(layout, **sizes)


def _outer(tower: Vision) -> dict[str, Any]:
    """config.json of a multimodal model but for `llm_config`."""
    return {
        "architectures": ["NemotronH_Omni_Reasoning_V3"], "model_type": "nemotron_h_omni", "patch_size": tower.patch,
        "vit_hidden_size": tower.width, "projector_hidden_size": tower.inner, "downsample_ratio": 0.5,
        "img_context_token": "<image>", "img_context_token_id": 18, "img_start_token": "<img>",
        "img_end_token": "</img>", "norm_mean": [0.48145466, 0.4578275, 0.40821073],
        "norm_std": [0.26862954, 0.26130258, 0.27577711], "video_temporal_patch_size": 2, "sound_config": None,
        "vision_config": {
            "args": {"min_num_patches": 1024, "max_num_patches": 13312}, "num_hidden_layers": tower.blocks,
        },
    }  # fmt: skip


def parse_settings(words: tuple[str, ...]) -> dict[str, Any]:
    """`key=value` words with JSON values; what is no JSON is a word. Raises UsageError for anything else."""
    settings: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        name = name.strip()
        if not equals or not name:
            raise UsageError(f"--set {word!r}: field=value was expected, such as n_routed_experts=48")
        if name in settings:
            raise UsageError(f"--set {name} was given twice")
        try:
            settings[name] = json.loads(value)
        except ValueError:
            settings[name] = value.strip()
        if isinstance(settings[name], float) and not math.isfinite(settings[name]):
            raise UsageError(f"--set {name}={value}: a finite number was expected")
    return settings


def check_seed(seed: int) -> int:
    """A seed as it is used. Raises UsageError unless it is a whole number from 0 to 2^63 - 1."""
    if type(seed) is not int or not 0 <= seed < 2**63:
        raise UsageError(f"seed is {seed!r}; a whole number from 0 to 2^63 - 1 was expected")
    return seed
