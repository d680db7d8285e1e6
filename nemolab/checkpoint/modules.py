"""Modules and their formats, found from the tensors alone: never from a name, never from a list in the metadata."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod

from nemolab.checkpoint.config import ModelConfig
from nemolab.checkpoint.foreign import foreign_form
from nemolab.checkpoint.formats import GROUP
from nemolab.checkpoint.names import is_mtp, is_vision, prefix_of, stored_name
from nemolab.checkpoint.safetensors_header import TensorEntry, layer_of, place_of
from nemolab.checkpoint.structure import EMBEDDINGS, HEAD, Expected, expect_modules, expect_mtp
from nemolab.errors import CheckpointError

PLAIN_FORMATS = {"BF16": "bf16", "F16": "f16", "F32": "f32"}
QUANTISED_FORMATS = ("nvfp4", "fp8")

# Far above any model known (Nemotron-3-Super has 20,480), far below what would fill the memory with names.
_MOST_CLAIMED_EXPERTS = 100_000
_LISTED = 5

_SUFFIXES = frozenset(("weight", "bias", "weight_scale", "weight_scale_2", "input_scale", "k_scale", "v_scale"))
_SCALES = ("weight_scale", "weight_scale_2")
UNUSED_SCALES = ("input_scale", "k_scale", "v_scale")  # never multiplied by anything
# Scales of the key-value cache: stored beside these projections, of no use to a cache that is not quantised.
_CACHE_SCALES = {"k_scale": "k_proj", "v_scale": "v_proj"}


@dataclass(frozen=True, slots=True)
class Module:
    """One weight with everything stored beside it. `shape` is logical: [N, K] where NVFP4 stores [N, K/2] bytes.

    tensors  suffix -> entry: weight; where present bias, weight_scale, weight_scale_2, input_scale, k_scale, v_scale
    nbytes   all of them
    """

    name: str
    part: str
    format: str  # "nvfp4", "fp8", "bf16", "f16", "f32"; vision may hold others, such as "i64"
    shape: tuple[int, ...]
    tensors: dict[str, TensorEntry]
    nbytes: int


def find_modules(
    tensors: Mapping[str, TensorEntry], config: ModelConfig, without: Collection[str] = ()
) -> tuple[dict[str, Module], list[str]]:
    """Every tensor (keyed by canonical name) gets its module; the config's shapes are checked on the way.

    without  parts that live elsewhere: a store keeps "routed" in blocks, so its dense tensors are judged without them
    Returns the modules by canonical name and notes about what was left aside. Needs no files, only entries.
    Raises CheckpointError for a missing, unknown, misshapen or foreign tensor, naming layer, expert and tensor.
    """
    _check_claimed_experts(len(tensors), config)
    expected = {name: module for name, module in expect_modules(config).items() if module.part not in without}
    groups, unknown = _group(tensors, expected)
    notes = _judge_unknown(unknown, config)
    # In the order of the model, not of the files: whatever is wrong is reported at the first layer that has it.
    names = [name for name in expected if name in groups] + [name for name in groups if name not in expected]
    modules = {name: _make_module(name, groups[name], expected.get(name)) for name in names}
    _check_all_there(modules, expected, config, tensors)
    if "routed" not in without:
        _check_experts_alike(modules, config)
    return modules, notes + _note_unused(tensors) + _note_odd_mtp(modules, config)


def _check_claimed_experts(n_tensors: int, config: ModelConfig) -> None:
    """Before a name is made for each: a config of a stranger may claim thousands of millions of experts."""
    layers, experts = len(config.moe_layers) + config.mtp_layer_types.count("moe"), config.n_experts
    if layers * experts > max(n_tensors, _MOST_CLAIMED_EXPERTS):
        raise CheckpointError(
            f"config.json says {layers:,} MoE layers with {experts:,} experts each (n_routed_experts);"
            f" {n_tensors:,} tensors are there in all"
        )


def _group(
    tensors: Mapping[str, TensorEntry], expected: Mapping[str, Expected]
) -> tuple[dict[str, dict[str, TensorEntry]], list[TensorEntry]]:
    """Tensors by module and suffix; and those that belong to nothing known."""
    groups: dict[str, dict[str, TensorEntry]] = {}
    unknown = []
    for name, entry in tensors.items():
        owner, _, suffix = name.rpartition(".")
        aside = is_mtp(name) or is_vision(name)
        if name in expected and expected[name].leaf:
            module, suffix = name, "weight"
        elif suffix in _SUFFIXES and (owner == HEAD or aside or (owner in expected and not expected[owner].leaf)):
            module = owner
        elif aside and not foreign_form(name):
            module, suffix = name, "weight"
        else:
            unknown.append(entry)
            continue
        if not entry.nbytes and _says_nothing(module, suffix, tensors, expected):
            unknown.append(entry)
            continue
        group = groups.setdefault(module, {})
        if suffix in group:  # "x" and "x.weight": only beside the tower and MTP, whose names are not known beforehand
            raise CheckpointError(f"{place_of(entry)} and {group[suffix].source_name} are both the weight of {module}")
        group[suffix] = entry
    return groups, unknown


def _says_nothing(
    module: str, suffix: str, tensors: Mapping[str, TensorEntry], expected: Mapping[str, Expected]
) -> bool:
    """Whether a tensor without a byte is one that its module has no use for: exporters leave such shells behind."""
    if suffix == "weight":
        return module == HEAD and HEAD not in expected
    if suffix == "bias":
        return not (module in expected and expected[module].bias)
    weight = tensors.get(f"{module}.weight")
    if suffix in _SCALES and weight is not None:
        return weight.dtype in PLAIN_FORMATS or (suffix == "weight_scale_2" and weight.dtype == "F8_E4M3")
    return suffix in UNUSED_SCALES


def _judge_unknown(unknown: list[TensorEntry], config: ModelConfig) -> list[str]:
    """Unknown tensors with bytes are refused: they would be weights that silently do nothing. Empty ones are noted."""
    for entry in unknown:
        form = foreign_form(entry.name)
        if form:
            raise CheckpointError(f"{place_of(entry)}: this is {form}, not ModelOpt's NVFP4 or FP8, and is not read")
    # The first layer's first, and a weight before its scales: that is where one looks for what went wrong.
    full = sorted((entry for entry in unknown if entry.nbytes), key=_place_in_model)
    if full:
        raise CheckpointError(
            f"{place_of(full[0])}: unknown tensor {full[0].dtype} {list(full[0].shape)}, {full[0].nbytes:,} bytes"
            f"{_what_the_layer_is(full[0].name, config)}{_and_more(len(full))}"
        )
    if not unknown:
        return []
    names = ", ".join(entry.source_name for entry in unknown[:_LISTED])
    more = f" and {len(unknown) - _LISTED:,} more" if len(unknown) > _LISTED else ""
    return [f"empty and of no use, left aside: {names}{more}"]


def _place_in_model(entry: TensorEntry) -> tuple[int, bool]:
    layer = re.search(r"layers\.(\d{1,9})\.", entry.name)
    return (int(layer[1]) if layer else -1, not entry.name.endswith(".weight"))


def _make_module(name: str, group: dict[str, TensorEntry], expected: Expected | None) -> Module:
    weight = group.get("weight")
    if weight is None:
        lone = next(iter(group.values()))
        missing = f"{lone.source_name.rpartition('.')[0]}.weight"
        raise CheckpointError(f"{place_of(lone)} is there, but {missing} is missing")
    part = expected.part if expected else "vision" if is_vision(name) else "mtp" if is_mtp(name) else "head"
    format, shape = _read_format(name, group, part, expected)
    if part not in ("vision", "mtp"):
        _check_bias(name, group, shape, expected)
    for suffix, projection in _CACHE_SCALES.items():
        if suffix in group and not name.endswith(projection):
            raise CheckpointError(f"{place_of(group[suffix])}: {suffix} belongs beside a {projection} only")
        if suffix in group:
            _check_scalar(group[suffix])
    return Module(name, part, format, shape, group, sum(entry.nbytes for entry in group.values()))


def _read_format(
    name: str, group: dict[str, TensorEntry], part: str, expected: Expected | None
) -> tuple[str, tuple[int, ...]]:
    """(format, logical shape) from dtypes and shapes. This is the one place where a format is decided."""
    weight = group["weight"]
    if weight.dtype == "U8":
        return "nvfp4", _check_nvfp4(name, group, expected)
    if weight.dtype == "F8_E4M3":
        _check_shape(weight, weight.shape, expected)
        return "fp8", _check_fp8(name, group)
    stray = next((group[suffix] for suffix in _SCALES if suffix in group), None)
    if stray and weight.dtype in PLAIN_FORMATS:
        raise CheckpointError(
            f"{place_of(stray)} is a scale beside a weight of dtype {weight.dtype} ({weight.source_name} in"
            f" {weight.shard}), which needs none: a weight of U8 (NVFP4) or F8_E4M3 (FP8), or no scale, was expected"
        )
    if weight.dtype in PLAIN_FORMATS:
        _check_shape(weight, weight.shape, expected)
        return PLAIN_FORMATS[weight.dtype], weight.shape
    if part == "vision" and not stray:
        return weight.dtype.lower(), weight.shape
    raise CheckpointError(
        f"{place_of(weight)} has dtype {weight.dtype}; U8 (NVFP4), F8_E4M3 (FP8), {', '.join(PLAIN_FORMATS)} are read"
    )


def _check_shape(weight: TensorEntry, shape: tuple[int, ...], expected: Expected | None) -> None:
    if expected and shape != expected.shape:
        stored = f" (stored as {weight.dtype} {list(weight.shape)})" if shape != weight.shape else ""
        raise CheckpointError(
            f"{place_of(weight)} has shape {list(shape)}{stored}; by config.json {list(expected.shape)} was expected"
        )


def _check_nvfp4(name: str, group: dict[str, TensorEntry], expected: Expected | None) -> tuple[int, ...]:
    weight = group["weight"]
    scale = _need(name, group, "weight_scale", "NVFP4 (its weight is U8)")
    if scale.dtype in ("U8", "F8_E8M0"):
        raise CheckpointError(
            f"{place_of(scale)} has dtype {scale.dtype}: this is MXFP4, not ModelOpt's NVFP4, and is not read"
        )
    scale_2 = _need(name, group, "weight_scale_2", "NVFP4 (its weight is U8)")
    if scale.dtype != "F8_E4M3":
        raise CheckpointError(f"{place_of(scale)} has dtype {scale.dtype}; NVFP4 needs F8_E4M3")
    _check_scalar(scale_2)
    if len(weight.shape) != 2 or weight.shape[1] * 2 % GROUP:
        raise CheckpointError(
            f"{place_of(weight)} is U8 {list(weight.shape)}; NVFP4 needs [rows, columns / 2] with columns in groups of"
            f" {GROUP}"
        )
    rows, columns = weight.shape[0], weight.shape[1] * 2
    _check_shape(weight, (rows, columns), expected)
    needed = (rows, columns // GROUP)
    if scale.shape != needed:
        padded = (-(-rows // 128) * 128, -(-needed[1] // 4) * 4)
        if scale.shape == (rows, columns // 32):
            hint = ": one scale for 32 columns, not 16"
        elif scale.shape == padded or prod(scale.shape) == prod(padded):
            hint = ": a padded, swizzled layout (128 x 4 tiles); only the linear layout is read"
        else:
            hint = ""
        raise CheckpointError(f"{place_of(scale)} has shape {list(scale.shape)}; {list(needed)} was expected{hint}")
    return (rows, columns)


def _check_fp8(name: str, group: dict[str, TensorEntry]) -> tuple[int, ...]:
    scale = _need(name, group, "weight_scale", "FP8 (its weight is F8_E4M3)")
    if "weight_scale_2" in group:
        raise CheckpointError(
            f"{place_of(group['weight_scale_2'])} is there, but the weight is F8_E4M3: FP8 has one scale only"
        )
    _check_scalar(scale)
    return group["weight"].shape


def _need(name: str, group: dict[str, TensorEntry], suffix: str, form: str) -> TensorEntry:
    if suffix not in group:
        weight = group["weight"]
        missing = _sibling(group, suffix)
        raise CheckpointError(
            f"{layer_of(name)}{missing} is missing; {form} needs it; the weight lies in {weight.shard}"
        )
    return group[suffix]


def _check_scalar(entry: TensorEntry) -> None:
    """Exporters write scalars as [] or as [1]; both are meant."""
    if entry.dtype != "F32" or entry.shape not in ((), (1,)):
        raise CheckpointError(
            f"{place_of(entry)} is {entry.dtype} {list(entry.shape)}; one F32 number, [] or [1], was expected"
        )


def _sibling(group: dict[str, TensorEntry], suffix: str) -> str:
    """What a tensor beside a module's weight would be called in the files."""
    return f"{group['weight'].source_name.removesuffix('.weight')}.{suffix}"


def _check_bias(name: str, group: dict[str, TensorEntry], shape: tuple[int, ...], expected: Expected | None) -> None:
    bias, wanted = group.get("bias"), bool(expected and expected.bias)
    if wanted and bias is None:
        raise CheckpointError(
            f"{layer_of(name)}{_sibling(group, 'bias')} is missing; config.json says there is one;"
            f" the weight lies in {group['weight'].shard}"
        )
    if bias is not None and not wanted:
        raise CheckpointError(f"{place_of(bias)} is there; config.json says this module has no bias")
    if bias is not None and (bias.dtype not in PLAIN_FORMATS or bias.shape != shape[:1]):
        raise CheckpointError(
            f"{place_of(bias)} is {bias.dtype} {list(bias.shape)}; a float {list(shape[:1])} was expected"
        )


def _check_all_there(
    modules: Mapping[str, Module],
    expected: Mapping[str, Expected],
    config: ModelConfig,
    tensors: Mapping[str, TensorEntry],
) -> None:
    missing = [name for name in expected if name not in modules]
    if missing:
        first = missing[0]
        tensor = stored_name(first if expected[first].leaf else f"{first}.weight", prefix_of(tensors.values()))
        hint = " (tie_word_embeddings is false, so the head must be stored)" if first == HEAD else ""
        files = sorted({entry.shard for entry in tensors.values()})
        raise CheckpointError(
            f"{layer_of(first)}{tensor} is missing{hint}; by config.json {list(expected[first].shape)} was expected"
            f" in {files[0] if len(files) == 1 else f'one of {len(files)} files'}"
            f"{_what_the_layer_is(first, config)}{_and_more(len(missing))}"
        )
    head, embeddings = modules.get(HEAD), modules[EMBEDDINGS]
    if head and head.shape != embeddings.shape:
        raise CheckpointError(
            f"{place_of(head.tensors['weight'])} has shape {list(head.shape)};"
            f" {list(embeddings.shape)}, that of the embeddings, was expected"
        )


def _check_experts_alike(modules: Mapping[str, Module], config: ModelConfig) -> None:
    """Within one layer all experts have one format (and by the config one shape): they are blocks of one size."""
    for layer in config.moe_layers:
        prefix = f"backbone.layers.{layer}.mixer.experts"
        first = modules[f"{prefix}.0.up_proj"]
        for expert in range(config.n_experts):
            for matrix in ("up_proj", "down_proj"):
                module = modules[f"{prefix}.{expert}.{matrix}"]
                if module.format != first.format:
                    raise CheckpointError(
                        f"{place_of(module.tensors['weight'])} is {module.format}, {first.name} is {first.format};"
                        " the experts of one layer must share one format"
                    )


def _note_unused(tensors: Mapping[str, TensorEntry]) -> list[str]:
    notes = []
    unused = [
        ("input_scale", "weights are decoded without them"),
        ("k_scale", "the key-value cache is not quantised"),
        ("v_scale", "the key-value cache is not quantised"),
    ]
    for suffix, why in unused:
        count = sum(name.endswith(f".{suffix}") for name in tensors)
        if count:
            notes.append(f"{suffix}: {count:,} present, not used: {why}")
    for part, belongs in (("MTP", is_mtp), ("vision", is_vision)):
        found = [entry.nbytes for name, entry in tensors.items() if belongs(name)]
        if found:
            notes.append(f"{len(found):,} {part} tensors ({sum(found):,} bytes) are counted, not run")
    return notes


def _note_odd_mtp(modules: Mapping[str, Module], config: ModelConfig) -> list[str]:
    """MTP is not run, so what the config promises of it and is not there, or is of another shape, is said only."""
    stored = {name: module for name, module in modules.items() if module.part == "mtp"}
    promised = expect_mtp(config)
    notes = []
    if promised and not stored:
        return ["config.json promises an MTP block (num_nextn_predict_layers); no mtp tensors are stored"]
    if promised and (missing := [name for name in promised if name not in stored]):
        notes.append(f"MTP: {missing[0]} is promised by config.json and not stored{_and_more(len(missing))}")
    odd = [name for name in stored if name in promised and stored[name].shape != promised[name].shape]
    if odd:
        found, needed = stored[odd[0]].shape, promised[odd[0]].shape
        notes.append(f"MTP: {odd[0]} has shape {list(found)}, by config.json {list(needed)}{_and_more(len(odd))}")
    return notes


def _what_the_layer_is(name: str, config: ModelConfig) -> str:
    layer = re.match(r"backbone\.layers\.(\d{1,9})\.", name)
    if not layer:
        return ""
    index = int(layer[1])
    if index >= config.num_hidden_layers:
        return f"; config.json has layers 0 to {config.num_hidden_layers - 1}"
    kind = config.layer_types[index]
    experts = f" with {config.n_experts} experts" if kind == "moe" else ""
    if ".mixer.fc" in name and kind == "moe" and not config.moe_latent_size:
        experts += " and no moe_latent_size"
    if ".shared_experts." in name and kind == "moe" and not config.n_shared_experts:
        experts += " and n_shared_experts 0"
    return f"; config.json says layer {index} is {kind}{experts}"


def _and_more(count: int) -> str:
    return f" (and {count - 1:,} more like it)" if count > 1 else ""
