"""Modules and their formats, found from the tensors alone: never from a name, never from a list in the metadata."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod

from nemolab.checkpoint.config import ModelConfig
from nemolab.checkpoint.formats import GROUP
from nemolab.checkpoint.names import is_mtp, is_vision
from nemolab.checkpoint.safetensors_header import TensorEntry
from nemolab.checkpoint.structure import EMBEDDINGS, HEAD, Expected, expect_modules
from nemolab.errors import CheckpointError

PLAIN_FORMATS = {"BF16": "bf16", "F16": "f16", "F32": "f32"}
QUANTISED_FORMATS = ("nvfp4", "fp8")

# Far above any model known (Nemotron-3-Super has 20,480), far below what would fill the memory with names.
_MOST_CLAIMED_EXPERTS = 500_000

_SUFFIXES = frozenset(("weight", "bias", "weight_scale", "weight_scale_2", "input_scale", "k_scale", "v_scale"))
_SCALES = ("weight_scale", "weight_scale_2")
# Scales of the key-value cache: stored beside these projections, of no use to a cache that is not quantised.
_CACHE_SCALES = {"k_scale": "k_proj", "v_scale": "v_proj"}

# Endings of other people's quantised forms -> what they are. Loading one of these as ModelOpt's gives silent nonsense.
_FOREIGN = {
    "weight_packed": "compressed-tensors (its global scale is a divisor)",
    "weight_global_scale": "compressed-tensors (its global scale is a divisor)",
    "input_global_scale": "compressed-tensors (its global scale is a divisor)",
    "weight_shape": "compressed-tensors",
    "weight_scale_inv": "block-wise FP8 (DeepSeek's form)",
    "weight_zero_point": "an integer quantisation with zero points",
    "pre_quant_scale": "AWQ (activations would need its pre_quant_scale)",
    "qweight": "GPTQ or AWQ",
    "qzeros": "GPTQ or AWQ",
    "g_idx": "GPTQ",
    "absmax": "bitsandbytes",
    "quant_map": "bitsandbytes",
    "SCB": "bitsandbytes",
    "up_proj_blocks": "MXFP4 (gpt-oss's form)",
    "down_proj_blocks": "MXFP4 (gpt-oss's form)",
}  # fmt: skip
_STACKED = re.compile(r"\.experts\.(up_proj|down_proj|gate_up_proj)$")


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
    _check_all_there(modules, expected, config)
    if "routed" not in without:
        _check_experts_alike(modules, config)
    return modules, notes + _note_unused(tensors)


def _check_claimed_experts(n_tensors: int, config: ModelConfig) -> None:
    """Before a name is made for each: a config of a stranger may claim thousands of millions of experts."""
    layers, experts = len(config.moe_layers), config.n_experts
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
        if name in expected and expected[name].leaf:
            groups[name] = {"weight": entry}
        elif suffix in _SUFFIXES and (owner in expected or owner == HEAD or is_mtp(name) or is_vision(name)):
            groups.setdefault(owner, {})[suffix] = entry
        elif (is_vision(name) or is_mtp(name)) and not _foreign_form(name):
            groups[name] = {"weight": entry}
        else:
            unknown.append(entry)
    return groups, unknown


def _judge_unknown(unknown: list[TensorEntry], config: ModelConfig) -> list[str]:
    """Unknown tensors with bytes are refused: they would be weights that silently do nothing. Empty ones are noted."""
    for entry in unknown:
        form = _foreign_form(entry.name)
        if form:
            raise CheckpointError(f"{_at(entry)}: this is {form}, not ModelOpt's NVFP4 or FP8, and is not read")
    full = [entry for entry in unknown if entry.nbytes]
    if full:
        raise CheckpointError(
            f"{_at(full[0])}: unknown tensor {full[0].dtype} {list(full[0].shape)}, {full[0].nbytes:,} bytes"
            f"{_what_the_layer_is(full[0].name, config)}{_and_more(len(full))}"
        )
    return [f"unknown and empty, left aside: {entry.source_name}" for entry in unknown]


def _foreign_form(name: str) -> str | None:
    if _STACKED.search(name):
        return (
            "the stacked form transformers keeps in memory (all experts in one tensor; save_pretrained unstacks them)"
        )
    return _FOREIGN.get(name.rpartition(".")[2])


def _make_module(name: str, group: dict[str, TensorEntry], expected: Expected | None) -> Module:
    weight = group.get("weight")
    if weight is None:
        lone = next(iter(group.values()))
        raise CheckpointError(f"{_at(lone)} is there, but {name}.weight is missing")
    part = expected.part if expected else "vision" if is_vision(name) else "mtp" if is_mtp(name) else "head"
    format, shape = _read_format(name, group, part)
    if expected and shape != expected.shape:
        stored = f" (stored as {weight.dtype} {list(weight.shape)})" if format == "nvfp4" else ""
        raise CheckpointError(
            f"{_at(weight)} has shape {list(shape)}{stored}; by config.json {list(expected.shape)} was expected"
        )
    if part not in ("vision", "mtp"):
        _check_bias(name, group, shape, expected)
    for suffix, projection in _CACHE_SCALES.items():
        if suffix in group and not name.endswith(projection):
            raise CheckpointError(f"{_at(group[suffix])}: {suffix} belongs beside a {projection} only")
    return Module(name, part, format, shape, group, sum(entry.nbytes for entry in group.values()))


def _read_format(name: str, group: dict[str, TensorEntry], part: str) -> tuple[str, tuple[int, ...]]:
    """(format, logical shape) from dtypes and shapes. This is the one place where a format is decided."""
    weight = group["weight"]
    if weight.dtype == "U8":
        return "nvfp4", _check_nvfp4(name, group)
    if weight.dtype == "F8_E4M3":
        return "fp8", _check_fp8(name, group)
    stray = next((group[suffix] for suffix in _SCALES if suffix in group), None)
    if stray:
        raise CheckpointError(f"{_at(stray)} is a scale beside a weight of dtype {weight.dtype}, which needs none")
    if weight.dtype in PLAIN_FORMATS:
        return PLAIN_FORMATS[weight.dtype], weight.shape
    if part == "vision":
        return weight.dtype.lower(), weight.shape
    raise CheckpointError(
        f"{_at(weight)} has dtype {weight.dtype}; U8 (NVFP4), F8_E4M3 (FP8), {', '.join(PLAIN_FORMATS)} are read"
    )


def _check_nvfp4(name: str, group: dict[str, TensorEntry]) -> tuple[int, ...]:
    weight = group["weight"]
    scale = _need(name, group, "weight_scale", "NVFP4 (its weight is U8)")
    if scale.dtype in ("U8", "F8_E8M0"):
        raise CheckpointError(
            f"{_at(scale)} has dtype {scale.dtype}: this is MXFP4, not ModelOpt's NVFP4, and is not read"
        )
    scale_2 = _need(name, group, "weight_scale_2", "NVFP4 (its weight is U8)")
    if scale.dtype != "F8_E4M3":
        raise CheckpointError(f"{_at(scale)} has dtype {scale.dtype}; NVFP4 needs F8_E4M3")
    _check_scalar(scale_2)
    if len(weight.shape) != 2 or weight.shape[1] * 2 % GROUP:
        raise CheckpointError(
            f"{_at(weight)} is U8 {list(weight.shape)}; NVFP4 needs [rows, columns / 2], columns in groups of {GROUP}"
        )
    rows, columns = weight.shape[0], weight.shape[1] * 2
    needed = (rows, columns // GROUP)
    if scale.shape != needed:
        padded = (-(-rows // 128) * 128, -(-needed[1] // 4) * 4)
        if scale.shape == (rows, columns // 32):
            hint = ": one scale for 32 columns, not 16"
        elif scale.shape == padded or prod(scale.shape) == prod(padded):
            hint = ": a padded, swizzled layout (128 x 4 tiles); only the linear layout is read"
        else:
            hint = ""
        raise CheckpointError(f"{_at(scale)} has shape {list(scale.shape)}; {list(needed)} was expected{hint}")
    return (rows, columns)


def _check_fp8(name: str, group: dict[str, TensorEntry]) -> tuple[int, ...]:
    scale = _need(name, group, "weight_scale", "FP8 (its weight is F8_E4M3)")
    if "weight_scale_2" in group:
        raise CheckpointError(
            f"{_at(group['weight_scale_2'])} is there, but the weight is F8_E4M3: FP8 has one scale only"
        )
    _check_scalar(scale)
    return group["weight"].shape


def _need(name: str, group: dict[str, TensorEntry], suffix: str, form: str) -> TensorEntry:
    if suffix not in group:
        raise CheckpointError(f"{_place(name)}{name}.{suffix} is missing; {form} needs it")
    return group[suffix]


def _check_scalar(entry: TensorEntry) -> None:
    """Exporters write scalars as [] or as [1]; both are meant."""
    if entry.dtype != "F32" or entry.shape not in ((), (1,)):
        raise CheckpointError(
            f"{_at(entry)} is {entry.dtype} {list(entry.shape)}; one F32 number, [] or [1], was expected"
        )


def _check_bias(name: str, group: dict[str, TensorEntry], shape: tuple[int, ...], expected: Expected | None) -> None:
    bias, wanted = group.get("bias"), bool(expected and expected.bias)
    if wanted and bias is None:
        raise CheckpointError(f"{_place(name)}{name}.bias is missing; config.json says there is one")
    if bias is not None and not wanted:
        raise CheckpointError(f"{_at(bias)} is there; config.json says this module has no bias")
    if bias is not None and (bias.dtype not in PLAIN_FORMATS or bias.shape != shape[:1]):
        raise CheckpointError(f"{_at(bias)} is {bias.dtype} {list(bias.shape)}; a float {list(shape[:1])} was expected")


def _check_all_there(modules: Mapping[str, Module], expected: Mapping[str, Expected], config: ModelConfig) -> None:
    missing = [name for name in expected if name not in modules]
    if missing:
        first = missing[0]
        tensor = first if expected[first].leaf else f"{first}.weight"
        hint = " (tie_word_embeddings is false, so the head must be stored)" if first == HEAD else ""
        raise CheckpointError(
            f"{_place(first)}{tensor} is missing{hint}; by config.json {list(expected[first].shape)} was expected"
            f"{_what_the_layer_is(first, config)}{_and_more(len(missing))}"
        )
    head = modules.get(HEAD)
    if head and head.shape != modules[EMBEDDINGS].shape:
        raise CheckpointError(f"lm_head is {list(head.shape)}, backbone.embeddings {list(modules[EMBEDDINGS].shape)}")


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
                        f"layer {layer}, expert {expert}: {module.name} is {module.format}, {first.name} is"
                        f" {first.format}; the experts of one layer must share one format"
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


def _place(name: str) -> str:
    """ "layer 1, expert 5: " for names that have them: what a reader looks for first."""
    layer = re.search(r"layers\.(\d+)\.", name)
    expert = re.search(r"\.experts\.(\d+)\.", name)
    where = ([f"layer {layer[1]}"] if layer else []) + ([f"expert {expert[1]}"] if expert else [])
    return ", ".join(where) + ": " if where else ""


def _at(entry: TensorEntry) -> str:
    return f"{_place(entry.name)}{entry.source_name} in {entry.shard}"


def _what_the_layer_is(name: str, config: ModelConfig) -> str:
    layer = re.match(r"backbone\.layers\.(\d{1,9})\.", name)
    if not layer:
        return ""
    index = int(layer[1])
    if index >= config.num_hidden_layers:
        return f"; config.json has layers 0 to {config.num_hidden_layers - 1}"
    kind = config.layer_types[index]
    experts = f" with {config.n_experts} experts" if kind == "moe" else ""
    return f"; config.json says layer {index} is {kind}{experts}"


def _and_more(count: int) -> str:
    return f" (and {count - 1:,} more like it)" if count > 1 else ""
