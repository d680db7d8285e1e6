"""What the config of any family says about number formats: its `quantization_config`, in the dialects that are common.

    fp8                 linear layers and experts E4M3, with one scale each or one for each block (DeepSeek-V3, Qwen3)
    mxfp4               routed experts E2M1, one E8M0 scale for 32 (gpt-oss)
    modelopt            NVFP4 or FP8 for all linear layers, or a table of modules (NVIDIA)
    compressed-tensors  groups of modules in floats or integers of 4 or 8 bits (Kimi-K2-Thinking)

A dialect we do not read is named in a note, and counts as if nothing were stated: options decide then.
"""

import fnmatch
import re
from dataclasses import dataclass, field
from typing import Any

from nemolab.checkpoint.quant_metadata import HF_QUANT_FILE
from nemolab.errors import CheckpointError

_MODELOPT = {"NVFP4": "nvfp4", "W4A16_NVFP4": "nvfp4", "FP8": "fp8", "W4A8_MXFP4_FP8": "mxfp4", "MXFP4": "mxfp4"}
_MOST_PATTERNS = 20_000
# Of the regular expressions of strangers only short ones of these letters are tried, with no quantifier but four `.*`
# and two groups of alternatives: what may match in many ways, many times over, can take hours.
_MOST_LETTERS = 200
_PLAIN_REGEX = re.compile(r"(?:[\w/^$|):-]|\((?:\?:)?|\\[.dw]|\.\*?|\[\w+\])*")
_MOST_GROUPS = 2
_HARMLESS_REGEX = re.compile(r"[^+*{}]*(?:\.\*[^+*{}]*){0,4}")


@dataclass(frozen=True)
class Quantization:
    """What a config says about formats.

    origin    a sentence: where the formats come from
    experts   format of the routed experts, None: unquantised
    linear    format of the other linear layers, None: unquantised
    table     module name (from "layers." on) -> format, which comes before both
    excluded  patterns of names that are not quantised
    """

    origin: str
    experts: str | None = None
    linear: str | None = None
    table: dict[str, str] = field(default_factory=dict)
    excluded: tuple[re.Pattern, ...] = ()
    notes: tuple[str, ...] = ()

    def of_experts(self, name: str) -> str | None:
        """Format of the routed experts in a module such as `model.layers.3.mlp.experts`."""
        short = _short(name)
        if short in self.table:
            return self.table[short]
        listed = next((format for key, format in self.table.items() if key.startswith(f"{short}.")), None)
        return listed or (None if self._is_excluded(name, f"{name}.0.down_proj") else self.experts)

    def of_linear(self, name: str) -> str | None:
        """Format of a linear layer that is no expert."""
        short = _short(name)
        return self.table.get(short) or (None if self._is_excluded(name) else self.linear)

    def _is_excluded(self, *names: str) -> bool:
        return any(pattern.search(name) for pattern in self.excluded for name in names)


def read_quantization(raw: dict[str, Any], where: str, beside: dict[str, Any] | None = None) -> Quantization:
    """The formats a config states, else those of the hf_quant_config.json beside it.

    Raises CheckpointError naming the field where it is no object of the kind.
    """
    found = next(iter(_stated(raw)), None)
    if found is None and beside is None:
        return Quantization(f"{where} states no quantisation")
    key, stated = found or (HF_QUANT_FILE, beside.get("quantization", beside))
    where = f"{where}: {key}" if found else f"{HF_QUANT_FILE} beside {where}"
    if not isinstance(stated, dict):
        raise CheckpointError(f"{where} is a {type(stated).__name__}; an object was expected")
    method = str(stated.get("quant_method") or ("modelopt" if "quant_algo" in stated else "")).lower()
    read = _DIALECTS.get(method)
    if read is None:
        return Quantization(
            f"{where} has quant_method {method[:40]!r}, which is not read: it counts as if it stated no formats"
        )
    return read(stated, where)


def _stated(raw: dict[str, Any]):
    for key in ("quantization_config", "compression_config"):
        if raw.get(key) is not None:
            yield key, raw[key]
    for part in ("text_config", "llm_config", "language_config"):
        if isinstance(raw.get(part), dict) and raw[part].get("quantization_config") is not None:
            yield f"{part}.quantization_config", raw[part]["quantization_config"]


def _read_fp8(stated: dict[str, Any], where: str) -> Quantization:
    block = stated.get("weight_block_size")
    format = "fp8"
    if block is not None:
        if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and 0 < n < 2**20 for n in block):
            raise CheckpointError(f"{where}.weight_block_size is {str(block)[:40]!r}; two sizes were expected")
        format = f"fp8_{block[0]}x{block[1]}"
    excluded, notes = _patterns(stated, ("modules_to_not_convert", "ignored_layers"), where)
    return Quantization(f"{where} states {format}", format, format, {}, (*excluded, _HEAD), notes)


def _read_mxfp4(stated: dict[str, Any], where: str) -> Quantization:
    excluded, notes = _patterns(stated, ("modules_to_not_convert",), where)
    return Quantization(f"{where} states mxfp4 for the experts", "mxfp4", None, {}, excluded, notes)


def _read_modelopt(stated: dict[str, Any], where: str) -> Quantization:
    stated = stated.get("quantization", stated)
    excluded, notes = _patterns(stated, ("exclude_modules", "ignore", "modules_to_not_convert"), where)
    table = stated.get("quantized_layers") or {}
    if not isinstance(table, dict):
        raise CheckpointError(f"{where}.quantized_layers is a {type(table).__name__}; an object was expected")
    formats = {
        _short(name): _algorithm(entry.get("quant_algo") if isinstance(entry, dict) else entry, where)
        for name, entry in table.items()
    }
    algorithm = stated.get("quant_algo")
    default = None if formats or algorithm == "MIXED_PRECISION" else _algorithm(algorithm, where)
    said = default or ("formats of " + f"{len(formats)} modules" if formats else "no format")
    return Quantization(f"{where} states {said}", default, default, formats, excluded, notes)


def _algorithm(algorithm: object, where: str) -> str:
    if not isinstance(algorithm, str) or algorithm not in _MODELOPT:
        raise CheckpointError(
            f"{where} has the unknown quant_algo {str(algorithm)[:40]!r}; known are {', '.join(_MODELOPT)}"
        )
    return _MODELOPT[algorithm]


def _read_compressed(stated: dict[str, Any], where: str) -> Quantization:
    groups = stated.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise CheckpointError(f"{where}.config_groups is {str(groups)[:40]!r}; an object of groups was expected")
    excluded, notes = _patterns(stated, ("ignore",), where)
    formats = {_group_format(group, f"{where}.config_groups.{name[:40]}") for name, group in groups.items()}
    if len(formats) > 1:
        return Quantization(f"{where} has groups of {len(formats)} formats, which are not read: they count as none")
    format = formats.pop()
    return Quantization(f"{where} states {format}", format, format, {}, excluded, notes)


def _group_format(group: object, where: str) -> str:
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        raise CheckpointError(f"{where} has no object weights")
    kind, bits, size = weights.get("type"), weights.get("num_bits"), weights.get("group_size")
    if (kind, bits) == ("float", 4):
        return "mxfp4" if size == 32 else "nvfp4"
    if (kind, bits) == ("float", 8):
        block = weights.get("block_structure")
        if isinstance(block, list) and len(block) == 2 and all(type(n) is int and 0 < n < 2**20 for n in block):
            return f"fp8_{block[0]}x{block[1]}"
        return "fp8"
    if (kind, bits) == ("int", 4) and type(size) is int and 0 < size < 2**20:
        return f"int4_{size}"
    raise CheckpointError(f"{where}.weights is {str(weights)[:80]}; floats of 4 or 8 bits or integers of 4 are read")


def _patterns(stated: dict[str, Any], keys: tuple[str, ...], where: str) -> tuple[tuple[re.Pattern, ...], tuple]:
    """(patterns of excluded modules, notes about those that are not tried)."""
    patterns, left_out = [], 0
    for key in keys:
        names = stated.get(key) or []
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise CheckpointError(f"{where}.{key} is {str(names)[:60]!r}; a list of module names was expected")
        for name in names[:_MOST_PATTERNS]:
            pattern = _pattern(name)
            left_out += pattern is None
            patterns += [pattern] if pattern else []
        left_out += max(0, len(names) - _MOST_PATTERNS)
    return _joined(patterns), ((f"{left_out:,} patterns of {where} were not tried",) if left_out else ())


def _pattern(name: str) -> str | None:
    """One excluded name, glob or `re:` expression as a regular expression; None for an expression we do not try."""
    if name.startswith("re:"):
        expression = name[3:]
        if len(expression) > _MOST_LETTERS or expression.count("(") > _MOST_GROUPS:
            return None
        if not _PLAIN_REGEX.fullmatch(expression) or not _HARMLESS_REGEX.fullmatch(expression):
            return None
        try:
            re.compile(expression)
        except re.error:
            return None
        return f"^(?:{expression})"
    if any(letter in name for letter in "*?["):
        tail = _short(name)
        if tail.count("*") > 4:
            return None
        return r"(?:^|\.)" + fnmatch.translate(tail).replace(r"\Z", "").replace(r"\z", "") + r"(?:$|\.)"
    return rf"(?:^|\.){re.escape(_short(name))}(?:$|\.)"


def _joined(patterns: list[str]) -> tuple[re.Pattern, ...]:
    """Plain names by the thousand are one expression; a few stay apart so that an error in one cannot hide others."""
    return tuple(
        re.compile("|".join(f"(?:{pattern})" for pattern in patterns[start : start + 500]))
        for start in range(0, len(patterns), 500)
    )


def _short(name: str) -> str:
    """A name from "layers." on: files and models differ in what stands before."""
    found = name.find("layers.")
    return name[found:] if found >= 0 else name.removeprefix("model.")


_HEAD = re.compile(r"^lm_head$")
_DIALECTS = {
    "fp8": _read_fp8,
    "mxfp4": _read_mxfp4,
    "modelopt": _read_modelopt,
    "modelopt_fp4": _read_modelopt,
    "compressed-tensors": _read_compressed,
}
