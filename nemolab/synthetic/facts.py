"""What follows from a form's shape, and what was planted: for the answer of `nemolab synth`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nemolab.checkpoint.formats import matrix_bytes
from nemolab.synthetic.draws import popularity
from nemolab.synthetic.form import Form
from nemolab.synthetic.shapes import spell_layers
from nemolab.synthetic.tensors import OCTAVES, Direction, Tensor
from nemolab.units import PAGE_BYTES


@dataclass(frozen=True)
class Facts:
    """Sizes of the experts.

    expert_bytes  packed values and block scales of one expert, as published; pages: that in pages of 4096 bytes
    blocks        experts in all MoE layers: blocks a store of it will have
    """

    layers: int
    pattern: str
    moe_layers: int
    experts: int
    top_k: int
    expert_in: int
    expert_inter: int
    expert_bytes: int
    pages: float
    blocks: int
    bytes_per_token: int
    mtp_tensors: int
    vision_tensors: int


def shape_facts(form: Form, tensors: list[Tensor]) -> Facts:
    """The facts of a form whose tensors are listed."""
    config = form.config
    moe, expert_bytes = len(config.moe_layers), 0
    if moe:
        format = form.formats.of(f"backbone.layers.{config.moe_layers[0]}.mixer.experts.0.up_proj", "routed", 0)
        expert_bytes = 2 * matrix_bytes(config.expert_inter, config.expert_in, format)
    return Facts(
        layers=config.num_hidden_layers,
        pattern=spell_layers(config.layer_types, None),
        moe_layers=moe,
        experts=config.n_experts if moe else 0,
        top_k=config.top_k if moe else 0,
        expert_in=config.expert_in,
        expert_inter=config.expert_inter,
        expert_bytes=expert_bytes,
        pages=expert_bytes / PAGE_BYTES,
        blocks=moe * config.n_experts,
        bytes_per_token=moe * config.top_k * expert_bytes,
        mtp_tensors=sum(tensor.key.startswith("mtp.") for tensor in tensors),
        vision_tensors=sum(tensor.key.startswith(("vision_", "mlp1.")) for tensor in tensors),
    )


def planted(form: Form) -> dict[str, Any]:
    """What a reader of the checkpoint should find again, within sampling error."""
    config = form.config
    if not config.moe_layers:
        return {}
    shares = popularity(config.n_experts, config.top_k, form.skew)
    way = Direction.of(form)
    return {
        "zero_neurons": form.zero_share if way.hidden else 0.5,
        "popularity_exponent": form.skew,
        "most_popular_expert": shares[0],
        "least_popular_expert": shares[-1],
        "common_direction_columns": way.hidden,
        "odd_codes_and_scales": "code 8 (-0), block scales 448 and 2^-9, blocks of zeros with scale 1.0",
        "weight_scale_2_apart": 2 ** (OCTAVES - 1),  # beside what the widths of matrices make of it
    }
