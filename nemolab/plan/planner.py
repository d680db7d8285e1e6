"""Bytes per token, per expert and per part: of a checkpoint folder from its tensors, of a bare config by arithmetic."""

from __future__ import annotations

from collections import Counter, defaultdict
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from nemolab.checkpoint.config import CONFIG_FILE, NESTED_KEYS, ModelConfig
from nemolab.checkpoint.formats import matrix_bytes
from nemolab.checkpoint.json_files import read_json
from nemolab.checkpoint.names import kind_of
from nemolab.checkpoint.quant_metadata import HF_QUANT_FILE
from nemolab.checkpoint.structure import EMBEDDINGS
from nemolab.errors import CheckpointError
from nemolab.paths import shown
from nemolab.plan.geometry import kv_bytes_per_token, mamba_state_bytes, module_shapes
from nemolab.plan.precision import module_bytes, read_precision
from nemolab.plan.result import ROUTED, ExpertGroup, Plan, ReadOfEmbeddings, assemble
from nemolab.plan.weight_formats import DEFAULT_EXPERTS, PUBLISHED, check_asked

if TYPE_CHECKING:
    from nemolab.checkpoint import Checkpoint


def plan(path: str | Path, experts_as: str | None = None, dense_as: str | None = None) -> Plan:
    """Count a checkpoint folder of the Nemotron-H family, or a bare config.json of any family transformers knows.

    experts_as  format of the routed experts of a bare config, one of EXPERTS_AS; default: what the config states, else
                nvfp4; "published": what the config states, else its dtype. The tensors of a folder decide for
                themselves, and the result says that the option was not used.
    dense_as    likewise for the linear layers that are no experts and no router; default: what the config states, else
                its dtype

    Raises CheckpointError for a path that is neither, and for a config nobody can count; it says why and how to help.
    """
    path = Path(path)
    if path.is_dir():
        return _plan_folder(path, experts_as, dense_as)
    if not path.is_file():
        found = "is no regular file" if path.exists() else "does not exist"
        raise CheckpointError(f"{path} {found}; a checkpoint folder or a config.json was needed")
    if path.suffix != ".json":
        raise CheckpointError(f"{path} is no folder and no .json file; a checkpoint folder or a config.json was needed")
    raw = read_json(path)
    if is_of_family(raw):
        config = ModelConfig.from_dict(raw, where=str(path))
        return plan_config(config, experts_as, where=str(path), folder=path.parent, dense_as=dense_as)
    return _plan_other(raw, path, experts_as, dense_as)


def _plan_other(raw: dict, path: Path, experts_as: str | None, dense_as: str | None) -> Plan:
    # Imported here: building a model takes torch and transformers, counting the family's own configs takes neither.
    from nemolab.plan.any_model import plan_any

    file = path.with_name(HF_QUANT_FILE)
    beside = read_json(file) if path.name == CONFIG_FILE and file.is_file() else None
    return plan_any(raw, str(path), name=_name_of(raw, path), experts_as=experts_as, dense_as=dense_as, beside=beside)


def is_of_family(raw: dict) -> bool:
    """Whether a parsed config.json is a Nemotron-H's: nemotron_h, nemotron_h_omni, NemotronH_Nano_VL_V2 ..."""
    parts = [raw, *(raw[key] for key in NESTED_KEYS if isinstance(raw.get(key), dict))]
    types = [str(part.get("model_type")).lower().replace("_", "").replace("-", "") for part in parts]
    return any(name.startswith("nemotronh") for name in types)


def _plan_folder(path: Path, experts_as: str | None, dense_as: str | None) -> Plan:
    from nemolab.checkpoint import Checkpoint

    if (path / "experts.bin").exists() and (path / "manifest.json").exists():
        raise CheckpointError(f"{path} is a store; give the checkpoint it was made from, or {path / 'config.json'}")
    if (path / "config.json").is_file() and not any(path.glob("*.safetensors")):
        raise CheckpointError(
            f"{path} holds no *.safetensors, whose tensors would decide; to count from its config alone give"
            f" {path / 'config.json'}"
        )
    if (path / "config.json").is_file() and not is_of_family(raw := read_json(path / "config.json")):
        raise CheckpointError(
            f"{path}: the tensors of a {str(raw.get('model_type'))[:40]} are not read, only those of a Nemotron-H; to"
            f" count from its config alone give {path / 'config.json'}"
        )
    return plan_checkpoint(Checkpoint.open(path), experts_as, dense_as)


def plan_checkpoint(checkpoint: Checkpoint, experts_as: str | None = None, dense_as: str | None = None) -> Plan:
    """Count an open checkpoint by its tensors; as `plan`."""
    config = checkpoint.config
    split: Counter[tuple[str, str, str]] = Counter()
    params: Counter[str] = Counter()
    experts: dict[str, list] = defaultdict(list)  # "backbone.layers.1.mixer.experts.0" -> its matrices
    for module in checkpoint.modules.values():
        if module.part == ROUTED:
            experts[module.name.rpartition(".")[0]].append(module)
        else:
            split[module.part, kind_of(module.name, module.part), module.format] += module.nbytes
            bias = module.tensors.get("bias")
            params[module.part] += prod(module.shape) + (prod(bias.shape) if bias else 0)
    form = _same_form({place: _expert_form(modules) for place, modules in experts.items()}, str(checkpoint.path))
    expected = len(config.moe_layers) * config.n_experts
    if len(experts) != expected:
        raise CheckpointError(f"{checkpoint.path}: {len(experts)} routed experts found, the config says {expected}")
    block_bytes = sum(size for _, _, size in form)
    scalars = sum(module.nbytes for modules in experts.values() for module in modules) - expected * block_bytes
    embeddings = checkpoint.modules[EMBEDDINGS]
    assumptions = list(checkpoint.notes)
    for option, asked in (("experts_as", experts_as), ("dense_as", dense_as)):
        if asked:
            assumptions.append(f"{option} {asked} was not used: the tensors of a folder decide")
    return _family_plan(
        config,
        name=checkpoint.path.resolve().name,
        source=f"tensors of {shown(checkpoint.path)}",
        expert_form=form,
        routed_scalar_bytes=scalars,
        split=split,
        params=params,
        row_bytes=embeddings.nbytes // embeddings.shape[0],
        assumptions=assumptions,
    )


def plan_config(
    config: ModelConfig,
    experts_as: str | None = None,
    where: str = "config.json",
    folder: Path | None = None,
    dense_as: str | None = None,
) -> Plan:
    """Count a bare config of the Nemotron-H family by arithmetic; as `plan`.

    where   names it in errors and notes
    folder  where the vendor's hf_quant_config.json may lie beside it, to say in what formats the rest is stored
    """
    check_asked(experts_as, dense_as)
    shapes = module_shapes(config)
    precision = read_precision(config, shapes, shown(where), folder)
    assumptions = [precision.origin, *config.notes]
    if unused := precision.unused:
        assumptions.append(f"{len(unused)} of its entries name no module of this model, such as {unused[0]}")
    default_experts = DEFAULT_EXPERTS
    if experts_as == PUBLISHED:
        experts_as, default_experts = None, "bf16"
    split: Counter[tuple[str, str, str]] = Counter()
    params: Counter[str] = Counter()
    forms: dict[str, tuple] = {}
    scalars = 0
    stated: set[str | None] = set()
    for module in shapes:
        if module.part == ROUTED:
            said = precision.said.get(module.name)
            stated.add(said)
            format = experts_as or said or default_experts
            layer = module.name.partition(".experts.")[0]
            one = (format, module.shape, module_bytes(module, format) // module.copies)
            forms[layer] = (*forms.get(layer, ()), one)
            scalars += precision.scalar_bytes(module, format)
        else:
            format = precision.asked_or_said(module, dense_as)
            size = module_bytes(module, format) + precision.scalar_bytes(module, format)
            split[module.part, module.kind, format] += size
            params[module.part] += module.params + module.copies * module.biased * module.shape[0]
    form = _same_form(forms, where)
    assumptions.insert(0, _experts_sentence(experts_as, default_experts, stated - {None}))
    if dense_as:
        assumptions.insert(1, f"other linear layers but routers are counted as {dense_as}, as asked")
    if config.num_nextn_predict_layers:
        assumptions.append("the MTP block is counted once, as it is stored, and is in no sum but its own")
    if any(isinstance(config.raw.get(key), dict) for key in (*NESTED_KEYS, "vision_config")):
        assumptions.append("only the language model is counted: its config does not describe a vision tower")
    return _family_plan(
        config,
        name=_name_of(config.raw, Path(where)),
        source=f"arithmetic from {shown(where)}",
        expert_form=form,
        routed_scalar_bytes=scalars,
        split=split,
        params=params,
        row_bytes=config.hidden_size * 2,
        assumptions=assumptions,
    )


def _name_of(raw: dict, file: Path) -> str:
    """What our facts call it, else its file; every vendor calls the file config.json: then its folder says whose."""
    facts = raw.get("nemolab")
    named = facts.get("name") if isinstance(facts, dict) else None
    return str(named or (file.stem if file.stem != "config" else file.resolve().parent.name))


def _experts_sentence(experts_as: str | None, default: str, stated: set[str]) -> str:
    said = "/".join(sorted(stated))
    if experts_as is None:
        if said:
            return f"routed experts are counted as {said}, which the config states"
        why = "the default" if default == DEFAULT_EXPERTS else "unquantised"
        return f"routed experts are counted as {default}, {why}; experts_as changes it"
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


def _family_plan(
    config: ModelConfig,
    *,
    name: str,
    source: str,
    expert_form: tuple,
    routed_scalar_bytes: int,
    split: Counter[tuple[str, str, str]],
    params: Counter[str],
    row_bytes: int,
    assumptions: list[str],
) -> Plan:
    """The plan of a Nemotron-H model, whose experts all have one form."""
    expert_bytes = sum(size for _, _, size in expert_form)
    routed: Counter[tuple[str, str, str]] = Counter()
    for format, _, size in expert_form:
        routed[ROUTED, "experts", format] += len(config.moe_layers) * config.n_experts * size
    group = ExpertGroup(
        layers=config.moe_layers,
        experts=config.n_experts,
        top_k=config.top_k,
        identities=0,
        matrices=tuple(shape for _, shape, _ in expert_form),
        expert_params=sum(rows * columns for _, (rows, columns), _ in expert_form),
        expert_bytes=expert_bytes,
        format="+".join(dict.fromkeys(format for format, _, _ in expert_form)),
    )
    # Without a head of its own the model reads the whole table again for the logits.
    tied = not any(part == "head" for part, _, _ in split)
    table_bytes = sum(size for (part, _, _), size in split.items() if part == "embeddings")
    return assemble(
        name=name,
        source=source,
        model_type=config.model_type,
        layers={kind: config.layer_types.count(kind) for kind in ("mamba", "moe", "attention", "mlp")},
        n_layers=config.num_hidden_layers,
        groups=(group,),
        expert_width=config.expert_in,
        routed_scalar_bytes=routed_scalar_bytes,
        split=routed + split,
        params=params,
        embeddings_read=ReadOfEmbeddings(
            params["embeddings"] if tied else config.hidden_size, table_bytes if tied else row_bytes
        ),
        shared_expert_params=params["shared"] // len(config.moe_layers),
        mamba_state_bytes=mamba_state_bytes(config),
        kv_bytes_per_token=kv_bytes_per_token(config),
        assumptions=assumptions,
    )
