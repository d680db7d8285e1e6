"""Quantisation metadata, in both forms exporters write: read to cross-check the tensors, never to decide a format.

config.json may hold a flat `quantization_config`, hf_quant_config.json a nested `quantization`; a checkpoint may have
either, both or neither. What they say about a module is compared with what its tensors are, and with each other.
"""

import fnmatch
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

from nemolab.checkpoint.config import CONFIG_FILE, NESTED_KEYS, ModelConfig
from nemolab.checkpoint.formats import GROUP
from nemolab.checkpoint.json_files import read_json
from nemolab.checkpoint.modules import QUANTISED_FORMATS, Module
from nemolab.checkpoint.names import PREFIXES, canonical_name
from nemolab.checkpoint.structure import LEFT_OUT_PARTS
from nemolab.errors import CheckpointError

HF_QUANT_FILE = "hf_quant_config.json"
PLAIN = "not quantised"

_ALGORITHMS = {"NVFP4": "nvfp4", "W4A16_NVFP4": "nvfp4", "FP8": "fp8"}
_MIXED = "MIXED_PRECISION"
# Modules that exporters quantise "by default" are linear layers; these parts are not, though they have matrices.
_NOT_LINEAR = ("embeddings", "router", "norm", "vision")
# A stranger's list of thousands of globs, tried on 40,000 modules, would take minutes: about 5 s of matching at most.
_MOST_MATCHES = 4_000_000
_LISTED_LAYERS = 12


@dataclass(frozen=True)
class QuantMetadata:
    """What one source says. `default` is the format of linear modules it does not name, None when it does not say.

    table     module or container (canonical name) -> "nvfp4" or "fp8"
    excluded  canonical names and globs that are not quantised
    """

    where: str
    default: str | None
    table: Mapping[str, str] = field(default_factory=dict)
    excluded: tuple[str, ...] = ()
    origin: str = ""  # the object it was read from, which may hold two sources: a table, and groups that sum it up

    @property
    def globs(self) -> list[str]:
        """The names with wildcards, of the table and of what is excluded."""
        return [name for name in {**self.table, **dict.fromkeys(self.excluded)} if _is_glob(name)]

    def say(self, modules: Iterable[Module]) -> dict[str, str]:
        """Module name -> "nvfp4", "fp8" or PLAIN, for the modules this source says something about."""
        modules, excluded = list(modules), set(self.excluded)
        globs = self.globs[: _MOST_MATCHES // max(1, len(modules))]
        matchers = [(re.compile(fnmatch.translate(glob)).match, self.table.get(glob, PLAIN)) for glob in globs]
        said = {}
        for module in modules:
            names = containers(module.name)
            verdict = next((self.table[name] for name in names if name in self.table), None)
            if verdict is None and any(name in excluded for name in names):
                verdict = PLAIN
            if verdict is None and matchers:
                verdict = next((format for match, format in matchers if match(module.name)), None)
            if verdict is None and self.default is not None and _is_linear(module):
                verdict = self.default
            if verdict is not None:
                said[module.name] = verdict
        return said


def read_metadata(folder: Path | None, config: ModelConfig) -> list[QuantMetadata]:
    """Every source of metadata of a checkpoint. Raises CheckpointError for foreign or unknown algorithms.

    folder  where hf_quant_config.json may lie; None for a config without a folder
    """
    sources = []
    raw = config.raw
    for path, part in [("", raw)] + [(f"{key}: ", raw[key]) for key in NESTED_KEYS if isinstance(raw.get(key), dict)]:
        if part.get("quantization_config") is not None:
            sources += _parse(part["quantization_config"], f"{CONFIG_FILE}: {path}quantization_config")
    if folder and os.path.lexists(folder / HF_QUANT_FILE):
        parsed = read_json(folder / HF_QUANT_FILE)
        sources += _parse(parsed, HF_QUANT_FILE)
    return sources


def cross_check_metadata(sources: list[QuantMetadata], modules: Mapping[str, Module]) -> list[str]:
    """Readable lines about where metadata and tensors disagree. The tensors decide.

    Raises CheckpointError where two sources contradict each other about a module that is run: one of them belongs to
    another checkpoint, and nothing tells which else of the folder does.
    """
    matrices = [module for module in modules.values() if len(module.shape) == 2]
    found = {module.name: module.format if module.format in QUANTISED_FORMATS else PLAIN for module in matrices}
    if not sources and any(format != PLAIN for format in found.values()):
        return [
            f"no quantisation metadata: neither {HF_QUANT_FILE} nor quantization_config in {CONFIG_FILE};"
            " formats were taken from the tensors"
        ]
    said = [source.say(matrices) for source in sources]
    notes = []
    for source, verdicts in zip(sources, said, strict=True):
        differ = [(name, verdict, found[name]) for name, verdict in verdicts.items() if verdict != found[name]]
        notes += _gather(differ, f"{source.where} says {{kind}} is {{a}}, the tensors are {{b}}{{layers}}")
        notes += _note_absent(source, modules) + _note_cut_short(source, len(matrices))
    for (first, a), (second, b) in combinations(zip(sources, said, strict=True), 2):
        differ = [name for name in a if name in b and a[name] != b[name]]
        run = [name for name in differ if modules[name].part not in LEFT_OUT_PARTS]
        # What was cut short, or is one source's summary of itself (config_groups), proves no contradiction.
        if run and first.origin != second.origin and not any(_is_cut_short(s, len(matrices)) for s in (first, second)):
            raise CheckpointError(_say_contradiction(first, a, second, b, run, modules))
        lines = [(name, a[name], b[name]) for name in differ]
        notes += _gather(lines, f"{first.where} says {{kind}} is {{a}}, {second.where} says {{b}}{{layers}}")
    return notes


def containers(name: str) -> list[str]:
    """A module's name and those of what it lies in, innermost first: tables may name "...mixer.experts"."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]


def _parse(given: object, where: str) -> list[QuantMetadata]:
    """One or two sources from one object: its table of layers, and the config groups beside it."""
    if isinstance(given, dict) and "quantization" in given:
        given, nested = given["quantization"], f"{where}: quantization"
    else:
        nested = where
    if not isinstance(given, dict):
        found = "null" if given is None else f"a {type(given).__name__}"
        raise CheckpointError(f"{nested} is {found}; an object was expected")
    method = given.get("quant_method")
    if method not in (None, "modelopt"):
        raise CheckpointError(f"{where}: quant_method {str(method)[:40]!r}: only ModelOpt's NVFP4 and FP8 are read")
    excluded = tuple(_names(given.get("exclude_modules"), where) + _names(given.get("ignore"), where))
    table = _parse_table(given.get("quantized_layers"), where)
    algorithm = given.get("quant_algo")
    if algorithm not in ("FP8", None):
        _check_group_size(given.get("group_size"), where)
    groups_default, groups = _parse_groups(given.get("config_groups"), where)
    sources = []
    if algorithm is not None and algorithm != _MIXED:
        sources.append(QuantMetadata(where, _format_of(algorithm, where), table, excluded, where))
    elif table:
        sources.append(QuantMetadata(where, PLAIN, table, excluded, where))
    elif excluded or (algorithm == _MIXED and not groups):
        sources.append(QuantMetadata(where, None, {}, excluded, where))
    if groups or groups_default:
        # Targets that are patterns name modules nobody listed: then this says nothing about those it does not name.
        default = groups_default or (None if any(name.startswith("re:") for name in groups) else PLAIN)
        sources.append(QuantMetadata(f"{where}: config_groups", default, groups, excluded, where))
    return sources


def _parse_table(table: object, where: str) -> dict[str, str]:
    if table is None:
        return {}
    if not isinstance(table, dict):
        raise CheckpointError(f"{where}: quantized_layers is a {type(table).__name__}; an object was expected")
    parsed = {}
    for name, entry in table.items():
        algorithm = entry.get("quant_algo") if isinstance(entry, dict) else entry
        place = f"{where}: {name[:120]}"
        format = _format_of(algorithm, place)
        if isinstance(entry, dict) and format == "nvfp4":
            _check_group_size(entry.get("group_size"), place)
        parsed[_canonical(name)] = format
    return parsed


def _parse_groups(groups: object, where: str) -> tuple[str | None, dict[str, str]]:
    """(format of all linear modules or None, module -> format) from config_groups."""
    default, parsed = None, {}
    if groups is not None and not isinstance(groups, dict):
        raise CheckpointError(f"{where}: config_groups is a {type(groups).__name__}; an object was expected")
    for name, group in (groups or {}).items():
        weights = group.get("weights") if isinstance(group, dict) else None
        kind = (weights.get("type"), weights.get("num_bits")) if isinstance(weights, dict) else None
        format = {("float", 4): "nvfp4", ("float", 8): "fp8"}.get(kind)
        if format is None:
            raise CheckpointError(
                f"{where}: {name[:40]} of config_groups has weights {str(weights)[:80]!r}; float of 4 or 8 bits is read"
            )
        if format == "nvfp4":
            _check_group_size(weights.get("group_size"), f"{where}: {name[:40]} of config_groups")
        for target in _names(group.get("targets"), where):
            if target == "Linear":
                default = format
            else:
                parsed[target] = format
    return default, parsed


def _format_of(algorithm: object, where: str) -> str:
    if not isinstance(algorithm, str) or algorithm not in _ALGORITHMS:
        raise CheckpointError(
            f"{where} has the unknown quant_algo {str(algorithm)[:40]!r}; known are {', '.join(_ALGORITHMS)}, {_MIXED}"
        )
    return _ALGORITHMS[algorithm]


def _check_group_size(size: object, where: str) -> None:
    if size is not None and size != GROUP:
        raise CheckpointError(f"{where}: group_size is {str(size)[:40]}; NVFP4 has groups of {GROUP}")


def _names(given: object, where: str) -> list[str]:
    if given is None:
        return []
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
        raise CheckpointError(f"{where}: {str(given)[:80]} was found; a list of module names was expected")
    return [_canonical(name) for name in given]


def _canonical(name: str) -> str:
    prefix = next((prefix for prefix in PREFIXES if name.startswith((prefix, PREFIXES[prefix] + "lm_head"))), None)
    if prefix is None:
        return re.sub(r"^(model\.)?language_model\.(?=mtp)", "", name)
    return canonical_name(name, prefix) if name.startswith(prefix) else name.removeprefix(PREFIXES[prefix])


def _is_glob(name: str) -> bool:
    return any(letter in name for letter in "*?[")


def _is_linear(module: Module) -> bool:
    return module.part not in _NOT_LINEAR


def _note_absent(source: QuantMetadata, modules: Mapping[str, Module]) -> list[str]:
    """Table entries that belong to nothing stored: a table of another model, or a module that got lost."""
    known = {container for name in modules for container in containers(name)}
    absent = [name for name in source.table if name not in known and not _is_glob(name)]
    if not absent:
        return []
    return [f"{source.where} lists {len(absent):,} modules that are not stored, such as {absent[0][:120]}"]


def _say_contradiction(
    first: QuantMetadata,
    a: Mapping[str, str],
    second: QuantMetadata,
    b: Mapping[str, str],
    names: list[str],
    modules: Mapping[str, Module],
) -> str:
    name = names[0]
    weight = modules[name].tensors["weight"]
    more = f" (and {len(names) - 1:,} more modules)" if len(names) > 1 else ""
    return (
        f"{first.where} says {name} is {a[name]}, {second.where} says it is {b[name]}{more}; its tensors in"
        f" {weight.shard} are {modules[name].format}: two sources that agree were expected, correct or remove the one"
        " that does not belong to this checkpoint"
    )


def _is_cut_short(source: QuantMetadata, n_modules: int) -> bool:
    return len(source.globs) > _MOST_MATCHES // max(1, n_modules)


def _note_cut_short(source: QuantMetadata, n_modules: int) -> list[str]:
    if not _is_cut_short(source, n_modules):
        return []
    compared = _MOST_MATCHES // max(1, n_modules)
    return [f"{source.where}: only the first {compared:,} of {len(source.globs):,} globs were compared"]


def _gather(differ: list[tuple[str, str, str]], line: str) -> list[str]:
    """One line for every kind of module and pair of formats, with its layers; not one for each of 40,000 experts."""
    gathered: dict[tuple[str, str, str], list[str]] = {}
    for name, a, b in differ:
        kind = re.sub(r"\b(layers|experts)\.\d+\.", r"\1.*.", name)
        layer = re.search(r"layers\.(\d+)\.", name)
        gathered.setdefault((kind, a, b), []).append(layer[1] if layer else "")
    notes = []
    for (kind, a, b), layers in gathered.items():
        distinct = list(dict.fromkeys(layer for layer in layers if layer))
        shown = ", ".join(distinct[:_LISTED_LAYERS]) + (" ..." if len(distinct) > _LISTED_LAYERS else "")
        modules = f"{len(layers):,} modules, " if len(layers) > len(distinct) > 0 else ""
        label = "layer" if len(distinct) == 1 else "layers"
        notes.append(line.format(kind=kind, a=a, b=b, layers=f" ({modules}{label} {shown})" if distinct else ""))
    return notes
