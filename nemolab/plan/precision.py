"""Which format each module of a bare config is counted in. A checkpoint folder never comes here: its tensors decide.

Three sources, the first that is there wins:
1. `nemolab.formats` in the config: the facts that ship with `data/configs/`, by kind of module and layer;
2. the vendor's own list: `quantization_config` in the config, or an hf_quant_config.json beside it;
3. nothing: every module as it would be unquantised, the routed experts in the format asked for.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemolab.checkpoint.config import ModelConfig
from nemolab.checkpoint.formats import FORMATS, matrix_bytes
from nemolab.checkpoint.modules import PLAIN_FORMATS
from nemolab.checkpoint.quant_metadata import PLAIN, QuantMetadata, containers, read_metadata
from nemolab.errors import CheckpointError
from nemolab.plan.geometry import ModuleShape
from nemolab.plan.weight_formats import NOT_QUANTISED, fits

F32_BYTES = 4
# Formats whose modules store a factor for the weight and, where inputs were calibrated, one for the input.
_WITH_SCALARS = ("nvfp4", "fp8")


@dataclass(frozen=True)
class Precision:
    """What one source says about the modules of one config.

    origin       a sentence: where the formats come from
    said         module name -> format, for the modules it says something about
    unused       entries that name no module: a misspelt kind, a layer of another type, another model's list
    weight_only  formats whose inputs were not calibrated: no input_scale is stored
    kv_scales    whether attention layers keep one F32 scale each for keys and values
    """

    origin: str
    said: dict[str, str] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    weight_only: frozenset[str] = frozenset()
    kv_scales: bool = False

    def format_of(self, module: ModuleShape) -> str:
        """The format this source says, or the module's unquantised one."""
        return self.said.get(module.name, module.dtype)

    def asked_or_said(self, module: ModuleShape, asked: str | None) -> str:
        """The format asked for, where it applies to a module and fits its rows; else `format_of`."""
        applies = asked and len(module.shape) == 2 and module.part not in (*NOT_QUANTISED, "mtp")
        return asked if applies and fits(module.shape[1], asked) else self.format_of(module)

    def scalar_bytes(self, module: ModuleShape, format: str) -> int:
        """Bytes of the F32 scalars beside a module in a format, all copies."""
        scalars = 0
        if format in _WITH_SCALARS:
            scalars = 1 if format in self.weight_only else 2
        if self.kv_scales and module.kind in ("k_proj", "v_proj"):
            scalars += 1
        return module.copies * scalars * F32_BYTES


def module_bytes(module: ModuleShape, format: str) -> int:
    """Bytes of a module's values and block scales in a format, all copies; biases in BF16; without scalars."""
    bias_bytes = 2 * module.shape[0] if module.biased else 0
    if len(module.shape) != 2:
        if format not in PLAIN_FORMATS.values():
            raise CheckpointError(
                f"{module.name} {list(module.shape)} is no matrix and cannot be counted as {format};"
                f" one of {', '.join(PLAIN_FORMATS.values())} was expected"
            )
        return matrix_bytes(1, module.params, format) + bias_bytes
    try:
        return module.copies * (matrix_bytes(*module.shape, format) + bias_bytes)
    except CheckpointError as error:
        raise CheckpointError(f"{module.name} {list(module.shape)}: {error}") from error


def read_precision(
    config: ModelConfig, modules: list[ModuleShape], where: str, folder: Path | None = None
) -> Precision:
    """The source for a config whose modules are `modules`. Raises CheckpointError naming the entry it cannot read.

    where   what the config is called in sentences and errors
    folder  where an hf_quant_config.json may lie beside it
    """
    facts = config.raw.get("nemolab")
    if isinstance(facts, dict) and "formats" in facts:
        return _from_facts(facts, modules, where)
    for source in read_metadata(folder, config):
        # A mixed precision without a list of layers says that something is quantised, not what.
        if source.table or source.default not in (None, PLAIN):
            return _from_list(source, modules, where)
    return Precision(
        origin=f"{where} lists no formats: everything but the routed experts is counted in BF16 (the router's"
        " correction bias in F32)"
    )


def _from_facts(facts: dict[str, Any], modules: list[ModuleShape], where: str) -> Precision:
    entries = dict(_read_facts(facts["formats"], f"{where}: nemolab.formats"))
    said: dict[str, str] = {}
    used = set()
    for module in modules:
        key = next((key for key in ((module.kind, module.layer), (module.kind, None)) if key in entries), None)
        if key:
            said[module.name] = entries[key]
            used.add(key)
    left = [
        kind if layer is None else f"{kind} of layer {layer}" for kind, layer in entries if (kind, layer) not in used
    ]
    weight_only = facts.get("weight_only", [])
    if not isinstance(weight_only, list) or not all(isinstance(format, str) for format in weight_only):
        raise CheckpointError(f"{where}: nemolab.weight_only is {str(weight_only)[:40]!r}; a list was expected")
    return Precision(
        origin=f"formats of every module are stated in {where}, section nemolab",
        said=said,
        unused=tuple(left),
        weight_only=frozenset(weight_only),
        kv_scales=facts.get("kv_cache_scales") is True,
    )


def _read_facts(formats: object, entry: str) -> Iterable[tuple[tuple[str, int | None], str]]:
    """((kind, layer or None for every layer), format) for each entry of `nemolab.formats`."""
    if not isinstance(formats, dict):
        raise CheckpointError(f"{entry} is a {type(formats).__name__}; an object was expected")
    for kind, stated in formats.items():
        if not isinstance(stated, str | dict):
            raise CheckpointError(f"{entry}.{kind}: a format, or an object of format: [layers] was expected")
        for format, layers in [(stated, [None])] if isinstance(stated, str) else stated.items():
            if format not in FORMATS:
                known = ", ".join(FORMATS)
                raise CheckpointError(f"{entry}.{kind} is {format[:40]!r}; one of {known} was expected")
            if not isinstance(layers, list) or not all(layer is None or type(layer) is int for layer in layers):
                raise CheckpointError(f"{entry}.{kind}.{format}: a list of layer numbers was expected")
            yield from (((kind, layer), format) for layer in layers)


def _from_list(source: QuantMetadata, modules: list[ModuleShape], where: str) -> Precision:
    _check_experts_alike(source)
    matrices = [module for module in modules if len(module.shape) == 2]
    said = {name: format for name, format in source.say(matrices).items() if format != PLAIN}
    known = {name for module in modules for name in containers(module.name)}
    unused = [name for name in source.table if _one_expert(name) not in known]
    return Precision(
        origin=f"formats are those that {source.where} lists ({where}); only the tensors could confirm them",
        said=said,
        unused=tuple(unused),
    )


def _check_experts_alike(source: QuantMetadata) -> None:
    """One expert of a layer stands for all in the counting, so a list must say the same of all."""
    first: dict[str, tuple[str, str]] = {}
    for name, format in source.table.items():
        other, expected = first.setdefault(_one_expert(name), (name, format))
        if format != expected:
            raise CheckpointError(
                f"{source.where}: experts differ, {other!r} is {expected}, {name!r} is {format}; blocks need one form"
            )


def _one_expert(name: str) -> str:
    return re.sub(r"\.experts\.\d+", ".experts.0", name)
