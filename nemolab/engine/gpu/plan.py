"""What an engine takes of a card's memory, by arithmetic, before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass

from nemolab.engine.attention import QUERY_ROWS, SCORES_BYTES
from nemolab.engine.gpu.layers import PIECE_TOKENS
from nemolab.engine.gpu.moe import most_pairs
from nemolab.engine.gpu.state import state_bytes
from nemolab.engine.gpu.weights import QUANTISED
from nemolab.errors import EngineError
from nemolab.units import show_bytes

# Of a process that computes on a card, beside torch's tensors: the driver's context, kernels, the libraries' own. An
# H200 had 686 MiB in use beside them.
CONTEXT_BYTES = 768 * 2**20
WORKSPACE_BYTES = 96 * 2**20  # a piece of a matrix in BF16, and what cuBLAS takes through torch
LOGIT_ROWS = 256  # rows of logits on the card at once
LONGEST_PASS, SHORTEST_PASS = 8192, 256  # tokens of a prompt that go through the layers at once


@dataclass(frozen=True)
class CardPlan:
    """Bytes on a card.

    dense    weights that stay there; experts  slots of a token and a prompt's ring
    state    of a conversation of `pass_tokens`; prompt  activations of a pass of so many, or its logits if larger
    budget_bytes  all that may be taken, or None
    context  beside torch's tensors: as a rule CONTEXT_BYTES, more where more was found
    """

    pass_tokens: int
    dense_bytes: int
    experts_bytes: int
    state_bytes: int
    prompt_bytes: int
    budget_bytes: int | None = None
    context_bytes: int = CONTEXT_BYTES

    @property
    def total_bytes(self) -> int:
        parts = (self.dense_bytes, self.experts_bytes, self.state_bytes, self.prompt_bytes)
        return sum(parts) + WORKSPACE_BYTES + self.context_bytes

    def to_dict(self) -> dict:
        return {
            "pass_tokens": self.pass_tokens,
            "dense_bytes": self.dense_bytes,
            "experts_bytes": self.experts_bytes,
            "state_bytes": self.state_bytes,
            "prompt_bytes": self.prompt_bytes,
            "workspace_bytes": WORKSPACE_BYTES,
            "context_bytes": self.context_bytes,
            "total_bytes": self.total_bytes,
        }


def plan_card(store, ring: int, budget_bytes: int | None, context_bytes: int = CONTEXT_BYTES) -> CardPlan:
    """The plan with the longest prompt passes that the budget allows. Raises EngineError with the numbers."""
    tokens = LONGEST_PASS
    while True:
        plan = _plan(store, ring, tokens, budget_bytes, context_bytes)
        if budget_bytes is None or plan.total_bytes <= budget_bytes:
            return plan
        if tokens == SHORTEST_PASS:
            raise EngineError(_refusal(plan))
        tokens //= 2


def _plan(store, ring: int, tokens: int, budget_bytes: int | None, context_bytes: int) -> CardPlan:
    config = store.config
    return CardPlan(
        pass_tokens=tokens,
        dense_bytes=card_dense_bytes(store),
        experts_bytes=(ring + config.top_k) * store.block_bytes,
        state_bytes=state_bytes(config, tokens),
        prompt_bytes=_prompt_bytes(config, store.expert_shape, tokens),
        budget_bytes=budget_bytes,
        context_bytes=context_bytes,
    )


def least_bytes(store, ring: int) -> int:
    """Of a card's memory, for the shortest passes: no budget below runs."""
    return _plan(store, ring, SHORTEST_PASS, None, CONTEXT_BYTES).total_bytes


def host_dense_bytes(store) -> int:
    """Of dense weights in RAM: the embeddings, of which a token takes one row."""
    return store.dense["backbone.embeddings"].nbytes


def card_dense_bytes(store) -> int:
    """Of dense weights on the card: all but the embeddings (a head of its own is there), as stored but for routers."""
    total = sum(module.nbytes for module in store.dense.values())
    if "lm_head" in store.dense:
        total -= host_dense_bytes(store)
    for name, module in store.dense.items():
        if name.endswith(".mixer.gate") and module.format in QUANTISED:
            total += 4 * module.shape[0] * module.shape[1] - module.nbytes
    return total


def _prompt_bytes(config, expert_shape: tuple[int, int], tokens: int) -> int:
    """The most that is held at once in a pass: what all layers keep, and the widest layer."""
    inter, width = expert_shape
    hidden, piece, pairs = config.hidden_size, min(tokens, PIECE_TOKENS), tokens * config.top_k
    stream, rounded = 4 * hidden * tokens, 2 * hidden * tokens
    # Of an MoE layer: the choice (scores, keys, a stable sort of them); the latent input; the experts' results.
    choosing = stream + 40 * config.n_experts * tokens
    entering = stream + rounded + 6 * width * tokens
    results = 4 * width * pairs + 4 * width * tokens
    computing = rounded + 2 * width * tokens + results + 48 * pairs + 2 * inter * min(most_pairs(tokens), pairs)
    leaving = rounded + 4 * width * tokens + 6 * piece * (width + config.moe_shared_expert_intermediate_size)
    moe = max(choosing, entering, computing, leaving)
    inner = config.mamba_num_heads * config.mamba_head_dim
    conv_dim = inner + 2 * config.n_groups * config.ssm_state_size
    mamba = 4 * piece * (6 * inner + 5 * conv_dim)
    attention = rounded + 3 * SCORES_BYTES + 12 * QUERY_ROWS * config.num_attention_heads * config.head_dim
    mlp = 6 * piece * (hidden + config.intermediate_size)
    logits = 4 * LOGIT_ROWS * config.vocab_size
    return stream + max(moe, mamba, attention, mlp, logits)


def _refusal(plan: CardPlan) -> str:
    shown = {name.removesuffix("_bytes").replace("_", " "): value for name, value in plan.to_dict().items()}
    parts = ", ".join(
        f"{name} {show_bytes(shown[name])}" for name in ("dense", "experts", "state", "prompt", "workspace", "context")
    )
    return (
        f"vram_gib allows {show_bytes(plan.budget_bytes)}, but this model takes {show_bytes(plan.total_bytes)} of a "
        f"card's memory, with prompts in passes of {plan.pass_tokens} tokens ({parts}); ask for that much"
    )
