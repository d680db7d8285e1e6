"""Plan: what a model weighs and what one token reads of it, as every way of counting reports it."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from nemolab.checkpoint.structure import LEFT_OUT_PARTS
from nemolab.units import PAGE_BYTES, show_bytes

if TYPE_CHECKING:
    import pandas as pd

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
class ExpertGroup:
    """MoE layers whose experts are alike.

    layers      their indices; a layer with two kinds of experts is in two groups
    matrices    (rows, columns) of each matrix of one expert, gate and up apart
    identities  zero-compute experts the router may choose beside the real ones: such a choice reads nothing
    """

    layers: tuple[int, ...]
    experts: int
    top_k: int
    identities: int
    matrices: tuple[tuple[int, int], ...]
    expert_params: int
    expert_bytes: int
    format: str


@dataclass(frozen=True)
class Plan:
    """What a model weighs and what one token reads of it.

    layers                   kind of layer -> how many have it; "moe" and "attention" may be halves of one layer
    n_layers                 layers of the language model
    experts, top_k           routed experts in each MoE layer, and how many of them a token uses; the largest where
                             layers differ, `groups` says which
    shared_expert_params     weights of the shared experts of one MoE layer, which every token uses
    expert_width             columns an expert reads: the latent size where there is one, else the hidden size
    expert_params            weights (and biases) of one routed expert
    experts_as               the format its matrices are counted in ("nvfp4"; "nvfp4+fp8" where they differ)
    expert_bytes             one routed expert: packed values and block scales, unpadded, without scalars
    pages_per_expert         expert_bytes / PAGE_BYTES, fractional where experts are no whole pages
    bytes_per_token          sum over MoE layers of top_k x expert_bytes: read per token where nothing is cached
    routed_bytes             sum over MoE layers of experts x expert_bytes
    routed_scalar_bytes      the F32 scalars of all routed experts: in no part, as a store keeps them in a side table
    dense_bytes              all that is not routed, embeddings and scalars included, without MTP and vision
    dense_bytes_per_token    of that, what a token reads: a row of an embedding table, unless that is the head too
    total_params             elements of everything but MTP and vision
    active_params_per_token  of these, what a token uses: top_k experts a layer, and of an embedding table one row
    parts                    bytes by part; routed is routed_bytes, the others but mtp and vision make up dense_bytes
    split                    the same, finer: bytes by part, kind of module and format
    groups                   the MoE layers by kind of expert
    mamba_state_bytes        state of one sequence, whatever its length; kv_bytes_per_token comes on top (BF16); None
                             where the count does not know them
    assumptions              how the formats were known, and what of the input was left aside or contradicts itself
    """

    name: str
    source: str
    model_type: str
    layers: dict[str, int]
    n_layers: int
    moe_layers: int
    experts: int
    top_k: int
    shared_expert_params: int
    expert_width: int
    expert_params: int
    experts_as: str
    expert_bytes: int
    pages_per_expert: float
    bytes_per_token: int
    routed_bytes: int
    routed_scalar_bytes: int
    dense_bytes: int
    dense_bytes_per_token: int
    total_params: int
    active_params_per_token: int
    parts: dict[str, int]
    split: tuple[Share, ...]
    groups: tuple[ExpertGroup, ...]
    mamba_state_bytes: int | None
    kv_bytes_per_token: int | None
    assumptions: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON types; whole numbers of pages as integers."""
        result = asdict(self) | {"assumptions": list(self.assumptions), "split": [asdict(s) for s in self.split]}
        result["groups"] = [
            asdict(group) | {"layers": list(group.layers), "matrices": [list(shape) for shape in group.matrices]}
            for group in self.groups
        ]
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
            *(self._expert_lines() if self.moe_layers else ["  no routed experts: every token reads the same bytes"]),
            f"  all the rest  {self.dense_bytes:,} bytes = {show_bytes(self.dense_bytes)}"
            f"; a token reads {show_bytes(self.dense_bytes_per_token)} of it",
            f"  parameters    {self.total_params:,}; a token uses {self.active_params_per_token:,} of them",
            f"  state         {_counted(self.mamba_state_bytes)} bytes a sequence"
            f" + {_counted(self.kv_bytes_per_token)} bytes a token",
            "",
            *self._part_lines(),
        ]
        return "\n".join(lines + [f"note: {assumption}" for assumption in self.assumptions])

    def _expert_lines(self) -> list[str]:
        traffic = f"{self.bytes_per_token:,} bytes = {_show_traffic(self.bytes_per_token)}"
        reads = f"{self.moe_layers} layers x {self.top_k} of {self.experts} experts = {traffic}"
        differ = []
        if len(self.groups) > 1:
            reads = f"{traffic}, of {len(self.groups)} kinds of experts:"
            differ = [
                f"                {len(group.layers)} layers x {group.top_k} of {group.experts}"
                f" x {group.expert_bytes:,} bytes ({group.format})"
                for group in self.groups
            ]
        return [
            f"  one expert    {self.expert_bytes:,} bytes = {self.pages_per_expert:,.6g} pages"
            f" ({self.expert_params:,} parameters in {self.experts_as})",
            f"  one token     {reads}",
            *differ,
            f"  all experts   {self.routed_bytes:,} bytes = {show_bytes(self.routed_bytes)}",
        ]

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


@dataclass(frozen=True)
class ReadOfEmbeddings:
    """What one token reads of the embedding tables: a row of each, and all of one that is the head too."""

    params: int
    bytes: int


def assemble(
    *,
    name: str,
    source: str,
    model_type: str,
    layers: dict[str, int],
    n_layers: int,
    groups: tuple[ExpertGroup, ...],
    expert_width: int,
    routed_scalar_bytes: int,
    split: Counter[tuple[str, str, str]],
    params: Counter[str],
    embeddings_read: ReadOfEmbeddings,
    shared_expert_params: int,
    mamba_state_bytes: int | None,
    kv_bytes_per_token: int | None,
    assumptions: list[str],
) -> Plan:
    """The sums of a plan, formed in one place.

    groups  the MoE layers; the first is what `expert_bytes` and the like show unless another has larger experts
    split   (part, kind of module, format) -> bytes; the routed experts without their scalars
    params  part -> elements; routed experts are taken from `groups`
    """
    parts: Counter[str] = Counter()
    for (part, _, _), size in split.items():
        parts[part] += size
    dense_bytes = sum(size for part, size in parts.items() if part not in NOT_DENSE)
    dense_params = sum(count for part, count in params.items() if part not in NOT_DENSE)
    unread_bytes = parts["embeddings"] - embeddings_read.bytes
    unread_params = params["embeddings"] - embeddings_read.params
    shown = max(groups, key=lambda group: group.expert_bytes, default=None)
    expert_bytes = shown.expert_bytes if shown else 0
    return Plan(
        name=name,
        source=source,
        model_type=model_type,
        layers=layers,
        n_layers=n_layers,
        moe_layers=sum(len(group.layers) for group in groups),
        experts=max((group.experts for group in groups), default=0),
        top_k=max((group.top_k for group in groups), default=0),
        shared_expert_params=shared_expert_params,
        expert_width=expert_width,
        expert_params=shown.expert_params if shown else 0,
        experts_as=shown.format if shown else "",
        expert_bytes=expert_bytes,
        pages_per_expert=expert_bytes / PAGE_BYTES,
        bytes_per_token=sum(len(group.layers) * group.top_k * group.expert_bytes for group in groups),
        routed_bytes=sum(len(group.layers) * group.experts * group.expert_bytes for group in groups),
        routed_scalar_bytes=routed_scalar_bytes,
        dense_bytes=dense_bytes,
        dense_bytes_per_token=dense_bytes - unread_bytes,
        total_params=dense_params + sum(len(g.layers) * g.experts * g.expert_params for g in groups),
        active_params_per_token=dense_params
        - unread_params
        + sum(len(g.layers) * g.top_k * g.expert_params for g in groups),
        parts=dict(parts),
        split=tuple(Share(*key, size) for key, size in split.items()),
        groups=groups,
        mamba_state_bytes=mamba_state_bytes,
        kv_bytes_per_token=kv_bytes_per_token,
        assumptions=tuple(assumptions),
    )


def _show_traffic(count: int) -> str:
    return f"{count / 1e9:.3f} GB" if count >= 10**8 else f"{count / 1e6:.3f} MB"


def _counted(count: int | None) -> str:
    return "uncounted" if count is None else f"{count:,}"
