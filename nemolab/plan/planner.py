"""Bytes per token, per expert and per part: of a checkpoint folder from its tensors, of a bare config by arithmetic."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemolab.checkpoint.config import NESTED_KEYS, ModelConfig
from nemolab.checkpoint.formats import matrix_bytes
from nemolab.checkpoint.structure import EMBEDDINGS, LEFT_OUT_PARTS
from nemolab.errors import CheckpointError, UsageError
from nemolab.paths import shown
from nemolab.plan.geometry import kind_of, kv_bytes_per_token, mamba_state_bytes, module_shapes
from nemolab.plan.precision import EXPERTS_AS, module_bytes, read_precision
from nemolab.units import PAGE_BYTES, show_bytes

if TYPE_CHECKING:
    import pandas as pd

    from nemolab.checkpoint import Checkpoint

ROUTED = "routed"
NOT_DENSE = (ROUTED, *LEFT_OUT_PARTS)


@dataclass(frozen=True)
class Share:
    """Bytes of all modules of one kind in one format; a quantised module's scalars are in them."""

    part: str
    module: str
    format: str
    bytes: int


@dataclass(frozen=True)
class Plan:
    """What a model weighs and what one token reads of it.

    layers                 kind of layer -> how many
    experts, top_k         routed experts in each MoE layer, and how many of them a token uses
    expert_params          weights of one routed expert
    experts_as             the format its matrices are counted in ("nvfp4"; "nvfp4+fp8" where they differ)
    expert_bytes           one routed expert: packed values and block scales, unpadded, without scalars
    pages_per_expert       expert_bytes / PAGE_BYTES, fractional where experts are no whole pages
    bytes_per_token        moe_layers x top_k x expert_bytes: read per token where nothing is cached
    routed_bytes           moe_layers x experts x expert_bytes
    routed_scalar_bytes    the F32 scalars of all routed experts: in no part, as a store keeps them in a side table
    dense_bytes            all that is not routed, embeddings and scalars included, without MTP and vision
    dense_bytes_per_token  of that, what a token reads: one row of the embedding table, unless the table is the head too
    parts                  bytes by part; routed is routed_bytes, the others but mtp and vision make up dense_bytes
    split                  the same, finer: bytes by part, kind of module and format
    mamba_state_bytes      state of one sequence, whatever its length; kv_bytes_per_token comes on top (BF16)
    assumptions            how the formats were known, and what of the input was left aside or contradicts itself
    """

    name: str
    source: str
    model_type: str
    layers: dict[str, int]
    moe_layers: int
    experts: int
    top_k: int
    expert_params: int
    experts_as: str
    expert_bytes: int
    pages_per_expert: float
    bytes_per_token: int
    routed_bytes: int
    routed_scalar_bytes: int
    dense_bytes: int
    dense_bytes_per_token: int
    parts: dict[str, int]
    split: tuple[Share, ...]
    mamba_state_bytes: int
    kv_bytes_per_token: int
    assumptions: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON types; whole numbers of pages as integers."""
        result = asdict(self) | {"assumptions": list(self.assumptions), "split": [asdict(s) for s in self.split]}
        if self.pages_per_expert == int(self.pages_per_expert):
            result["pages_per_expert"] = int(self.pages_per_expert)
        return result

    def frame(self) -> pd.DataFrame:
        """The split as a DataFrame [part, module, format, bytes, gib], largest first."""
        import pandas as pd

        frame = pd.DataFrame([asdict(share) for share in self.split])
        frame["gib"] = frame["bytes"] / 2**30
        return frame.sort_values("bytes", ascending=False, kind="stable", ignore_index=True)

    def __str__(self) -> str:
        layers = ", ".join(f"{count} {kind}" for kind, count in self.layers.items() if count)
        lines = [
            f"{self.name} ({self.model_type}; {layers})",
            f"  one expert    {self.expert_bytes:,} bytes = {self.pages_per_expert:,.6g} pages"
            f" ({self.expert_params:,} parameters in {self.experts_as})",
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
        width = max(len(part) for part in self.parts)
        lines = []
        for part, size in sorted(self.parts.items(), key=lambda item: -item[1]):
            by_format: Counter[str] = Counter()
            for share in self.split:
                if share.part == part:
                    by_format[share.format] += share.bytes
            of = ", ".join(f"{format} {show_bytes(count)}" for format, count in by_format.most_common())
            lines.append(f"  {part:<{width}}  {show_bytes(size):>11}  {of}")
        return lines


def plan(path: str | Path, experts_as: str | None = None) -> Plan:
    """Count a checkpoint folder or a bare config.json of the Nemotron-H family.

    experts_as  format of the routed experts of a bare config, one of EXPERTS_AS; default: what the config states, else
                nvfp4. The tensors of a folder decide for themselves, and the result says that the option was not used.

    Raises CheckpointError for a path that is neither, a config of another family, experts that are not of one form.
    """
    path = Path(path)
    if path.is_dir():
        return _plan_folder(path, experts_as)
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist; a checkpoint folder or a config.json was needed")
    if path.suffix != ".json":
        raise CheckpointError(f"{path} is no folder and no .json file; a checkpoint folder or a config.json was needed")
    return plan_config(ModelConfig.load(path), experts_as, where=str(path), folder=path.parent)


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
    split: Counter[tuple[str, str, str]] = Counter()
    experts: dict[str, list] = defaultdict(list)  # "backbone.layers.1.mixer.experts.0" -> its matrices
    for module in checkpoint.modules.values():
        if module.part == ROUTED:
            experts[module.name.rpartition(".")[0]].append(module)
        else:
            split[module.part, kind_of(module.name, module.part), module.format] += module.nbytes
    form = _same_form({place: _expert_form(modules) for place, modules in experts.items()}, str(checkpoint.path))
    expected = len(config.moe_layers) * config.n_experts
    if len(experts) != expected:
        raise CheckpointError(f"{checkpoint.path}: {len(experts)} routed experts found, the config says {expected}")
    block_bytes = sum(size for _, _, size in form)
    scalars = sum(module.nbytes for modules in experts.values() for module in modules) - expected * block_bytes
    embeddings = checkpoint.modules[EMBEDDINGS]
    assumptions = list(checkpoint.notes)
    if experts_as:
        assumptions.append(f"experts_as {experts_as} was not used: the tensors of a folder decide")
    return _assemble(
        config,
        name=checkpoint.path.resolve().name,
        source=f"tensors of {shown(checkpoint.path)}",
        expert_form=form,
        routed_scalar_bytes=scalars,
        split=split,
        row_bytes=embeddings.nbytes // embeddings.shape[0],
        assumptions=assumptions,
    )


def plan_config(
    config: ModelConfig, experts_as: str | None = None, where: str = "config.json", folder: Path | None = None
) -> Plan:
    """Count a bare config by arithmetic; as `plan`.

    where   names it in errors and notes
    folder  where the vendor's hf_quant_config.json may lie beside it, to say in what formats the rest is stored
    """
    shapes = module_shapes(config)
    precision = read_precision(config, shapes, shown(where), folder)
    facts = config.raw.get("nemolab") if isinstance(config.raw.get("nemolab"), dict) else {}
    assumptions = [precision.origin, *config.notes]
    if unused := precision.unused:
        assumptions.append(f"{len(unused)} of its entries name no module of this model, such as {unused[0]}")
    if experts_as and experts_as not in EXPERTS_AS:
        raise UsageError(f"experts_as is {experts_as!r}; one of {', '.join(EXPERTS_AS)} was expected")
    split: Counter[tuple[str, str, str]] = Counter()
    forms: dict[str, tuple] = {}
    scalars = 0
    stated: set[str | None] = set()
    for module in shapes:
        if module.part == ROUTED:
            said = precision.said.get(module.name)
            stated.add(said)
            format = experts_as or said or EXPERTS_AS[0]
            layer = module.name.partition(".experts.")[0]
            one = (format, module.shape, module_bytes(module, format) // module.copies)
            forms[layer] = (*forms.get(layer, ()), one)
            scalars += precision.scalar_bytes(module, format)
        else:
            format = precision.format_of(module)
            size = module_bytes(module, format) + precision.scalar_bytes(module, format)
            split[module.part, module.kind, format] += size
    form = _same_form(forms, where)
    assumptions.insert(0, _experts_sentence(experts_as, stated - {None}))
    if config.num_nextn_predict_layers:
        assumptions.append("the MTP block is counted once, as it is stored, and is in no sum but its own")
    if any(isinstance(config.raw.get(key), dict) for key in (*NESTED_KEYS, "vision_config")):
        assumptions.append("only the language model is counted: its config does not describe a vision tower")
    return _assemble(
        config,
        name=str(facts.get("name") or _name_of(Path(where))),
        source=f"arithmetic from {shown(where)}",
        expert_form=form,
        routed_scalar_bytes=scalars,
        split=split,
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
        return f"routed experts are counted as {EXPERTS_AS[0]}, the default; experts_as changes it"
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


def _assemble(
    config: ModelConfig,
    *,
    name: str,
    source: str,
    expert_form: tuple,
    routed_scalar_bytes: int,
    split: Counter[tuple[str, str, str]],
    row_bytes: int,
    assumptions: list[str],
) -> Plan:
    expert_bytes = sum(size for _, _, size in expert_form)
    moe_layers = len(config.moe_layers)
    routed: Counter[tuple[str, str, str]] = Counter()
    for format, _, size in expert_form:
        routed[ROUTED, "experts", format] += moe_layers * config.n_experts * size
    shares = tuple(Share(*key, size) for key, size in (routed + split).items())
    parts: Counter[str] = Counter()
    for share in shares:
        parts[share.part] += share.bytes
    dense_bytes = sum(size for part, size in parts.items() if part not in NOT_DENSE)
    # Without a head of its own the model reads the whole table again for the logits.
    table_bytes = parts["embeddings"] - row_bytes if "head" in parts else 0
    return Plan(
        name=name,
        source=source,
        model_type=config.model_type,
        layers={kind: config.layer_types.count(kind) for kind in ("mamba", "moe", "attention", "mlp")},
        moe_layers=moe_layers,
        experts=config.n_experts,
        top_k=config.top_k,
        expert_params=sum(rows * columns for _, (rows, columns), _ in expert_form),
        experts_as="+".join(dict.fromkeys(format for format, _, _ in expert_form)),
        expert_bytes=expert_bytes,
        pages_per_expert=expert_bytes / PAGE_BYTES,
        bytes_per_token=moe_layers * config.top_k * expert_bytes,
        routed_bytes=moe_layers * config.n_experts * expert_bytes,
        routed_scalar_bytes=routed_scalar_bytes,
        dense_bytes=dense_bytes,
        dense_bytes_per_token=dense_bytes - table_bytes,
        parts=dict(parts),
        split=shares,
        mamba_state_bytes=mamba_state_bytes(config),
        kv_bytes_per_token=kv_bytes_per_token(config),
        assumptions=tuple(assumptions),
    )
