"""Which format each module of a bare config is counted in. A checkpoint folder never comes here: its tensors decide.

Three sources, the first that is there wins:
1. `nemolab.formats` in the config: the facts that ship with `data/configs/`, by kind of module and layer;
2. `quantization_config`, the vendor's own table in a config.json (ModelOpt's mixed or uniform form);
3. nothing: every module as it would be unquantised, the routed experts in the format asked for.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from nemolab.checkpoint.formats import EXPERT_FORMATS, matrix_bytes
from nemolab.errors import CheckpointError

if TYPE_CHECKING:
    from nemolab.plan.geometry import ModuleShape

DEFAULT_EXPERTS_AS = "nvfp4"
F32_BYTES = 4

# ModelOpt's names. W4A16 differs from NVFP4 only in having no scale for its inputs.
_ALGORITHMS = {"NVFP4": "nvfp4", "W4A16_NVFP4": "nvfp4", "FP8": "fp8"}
# Each quantised module's scalars in F32: the weight's factor and, where inputs were calibrated, theirs.
_WEIGHT_SCALARS = {"nvfp4": 1, "fp8": 1}


@dataclass(frozen=True)
class Precision:
    """Formats by module, and a sentence on where they come from.

    exact        module name or container -> format
    by_kind      (kind, layer or None for every layer) -> format
    uniform      format of every linear module that `ignored` (globs or name prefixes) does not name, or None
    weight_only  formats or module names whose inputs were not calibrated: no input_scale is stored
    kv_scales    whether attention layers keep one F32 scale each for keys and values
    """

    origin: str
    exact: dict[str, str] = field(default_factory=dict)
    by_kind: dict[tuple[str, int | None], str] = field(default_factory=dict)
    uniform: str | None = None
    ignored: tuple[str, ...] = ()
    weight_only: frozenset[str] = frozenset()
    kv_scales: bool = False

    def format_of(self, module: ModuleShape) -> str:
        """The format this source says, or the module's unquantised one."""
        return self.stated(module) or module.dtype

    def stated(self, module: ModuleShape) -> str | None:
        """The format this source says for a module, None where it is silent."""
        if not module.linear:
            # A router's or an embedding's dtype may be a stated fact; no quantiser's list reaches them.
            return self.by_kind.get((module.kind, None))
        for name in _containers(module.name):
            if name in self.exact:
                return self.exact[name]
        for layer in (module.layer, None):
            if (module.kind, layer) in self.by_kind:
                return self.by_kind[module.kind, layer]
        return self.uniform if self.uniform and not self._ignores(module.name) else None

    def _ignores(self, name: str) -> bool:
        return any(fnmatchcase(part, pattern) for part in _containers(name) for pattern in self.ignored)

    def unused(self, modules: list[ModuleShape]) -> list[str]:
        """Entries that name no module: a misspelt kind, a layer of another type, another model's table."""
        kinds = {(m.kind, layer) for m in modules for layer in (m.layer, None)}
        names = {name for module in modules for name in _containers(_one_expert(module.name))}
        left = [kind if layer is None else f"{kind} of layer {layer}" for kind, layer in self.by_kind]
        left = [text for text, key in zip(left, self.by_kind, strict=True) if key not in kinds]
        return left + [name for name in self.exact if _one_expert(name) not in names]

    def has_input_scale(self, module: ModuleShape, format: str) -> bool:
        return self.weight_only.isdisjoint((format, *_containers(module.name)))


def read_precision(raw: dict[str, Any], where: str) -> Precision:
    """The source for a config. Raises CheckpointError that names the entry it cannot read."""
    facts = raw.get("nemolab")
    if isinstance(facts, dict) and "formats" in facts:
        return _from_facts(facts, where)
    table = raw.get("quantization_config")
    if isinstance(table, dict) and (table.get("quantized_layers") or table.get("quant_algo")):
        return _from_table(table, where)
    return Precision(
        origin=f"{where} lists no formats: everything but the routed experts is counted in BF16 (the router's"
        " correction bias in F32)"
    )


def module_bytes(module: ModuleShape, format: str) -> int:
    """Bytes of a module's values and block scales in a format, all copies; biases in BF16; without scalars."""
    bias_bytes = 2 * module.shape[0] if module.biased else 0
    if not module.linear:
        sizes = {"bf16": 2, "f16": 2, "f32": 4}
        if format not in sizes:
            raise CheckpointError(f"{module.name} is no linear module and cannot be counted as {format!r}")
        return module.params * sizes[format] + bias_bytes
    try:
        return module.copies * (matrix_bytes(*module.shape, format) + bias_bytes)
    except CheckpointError as error:
        raise CheckpointError(f"{module.name} {list(module.shape)}: {error}") from error


def scalar_bytes(module: ModuleShape, format: str, precision: Precision) -> int:
    """Bytes of the F32 scalars beside a module in a format, all copies."""
    scalars = _WEIGHT_SCALARS.get(format, 0)
    if scalars and precision.has_input_scale(module, format):
        scalars += 1
    if precision.kv_scales and module.part == "attention" and module.kind in ("k_proj", "v_proj"):
        scalars += 1
    return module.copies * scalars * F32_BYTES


def check_format(format: str, where: str) -> str:
    if format not in EXPERT_FORMATS:
        raise CheckpointError(f"{where} is {str(format)[:40]!r}; one of {', '.join(EXPERT_FORMATS)} was expected")
    return format


def _containers(name: str) -> list[str]:
    """A module's name and those of everything it lies in, innermost first."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]


def _one_expert(name: str) -> str:
    return re.sub(r"\.experts\.\d+", ".experts.0", name)


def _from_facts(facts: dict[str, Any], where: str) -> Precision:
    by_kind: dict[tuple[str, int | None], str] = {}
    formats = facts["formats"]
    if not isinstance(formats, dict):
        raise CheckpointError(f"{where}: nemolab.formats is a {type(formats).__name__}; an object was expected")
    for kind, said in formats.items():
        entry = f"{where}: nemolab.formats.{kind}"
        if isinstance(said, str):
            by_kind[kind, None] = check_format(said, entry)
            continue
        if not isinstance(said, dict):
            raise CheckpointError(f"{entry}: a format, or an object of format: [layers] was expected")
        for format, layers in said.items():
            if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
                raise CheckpointError(f"{entry}.{format}: a list of layer numbers was expected")
            by_kind |= {(kind, layer): check_format(format, entry) for layer in layers}
    return Precision(
        origin=f"formats of every module are stated in {where}, section nemolab",
        by_kind=by_kind,
        weight_only=frozenset(map(str, facts.get("weight_only") or ())),
        kv_scales=facts.get("kv_cache_scales") is True,
    )


def _from_table(table: dict[str, Any], where: str) -> Precision:
    entry = f"{where}: quantization_config"
    listed = table.get("quantized_layers") or {}
    if not isinstance(listed, dict):
        raise CheckpointError(f"{entry}.quantized_layers is a {type(listed).__name__}; an object was expected")
    exact, weight_only = {}, set()
    for listed_name, said in listed.items():
        algorithm = said.get("quant_algo") if isinstance(said, dict) else said
        name = _canonical(listed_name)
        exact[name] = _algorithm(algorithm, f"{entry}.quantized_layers[{listed_name!r}]")
        if exact.setdefault(_one_expert(name), exact[name]) != exact[name]:
            raise CheckpointError(
                f"{entry}.quantized_layers: experts differ, {listed_name!r} is {exact[name]},"
                f" {_one_expert(name)!r} is {exact[_one_expert(name)]}; blocks need one form"
            )
        if algorithm == "W4A16_NVFP4":
            weight_only.add(name)
    uniform, ignored = None, ()
    algorithm = table.get("quant_algo")
    if not exact and algorithm not in (None, "MIXED_PRECISION"):
        uniform = _algorithm(algorithm, f"{entry}.quant_algo")
        ignored = tuple(map(str, table.get("ignore") or table.get("exclude_modules") or ()))
    return Precision(
        origin=f"formats are those that {where} lists in quantization_config; only the tensors could confirm them",
        exact=exact,
        uniform=uniform,
        ignored=tuple(map(_canonical, ignored)),
        weight_only=frozenset(weight_only),
    )


def _canonical(name: str) -> str:
    """A listed name or glob in the vendor's 3-Super spelling."""
    name = name.removeprefix("model.language_model.").removeprefix("language_model.")
    return f"backbone.{name.removeprefix('model.')}" if name.startswith("model.") else name


def _algorithm(algorithm: object, entry: str) -> str:
    if not isinstance(algorithm, str) or algorithm not in _ALGORITHMS:
        raise CheckpointError(f"{entry} is {str(algorithm)[:40]!r}; known are {', '.join(_ALGORITHMS)}")
    return _ALGORITHMS[algorithm]
