"""Bytes per token of any model that transformers knows, from its config alone."""

from __future__ import annotations

import gc
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from nemolab.errors import CheckpointError
from nemolab.paths import shown
from nemolab.plan.expert_finder import Candidate, RoutedExperts, find_experts
from nemolab.plan.facts import HOW, plan_facts, read_expert_facts, stated_top_k
from nemolab.plan.meta_model import BuiltModel, build_model
from nemolab.plan.model_parts import Weight, ask, list_weights, names_mtp, text_config
from nemolab.plan.quantization import Quantization, read_quantization
from nemolab.plan.result import ROUTED, ExpertGroup, Plan, ReadOfEmbeddings, assemble
from nemolab.plan.unstated import described_parts, note_defaults, without_nulls
from nemolab.plan.weight_formats import (
    DEFAULT_EXPERTS,
    NOT_QUANTISED,
    PUBLISHED,
    check_asked,
    fits,
    matrix_scalar_bytes,
    weight_bytes,
)

if TYPE_CHECKING:
    from torch import nn

_PLAIN_OF = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
_MTP_FIELDS = re.compile(r"^(num_nextn_predict_layers|(n|num)_mtp_\w+|mtp_num_\w+|num_mtp)$")


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without looking for garbage: torch and transformers bring very many objects that stay, and searching them again
    and again is work for nothing."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@_uncollected()
def plan_any(
    raw: dict[str, Any],
    where: str,
    *,
    name: str,
    experts_as: str | None = None,
    dense_as: str | None = None,
    beside: dict[str, Any] | None = None,
) -> Plan:
    """Count a parsed config.json of any family: built without weights, counted by module.

    name        what the model is called
    experts_as  format of the routed experts; default: what the config states, else nvfp4
    dense_as    format of the linear layers that are no experts, but routers; default: what the
                config states, else its dtype
    beside      the hf_quant_config.json that lay beside the config, parsed: read where the config states no formats

    Raises CheckpointError where transformers cannot build the model, or where nobody can see what an expert is.
    """
    check_asked(experts_as, dense_as)
    if facts := read_expert_facts(raw, where):
        return plan_facts(facts, raw, where, name=name, experts_as=experts_as, dense_as=dense_as)
    built = build_model(raw, where)
    routed, unseen = _find_experts(built, raw, where)
    weights, undescribed = _described(list_weights(built.model, routed), raw)
    aside = [found for found in routed if _part_aside(found)]
    routed = [found for found in routed if not _part_aside(found)]
    if not routed:
        _refuse_unseen(unseen, where)
    _refuse_impossible(routed, where)
    formats = _Formats(raw, shown(where), experts_as, dense_as, beside)
    groups, split, scalars = _count_experts(routed, formats, where)
    for found in aside:
        (group,), _, _ = _count_experts([found], formats, where)
        split[_part_aside(found), "experts", group.format] += group.experts * group.expert_bytes
    params: Counter[str] = Counter()
    for weight in weights:
        format = formats.of(weight)
        rows, columns = weight.shape if len(weight.shape) == 2 else (1, weight.params)
        split[weight.part, weight.kind, format] += weight_bytes(rows, columns, format) + (
            matrix_scalar_bytes(format) if weight.linear else 0
        )
        params[weight.part] += weight.params
    depth = getattr(text_config(built.model), "num_hidden_layers", 0)
    return assemble(
        name=name,
        source=f"transformers' model of {shown(where)}, without weights",
        model_type=str(raw.get("model_type") or built.config.model_type),
        layers=_layers(routed, weights),
        n_layers=depth if isinstance(depth, int) else 0,  # some families keep one for each tower
        groups=groups,
        expert_width=routed[0].matrices[0][1] if routed else 0,
        routed_scalar_bytes=scalars,
        split=split,
        params=params,
        embeddings_read=_embeddings_read(weights, formats),
        shared_expert_params=params["shared"] // len(_places(weights, "shared")) if params["shared"] else 0,
        mamba_state_bytes=0 if _only_attention(weights) else None,
        kv_bytes_per_token=_kv_bytes(weights),
        assumptions=[
            *formats.sentences(routed),
            *_notes(raw, (*built.notes, *undescribed, *note_defaults(raw, text_config(built.model))), routed, weights),
        ],
    )


class _Formats:
    """Which format each tensor is counted in: the one asked for, else the config's, else its dtype."""

    def __init__(
        self,
        raw: dict[str, Any],
        where: str,
        experts_as: str | None,
        dense_as: str | None,
        beside: dict[str, Any] | None,
    ):
        self.experts_as, self.dense_as = experts_as, dense_as
        self.stated: Quantization = read_quantization(raw, where, beside)
        stored = next(
            (part[key] for part in described_parts(raw) for key in ("dtype", "torch_dtype") if part.get(key)), None
        )
        self.plain = _PLAIN_OF.get(str(stored), "bf16")
        self.said_plain = str(stored) in _PLAIN_OF
        self.left_plain: set[str] = set()

    def of_experts(self, found: RoutedExperts) -> str:
        stated = self.stated.of_experts(found.candidate.name)
        if self.experts_as == "fp8" and stated and stated.startswith("fp8_"):
            return stated  # the same values; the config says how their scales lie
        if self.experts_as == PUBLISHED:
            return stated or self.plain
        default = DEFAULT_EXPERTS if _fit(found, DEFAULT_EXPERTS) else self.plain
        return self.experts_as or stated or default

    def of(self, weight: Weight) -> str:
        plain = self.plain if weight.dtype == "bf16" else weight.dtype
        if not weight.linear or weight.part in NOT_QUANTISED:
            return plain
        stated = self.stated.of_linear(weight.module)
        asked = self.dense_as if weight.part != "mtp" else None
        if asked == "fp8" and stated and stated.startswith("fp8_"):
            asked = stated
        format = asked or stated or plain
        if not fits(weight.shape[1], format):
            self.left_plain.add(weight.kind)
            return plain
        return format

    def sentences(self, routed: list[RoutedExperts]) -> list[str]:
        stated = {self.stated.of_experts(found.candidate.name) for found in routed} - {None}
        dtype = f"{self.plain}, {'its dtype' if self.said_plain else 'as it states no dtype'}"
        lines = []
        if routed and self.experts_as == PUBLISHED and not stated:
            lines.append(f"routed experts are counted in {self.plain}: nothing that was read quantises them")
        elif routed and self.experts_as and self.experts_as != PUBLISHED:
            against = f", not as the {'/'.join(sorted(stated))} the config states" if stated - {self.experts_as} else ""
            lines.append(f"routed experts are counted as {self.experts_as}, as asked{against}")
        elif routed and stated:
            lines.append(f"routed experts are counted as {'/'.join(sorted(stated))}, which the config states")
        elif routed:
            formats = "/".join(sorted({self.of_experts(found) for found in routed}))
            lines.append(f"routed experts are counted as {formats}, the default; experts_as changes it")
        if self.dense_as:
            lines.append(f"other linear layers but routers are counted as {self.dense_as}, as asked")
        lines.append(f"{self.stated.origin}; what nothing quantises is counted in {dtype}")
        if self.left_plain:
            kinds = ", ".join(sorted(self.left_plain)[:4])
            lines.append(f"left unquantised, as their rows are no whole groups: {kinds}")
        return [*lines, *self.stated.notes]


def _fit(found: RoutedExperts, format: str) -> bool:
    return all(fits(columns, format) for _, columns in found.matrices)


def _find_experts(built: BuiltModel, raw: dict[str, Any], where: str) -> tuple[list[RoutedExperts], list[Candidate]]:
    """As `find_experts`; where none are seen, as the model chooses with transformers' defaults for what is null."""
    routed, unseen = find_experts(built.model, _widths(built.model), stated_top_k(raw, where))
    stated = without_nulls(raw)
    if routed or not _look_like_experts(unseen) or stated == raw:
        return routed, unseen
    try:
        twin = build_model(stated, where).model
    except CheckpointError:
        return routed, unseen
    seen = [found for found in find_experts(twin, _widths(twin))[0] if found.candidate in unseen]
    chosen = [found.candidate for found in seen]
    return seen, [candidate for candidate in unseen if candidate not in chosen]


def _look_like_experts(unseen: list[Candidate]) -> list[Candidate]:
    return [candidate for candidate in unseen if not candidate.listed and candidate.experts > 2]


def _widths(model: nn.Module) -> tuple[int, ...]:
    """Widths a hidden state may have: what the text's config says, then the columns of the embedding tables."""
    weight = getattr(ask(model, "get_input_embeddings"), "weight", None)
    columns = [weight.shape[1]] if weight is not None and weight.dim() == 2 else []
    said = getattr(text_config(model), "hidden_size", None)
    return tuple(dict.fromkeys([*([said] if isinstance(said, int) and said > 0 else []), *columns]))


def _described(weights: list[Weight], raw: dict[str, Any]) -> tuple[list[Weight], tuple[str, ...]]:
    """Without a vision tower that only transformers' defaults describe."""
    fields = (item for part in described_parts(raw) for item in part.items())
    if any(isinstance(value, dict) and re.search(r"vision|audio", key) for key, value in fields):
        return weights, ()
    kept = [weight for weight in weights if weight.part != "vision"]
    if len(kept) == len(weights):
        return weights, ()
    return kept, ("only the language model is counted: the config does not describe the rest",)


def _part_aside(found: RoutedExperts) -> str | None:
    """The part that experts belong to which no token of text reads: those for pictures, and those of an MTP layer."""
    if re.search(r"(^|[._])(vision|visual|image|audio)", found.candidate.name):
        return "vision"
    return "mtp" if names_mtp(found.candidate.name) else None


def _refuse_unseen(unseen: list[Candidate], where: str) -> None:
    stacks = _look_like_experts(unseen)
    if not stacks:
        return
    shapes = ", ".join(f"{list(shape)}" for shape in stacks[0].stacks.values())
    raise CheckpointError(
        f"{where}: {len(stacks)} modules hold stacks that look like experts, such as {stacks[0].name} with"
        f" {stacks[0].experts} x ({shapes}), but running them did not show how many a token uses; say so in the"
        ' config: "nemolab": {"top_k": K}'
    )


def _refuse_impossible(routed: list[RoutedExperts], where: str) -> None:
    for found in routed:
        if not 1 <= found.top_k <= found.experts + found.identities:
            raise CheckpointError(
                f"{where}: {found.candidate.name} would send a token to {found.top_k:,} of {found.experts:,} experts;"
                f" from 1 to {found.experts + found.identities:,} were expected"
            )


def _count_experts(
    routed: list[RoutedExperts], formats: _Formats, where: str
) -> tuple[tuple[ExpertGroup, ...], Counter[tuple[str, str, str]], int]:
    """(groups of layers with experts of one kind, bytes by format, bytes of the scalars of all)."""
    layers: dict[tuple, list[int]] = {}
    for found in routed:
        key = (found.experts, found.top_k, found.identities, found.matrices, found.vectors, formats.of_experts(found))
        layers.setdefault(key, []).append(found.candidate.layer or 0)
    groups, split, scalars = [], Counter(), 0
    for (experts, top_k, identities, matrices, vectors, format), indices in layers.items():
        try:
            values = sum(weight_bytes(rows, columns, format) for rows, columns in matrices)
        except CheckpointError as error:
            raise CheckpointError(f"{where}: an expert of layer {indices[0]}, {_show(matrices)}: {error}") from error
        size = values + weight_bytes(1, vectors, formats.plain)
        groups.append(
            ExpertGroup(
                layers=tuple(indices),
                experts=experts,
                top_k=top_k,
                identities=identities,
                matrices=matrices,
                expert_params=sum(rows * columns for rows, columns in matrices) + vectors,
                expert_bytes=size,
                format=format,
            )
        )
        split[ROUTED, "experts", format] += len(indices) * experts * size
        scalars += len(indices) * experts * len(matrices) * matrix_scalar_bytes(format)
    return tuple(groups), split, scalars


def _show(matrices: tuple[tuple[int, int], ...]) -> str:
    return " + ".join(f"[{rows}, {columns}]" for rows, columns in matrices)


def _layers(routed: list[RoutedExperts], weights: list[Weight]) -> dict[str, int]:
    counts = {part: len(_places(weights, part)) for part in ("mamba", "attention", "mlp")}
    moe = len({found.candidate.layer for found in routed})
    return {"mamba": counts["mamba"], "moe": moe, "attention": counts["attention"], "mlp": counts["mlp"]}


def _places(weights: list[Weight], part: str) -> set[str]:
    """The layers in which a part stands."""
    return {
        found[0] for weight in weights if weight.part == part and (found := re.match(r".*?\.\d+(?=\.)", weight.name))
    }


def _embeddings_read(weights: list[Weight], formats: _Formats) -> ReadOfEmbeddings:
    """A row of each table; all of the first where the model has no head of its own."""
    tables = [weight for weight in weights if weight.part == "embeddings"]
    tied = not any(weight.part == "head" for weight in weights)
    params = size = 0
    for index, table in enumerate(tables):
        rows = table.shape[0] if tied and index == 0 else 1
        count = rows * (table.params // max(1, table.shape[0]))
        params += count
        size += weight_bytes(1, count, formats.of(table))
    return ReadOfEmbeddings(params, size)


def _only_attention(weights: list[Weight]) -> bool:
    """Whether every layer's mixer is attention with keys and values, so that nothing else is kept between tokens."""
    layers = {found[0] for weight in weights if (found := re.match(r".*?\.layers\.\d+(?=\.)", weight.name))}
    keys = {weight.name.partition(".self_attn.")[0] for weight in weights if _KEYS.search(weight.name)}
    return bool(layers) and layers <= keys


_KEYS = re.compile(r"\.self_attn\.(k_proj|kv_a_proj_with_mqa|kv_proj)\.weight$")


def _kv_bytes(weights: list[Weight]) -> int | None:
    """Keys and values of one token in BF16: rows of k_proj and v_proj, or the latent that stands for both."""
    rows = [
        weight.shape[0]
        for weight in weights
        if weight.part == "attention" and re.search(r"\.(k_proj|v_proj|kv_a_proj_with_mqa)\.weight$", weight.name)
    ]
    return 2 * sum(rows) if rows else None


def _expert_counts(part: dict[str, Any]) -> list[tuple[str, int]]:
    """Fields that count experts, of a config or of the sections it holds them in."""
    sections = [part, *(value for value in part.values() if isinstance(value, dict))]
    fields = [item for section in sections for item in section.items()]
    return [(key, value) for key, value in fields if type(value) is int and value > 1 and _COUNTS_EXPERTS.search(key)]


_COUNTS_EXPERTS = re.compile(r"(^|_)(num|n)_(\w+_)?experts$")


def _notes(
    raw: dict[str, Any], built: tuple[str, ...], routed: list[RoutedExperts], weights: list[Weight]
) -> list[str]:
    notes = list(built)
    if not routed:
        notes.append("no module routes to experts: the model is dense, and a cache of experts has nothing to hold")
        if counts := [f"{key} {value}" for part in described_parts(raw) for key, value in _expert_counts(part)]:
            notes.append(f"yet the config states {', '.join(counts[:4])}; if they are used, {HOW}")
    if identities := max((found.identities for found in routed), default=0):
        notes.append(
            f"the router also chooses among {identities} zero-compute experts, which read nothing: bytes_per_token is"
            " the most a token reads"
        )
    if phantoms := sum(found.phantoms for found in routed):
        notes.append(f"{phantoms:,} matrices that transformers makes for zero-compute experts are not counted")
    declared = next(
        (f"{key} {part[key]}" for part in described_parts(raw) for key in part if _MTP_FIELDS.match(key) and part[key]),
        None,
    )
    built_mtp = any(weight.part == "mtp" for weight in weights)
    if declared and not built_mtp:
        notes.append(f"multi-token prediction ({declared}) is declared, but transformers builds none: not counted")
    if built_mtp:
        notes.append("the multi-token-prediction part is counted apart, in no sum but its own")
    if any(weight.part == "vision" for weight in weights):
        notes.append("vision counts all that is not the language model, in no sum but its own")
    if raw.get("auto_map"):
        notes.append("auto_map is ignored: code that comes with a model is never run")
    return notes
