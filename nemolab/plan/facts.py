"""What a config says itself about its experts, in a section `nemolab`: for models whose own code does not tell.

"nemolab": {"top_k": 8}                     where the model can be built, but not seen to choose
"nemolab": {"moe_layers": 48, "experts": 512, "top_k": 10,
            "expert_shapes": [[640, 2560], [640, 2560], [2560, 640]], "dense_params": 7000000000}
                                            where it cannot be built; dense_params may be left out
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from nemolab.errors import CheckpointError
from nemolab.paths import shown
from nemolab.plan.quantization import read_quantization
from nemolab.plan.result import ROUTED, ExpertGroup, Plan, ReadOfEmbeddings, assemble
from nemolab.plan.weight_formats import DEFAULT_EXPERTS, PUBLISHED, matrix_scalar_bytes, weight_bytes

_LARGEST = 2**31 - 1
_MOST_LAYERS = 4096
_LARGEST_DENSE = 2**50
HOW = (
    'say so in the config: "nemolab": {"moe_layers": L, "experts": E, "top_k": K,'
    ' "expert_shapes": [[rows, columns], ...]}'
)


@dataclass(frozen=True)
class ExpertFacts:
    """Experts as a config states them; `dense_params` is None where it does not."""

    moe_layers: int
    experts: int
    top_k: int
    shapes: tuple[tuple[int, int], ...]
    dense_params: int | None


def stated_top_k(raw: dict[str, Any], where: str) -> int | None:
    """`nemolab.top_k`, if it is there."""
    facts = _facts(raw, where)
    return _count(facts, "top_k", where) if "top_k" in facts else None


def read_expert_facts(raw: dict[str, Any], where: str) -> ExpertFacts | None:
    """The whole section, if it has `expert_shapes`. Raises CheckpointError naming the field that is off."""
    facts = _facts(raw, where)
    if "expert_shapes" not in facts:
        return None
    given = facts["expert_shapes"]
    if not isinstance(given, list) or not given or not all(_is_shape(shape) for shape in given):
        raise CheckpointError(
            f"{where}: nemolab.expert_shapes is {str(given)[:60]}; a list of [rows, columns] was expected"
        )
    layers = _count(facts, "moe_layers", where, _MOST_LAYERS)
    experts, top_k = (_count(facts, name, where) for name in ("experts", "top_k"))
    if top_k > experts:
        raise CheckpointError(f"{where}: nemolab.top_k is {top_k}; at most the {experts} experts were expected")
    dense = _count(facts, "dense_params", where, _LARGEST_DENSE) if "dense_params" in facts else None
    return ExpertFacts(layers, experts, top_k, tuple((rows, columns) for rows, columns in given), dense)


def plan_facts(
    facts: ExpertFacts, raw: dict[str, Any], where: str, *, name: str, experts_as: str | None, dense_as: str | None
) -> Plan:
    """Count what a config states about itself, without building anything."""
    stated = read_quantization(raw, shown(where))
    format = stated.experts or "bf16" if experts_as == PUBLISHED else experts_as or stated.experts or DEFAULT_EXPERTS
    dense_format = dense_as or "bf16"
    size = sum(weight_bytes(rows, columns, format) for rows, columns in facts.shapes)
    group = ExpertGroup(
        layers=tuple(range(facts.moe_layers)),
        experts=facts.experts,
        top_k=facts.top_k,
        identities=0,
        matrices=facts.shapes,
        expert_params=sum(rows * columns for rows, columns in facts.shapes),
        expert_bytes=size,
        format=format,
    )
    split: Counter[tuple[str, str, str]] = Counter()
    split[ROUTED, "experts", format] = facts.moe_layers * facts.experts * size
    notes = [f"experts are those that {shown(where)} states in its section nemolab: nothing was built"]
    dense = facts.dense_params
    if dense is None:
        notes.append("nemolab.dense_params is not stated: all that is no routed expert is not counted")
    else:
        split["other", "dense_params", dense_format] = weight_bytes(1, dense, dense_format)
    return assemble(
        name=name,
        source=f"facts stated in {shown(where)}",
        model_type=str(raw.get("model_type")),
        layers={"moe": facts.moe_layers},
        n_layers=facts.moe_layers,
        groups=(group,),
        expert_width=facts.shapes[0][1],
        routed_scalar_bytes=facts.moe_layers * facts.experts * len(facts.shapes) * matrix_scalar_bytes(format),
        split=split,
        params=Counter({"other": dense or 0}),
        embeddings_read=ReadOfEmbeddings(0, 0),
        shared_expert_params=0,
        mamba_state_bytes=None,
        kv_bytes_per_token=None,
        assumptions=notes,
    )


def _facts(raw: dict[str, Any], where: str) -> dict[str, Any]:
    facts = raw.get("nemolab")
    if facts is not None and not isinstance(facts, dict):
        raise CheckpointError(f"{where}: nemolab is a {type(facts).__name__}; an object was expected")
    return facts or {}


def _count(facts: dict[str, Any], name: str, where: str, largest: int = _LARGEST) -> int:
    value = facts.get(name)
    if type(value) is not int or not 1 <= value <= largest:
        raise CheckpointError(
            f"{where}: nemolab.{name} is {str(value)[:40]!r}; a whole number from 1 to {largest:,} was expected"
        )
    return value


def _is_shape(shape: object) -> bool:
    return isinstance(shape, list) and len(shape) == 2 and all(type(n) is int and 1 <= n <= _LARGEST for n in shape)
