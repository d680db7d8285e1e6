"""Bytes per token, per expert and per part: of a checkpoint folder from its tensors, of a bare config by arithmetic."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemolab.checkpoint.config import ModelConfig
from nemolab.checkpoint.formats import matrix_bytes
from nemolab.errors import CheckpointError, UsageError
from nemolab.plan.geometry import kv_bytes_per_token, mamba_state_bytes, module_shapes
from nemolab.plan.precision import DEFAULT_EXPERTS_AS, module_bytes, read_precision, scalar_bytes
from nemolab.paths import shown
from nemolab.units import show_bytes

if TYPE_CHECKING:
    from nemolab.checkpoint import Checkpoint

PAGE_BYTES = 4096
ROUTED = "routed"
NOT_DENSE = (ROUTED, "mtp", "vision")


@dataclass(frozen=True)
class Plan:
    """What a model weighs and what one token reads of it.

    expert_bytes         one routed expert: packed values and block scales, unpadded, without scalars
    pages_per_expert     expert_bytes / 4096, fractional where experts are no whole pages
    bytes_per_token      moe_layers x top_k x expert_bytes: read per token where nothing is cached
    routed_bytes         moe_layers x experts x expert_bytes
    routed_scalar_bytes  the F32 scalars of all routed experts: in no part, since a store keeps the factors in a side table
    dense_bytes          all that is not routed, embeddings and scalars included, without MTP and vision
    dense_bytes_per_token  the same with one row of the embedding table in place of all (all of it where it is the head too)
    parts                bytes by part; `routed` is routed_bytes, the rest of them but mtp and vision add up to dense_bytes
    formats              {part: {format: bytes}}, which add up to parts
    mamba_state_bytes    state of one sequence, whatever its length; kv_bytes_per_token comes on top (BF16)
    """

    name: str
    source: str
    model_type: str
    layers: dict[str, int]
    moe_layers: int
    experts: int
    top_k: int
    expert_params: int
    expert_format: str
    expert_bytes: int
    pages_per_expert: float
    bytes_per_token: int
    routed_bytes: int
    routed_scalar_bytes: int
    dense_bytes: int
    dense_bytes_per_token: int
    parts: dict[str, int]
    formats: dict[str, dict[str, int]]
    mamba_state_bytes: int
    kv_bytes_per_token: int
    assumptions: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON types; whole numbers of pages as integers."""
        result = asdict(self) | {"assumptions": list(self.assumptions)}
        if self.pages_per_expert == int(self.pages_per_expert):
            result["pages_per_expert"] = int(self.pages_per_expert)
        return result

    def __str__(self) -> str:
        layers = ", ".join(f"{count} {kind}" for kind, count in self.layers.items() if count)
        lines = [
            f"{self.name} ({self.model_type}; {layers})",
            f"  one expert    {self.expert_bytes:,} bytes = {self.pages_per_expert:,.6g} pages"
            f" ({self.expert_params:,} parameters in {self.expert_format})",
            f"  one token     {self.moe_layers} layers x {self.top_k} of {self.experts} experts"
            f" = {self.bytes_per_token:,} bytes = {_show_traffic(self.bytes_per_token)}",
            f"  all experts   {self.routed_bytes:,} bytes = {show_bytes(self.routed_bytes)}",
            f"  all the rest  {self.dense_bytes:,} bytes = {show_bytes(self.dense_bytes)}"
            f"; a token reads {show_bytes(self.dense_bytes_per_token)} of it",
            f"  state         {self.mamba_state_bytes:,} bytes a sequence + {self.kv_bytes_per_token:,} bytes a token",
            "",
            *self._part_lines(),
        ]
        return "\n".join(lines + [f"note: {assumption}" for assumption in self.assumptions])

    def _part_lines(self) -> list[str]:
        rows = sorted(self.parts.items(), key=lambda item: -item[1])
        width = max(len(part) for part in self.parts)
        return [
            f"  {part:<{width}}  {show_bytes(size):>11}  "
            + ", ".join(f"{name} {show_bytes(count)}" for name, count in sorted(self.formats[part].items()))
            for part, size in rows
        ]


def plan(path: str | Path, experts_as: str | None = None) -> Plan:
    """Count a checkpoint folder or a bare config.json of the Nemotron-H family.

    experts_as  format of the routed experts of a bare config: nvfp4 (default), mxfp4, fp8, bf16. Of a folder the tensors
                decide, and the result says that the option was not used.

    Raises CheckpointError for a path that is neither, a config of another family, or experts that are not all of one form.
    """
    path = Path(path)
    if path.is_dir():
        return _plan_folder(path, experts_as)
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist; a checkpoint folder or a config.json was needed")
    if path.suffix != ".json":
        raise CheckpointError(f"{path} is no folder and no .json file; a checkpoint folder or a config.json was needed")
    return plan_config(ModelConfig.load(path), experts_as, where=str(path))


def _plan_folder(path: Path, experts_as: str | None) -> Plan:
    from nemolab.checkpoint import Checkpoint

    if (path / "experts.bin").exists() and (path / "manifest.json").exists():
        raise CheckpointError(f"{path} is a store; give the checkpoint it was made from, or {path / 'config.json'}")
    if (path / "config.json").is_file() and not any(path.glob("*.safetensors")):
        raise CheckpointError(
            f"{path} holds no *.safetensors, whose tensors would decide; to count from its config alone give"
            f" {path / 'config.json'}"
        )
    return plan_checkpoint(Checkpoint.open(path), experts_as)


def plan_checkpoint(checkpoint: Checkpoint, experts_as: str | None = None) -> Plan:
    """Count an open checkpoint by its tensors; as `plan`."""
    config = checkpoint.config
    formats: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    experts: dict[str, list] = defaultdict(list)  # "backbone.layers.1.mixer.experts.0" -> its matrices
    for module in checkpoint.modules.values():
        if module.part == ROUTED:
            experts[module.name.rpartition(".")[0]].append(module)
        else:
            formats[module.part][module.format] += module.nbytes
    form = _same_form({place: _expert_form(modules) for place, modules in experts.items()}, str(checkpoint.path))
    expected = len(config.moe_layers) * config.n_experts
    if len(experts) != expected:
        raise CheckpointError(f"{checkpoint.path}: {len(experts)} routed experts found, the config says {expected}")
    block_bytes = sum(size for _, _, size in form)
    scalars = sum(module.nbytes for modules in experts.values() for module in modules) - expected * block_bytes
    assumptions = list(checkpoint.notes)
    if experts_as:
        assumptions.append(f"experts_as {experts_as} was not used: the tensors of a folder decide")
    return _assemble(
        config,
        name=checkpoint.path.resolve().name,
        source=f"tensors of {shown(checkpoint.path)}",
        expert_form=form,
        routed_scalar_bytes=scalars,
        formats=formats,
        row_bytes=_row_bytes(checkpoint.modules.get("backbone.embeddings")),
        assumptions=assumptions,
    )


def plan_config(config: ModelConfig, experts_as: str | None = None, where: str = "config.json") -> Plan:
    """Count a bare config by arithmetic; as `plan`. `where` names it in errors and notes."""
    shapes = module_shapes(config)
    precision = read_precision(config.raw, shown(where))
    facts = config.raw.get("nemolab") if isinstance(config.raw.get("nemolab"), dict) else {}
    assumptions = [precision.origin]
    if unused := precision.unused(shapes):
        assumptions.append(f"{len(unused)} of its entries name no module of this model, such as {unused[0]}")
    if experts_as and experts_as not in ("nvfp4", "mxfp4", "fp8", "bf16"):
        raise UsageError(f"experts_as is {experts_as!r}; nvfp4, mxfp4, fp8 or bf16 was expected")
    formats: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    forms: dict[str, tuple] = {}
    scalars = 0
    stated: set[str | None] = set()
    for module in shapes:
        if module.part == ROUTED:
            said = precision.stated(module)
            stated.add(said)
            format = experts_as or said or DEFAULT_EXPERTS_AS
            layer = module.name.partition(".experts.")[0]
            one = (format, module.shape, module_bytes(module, format) // module.copies)
            forms[layer] = (*forms.get(layer, ()), one)
            scalars += scalar_bytes(module, format, precision)
        else:
            format = precision.format_of(module)
            formats[module.part][format] += module_bytes(module, format) + scalar_bytes(module, format, precision)
    form = _same_form(forms, where)
    assumptions.insert(0, _experts_sentence(experts_as, stated - {None}))
    if config.num_nextn_predict_layers:
        assumptions.append("the MTP block is counted once, as it is stored, and is in no sum but its own")
    return _assemble(
        config,
        name=str(facts.get("name") or _name_of(Path(where))),
        source=f"arithmetic from {shown(where)}",
        expert_form=form,
        routed_scalar_bytes=scalars,
        formats=formats,
        row_bytes=config.hidden_size * 2,
        assumptions=assumptions,
    )


def _name_of(config_file: Path) -> str:
    """Every vendor calls the file config.json; then the folder says whose it is."""
    return config_file.stem if config_file.stem != "config" else config_file.resolve().parent.name


def _show_traffic(count: int) -> str:
    return f"{count / 1e9:.3f} GB" if count >= 10**8 else f"{count / 1e6:.3f} MB"


def _experts_sentence(experts_as: str | None, stated: set[str]) -> str:
    said = "/".join(sorted(stated))
    if experts_as is None:
        if said:
            return f"routed experts are counted as {said}, which the config states"
        return f"routed experts are counted as {DEFAULT_EXPERTS_AS}, the default; experts_as changes it"
    against = f", not as the {said} the config states" if stated and stated != {experts_as} else ""
    return f"routed experts are counted as {experts_as}, as asked{against}"


def _expert_form(modules: list) -> tuple:
    """((format, shape, bytes without scalars), ...) of one expert's matrices, up before down."""
    return tuple(
        (module.format, tuple(module.shape), matrix_bytes(*module.shape, module.format))
        for module in sorted(modules, key=lambda module: module.name, reverse=True)
    )


def _same_form(forms: dict[str, tuple], where: str) -> tuple:
    """The one form all experts have. Raises CheckpointError naming two experts that differ, or that there are none."""
    if not forms:
        raise CheckpointError(f"{where} has no MoE layer: there are no routed experts to count")
    first, form = next(iter(forms.items()))
    for place, other in forms.items():
        if other != form:
            raise CheckpointError(
                f"{where}: routed experts are not all of one form: {first} is {_show_form(form)},"
                f" {place} is {_show_form(other)}; a store's blocks need one"
            )
    return form


def _show_form(form: tuple) -> str:
    return " + ".join(f"{format} {list(shape)}" for format, shape, _ in form)


def _row_bytes(embeddings) -> int:
    return embeddings.nbytes // embeddings.shape[0] if embeddings else 0


def _assemble(
    config: ModelConfig,
    *,
    name: str,
    source: str,
    expert_form: tuple,
    routed_scalar_bytes: int,
    formats: dict[str, dict[str, int]],
    row_bytes: int,
    assumptions: list[str],
) -> Plan:
    expert_bytes = sum(size for _, _, size in expert_form)
    moe_layers = len(config.moe_layers)
    routed: dict[str, int] = defaultdict(int)
    for format, _, size in expert_form:
        routed[format] += moe_layers * config.n_experts * size
    formats = {ROUTED: dict(routed), **{part: dict(by_format) for part, by_format in formats.items()}}
    parts = {part: sum(by_format.values()) for part, by_format in formats.items()}
    dense_bytes = sum(size for part, size in parts.items() if part not in NOT_DENSE)
    table_bytes = 0 if config.tie_word_embeddings else parts.get("embeddings", 0) - row_bytes
    return Plan(
        name=name,
        source=source,
        model_type=config.model_type,
        layers={kind: config.layer_types.count(kind) for kind in ("mamba", "moe", "attention", "mlp")},
        moe_layers=moe_layers,
        experts=config.n_experts,
        top_k=config.top_k,
        expert_params=sum(rows * columns for _, (rows, columns), _ in expert_form),
        expert_format="+".join(dict.fromkeys(format for format, _, _ in expert_form)),
        expert_bytes=expert_bytes,
        pages_per_expert=expert_bytes / PAGE_BYTES,
        bytes_per_token=moe_layers * config.top_k * expert_bytes,
        routed_bytes=moe_layers * config.n_experts * expert_bytes,
        routed_scalar_bytes=routed_scalar_bytes,
        dense_bytes=dense_bytes,
        dense_bytes_per_token=dense_bytes - table_bytes,
        parts=parts,
        formats=formats,
        mamba_state_bytes=mamba_state_bytes(config),
        kv_bytes_per_token=kv_bytes_per_token(config),
        assumptions=tuple(assumptions),
    )
