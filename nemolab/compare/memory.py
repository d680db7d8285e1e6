"""How much memory the reference needs: by arithmetic for a model one has not run, and measured for one that ran."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nemolab.compare.measures import ROWS_AT_ONCE
from nemolab.compare.weights import VALUES_AT_ONCE

if TYPE_CHECKING:
    from nemolab.checkpoint import ModelConfig

# Interpreter, torch and transformers once imported; measured 0.6 GiB, so rounded up.
PROCESS_BYTES = 768 << 20
# transformers' helper works on a piece of 2^22 values: two int64 indices, three float32 copies, the packed bytes.
DECODE_SCRATCH_BYTES = 26 * VALUES_AT_ONCE
FORMULA = (
    "process + max over stages of (float32 weights of the stage + its largest matrix as stored + decode scratch"
    " + float32 activations of all texts); one block, one expert, or the head at a time"
)


@dataclass(frozen=True)
class ReferencePeak:
    """Bytes the reference needs at each stage, without the process itself, and the peak with it."""

    stages: dict[str, int]
    process_bytes: int = PROCESS_BYTES

    @property
    def rise_bytes(self) -> int:
        """Above what the process held before."""
        return max(self.stages.values())

    @property
    def peak_bytes(self) -> int:
        return self.process_bytes + self.rise_bytes

    def to_dict(self) -> dict:
        return {"formula": FORMULA, "process_bytes": self.process_bytes, "stages_bytes": self.stages}


def predict_reference_peak(config: ModelConfig, text_tokens: Sequence[int]) -> ReferencePeak:
    """What `Reference.read` will need for texts of these lengths.

    A matrix in the making counts 4 bytes a value decoded and 2 as stored (BF16, the largest form a large one has).
    Blocks with state take one text at a time, the others all at once.
    """
    longest, everything, width = max(text_tokens), sum(text_tokens), config.hidden_size
    between = 4 * 4 * everything * width  # hidden states before and after a block, its normed input, a residual
    table = config.vocab_size * width
    stages = {
        "embeddings": 2 * table + between,
        "head": (4 + 2) * table + between + 8 * 6 * ROWS_AT_ONCE * config.vocab_size,
    }
    makers = {"mamba": _mamba, "attention": _attention, "moe": _moe, "mlp": _mlp}
    for kind in dict.fromkeys(config.layer_types):
        tokens = longest if kind in ("mamba", "attention") else everything
        weights, largest, activations = makers[kind](config, tokens)
        stages[kind] = 4 * weights + 2 * largest + DECODE_SCRATCH_BYTES + activations + between
    return ReferencePeak(stages)


def _mamba(config: ModelConfig, tokens: int) -> tuple[int, int, int]:
    heads, chunk = config.mamba_num_heads, config.chunk_size
    chunks = math.ceil(tokens / chunk)
    in_proj, out_proj = config.mamba_in_rows * config.hidden_size, config.mamba_inner * config.hidden_size
    projected = tokens * (config.mamba_in_rows + 4 * config.mamba_conv_dim)
    # B and C repeated for every head, and scaled; decay and scores of each pair of positions within a chunk.
    per_head = 8 * chunks * chunk * heads * max(config.ssm_state_size, config.mamba_head_dim)
    pairs = 7 * chunks * chunk * chunk * heads
    states = 4 * (chunks + 1) * heads * config.mamba_head_dim * config.ssm_state_size
    return in_proj + out_proj, max(in_proj, out_proj), 4 * (projected + per_head + pairs + states)


def _attention(config: ModelConfig, tokens: int) -> tuple[int, int, int]:
    rows = config.num_attention_heads * config.head_dim
    kv_rows = config.num_key_value_heads * config.head_dim
    query = rows * config.hidden_size
    # Keys and values are repeated for every head; scores of all pairs, should the fused kernel not be taken.
    activations = tokens * (6 * rows + 2 * kv_rows) + 2 * config.num_attention_heads * tokens * tokens
    return 2 * query + 2 * kv_rows * config.hidden_size, query, 4 * activations


def _moe(config: ModelConfig, tokens: int) -> tuple[int, int, int]:
    shared = config.moe_shared_expert_intermediate_size * config.hidden_size
    latent = 2 * config.expert_in * config.hidden_size if config.moe_latent_size else 0
    expert = config.expert_inter * config.expert_in
    weights = 2 * shared + latent + config.n_experts * config.hidden_size + 2 * expert
    # transformers marks tokens by experts in int64, [tokens, top_k, experts + 1].
    marks = 8 * tokens * config.top_k * (config.n_experts + 1)
    values = tokens * (
        3 * config.moe_shared_expert_intermediate_size
        + 4 * config.expert_in
        + 3 * config.expert_inter
        + config.n_experts
    )
    return weights, max(shared, expert), marks + 4 * values


def _mlp(config: ModelConfig, tokens: int) -> tuple[int, int, int]:
    matrix = config.intermediate_size * config.hidden_size
    return 2 * matrix, matrix, 4 * 3 * tokens * config.intermediate_size
