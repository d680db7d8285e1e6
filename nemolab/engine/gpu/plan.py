"""What an engine takes of a card's memory, by arithmetic, before anything is allocated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from nemolab.engine.gpu.attention import query_rows
from nemolab.engine.gpu.moe_step import slots_bytes
from nemolab.engine.gpu.prompt_experts import PAIRS, ring_blocks
from nemolab.engine.gpu.state import grow_capacity, state_bytes
from nemolab.engine.gpu.weights import QUANTISED
from nemolab.engine.transfers import DEFAULT
from nemolab.errors import EngineError
from nemolab.kernels.gpu.expert_step import parts_of
from nemolab.units import show_bytes

# Of a process that computes on a card, beside torch's tensors: the driver's context, kernels, the libraries' own. An
# H200 had 748 MiB in use beside them, graphs included.
CONTEXT_BYTES = 768 * 2**20
# A piece of a matrix in BF16, cuBLAS' through torch (32 MiB on Hopper, 8 elsewhere), and what torch rounds up.
WORKSPACE_BYTES = (32 + 32 + 32) * 2**20
WASTED_BYTES = 2**16  # a token of a piece: torch keeps memory of activations that others of another size cannot use
LOGIT_ROWS = 64  # rows of logits on the card at once
LONGEST_PASS, SHORTEST_PASS = 8192, 256  # tokens of a prompt that go through the layers at once
PIECES = (1024, 512)  # tokens of it that layers project at once: fewer take less memory, and decode weights more often
CONVERSATION_TOKENS = 8192  # that the plan has room for; longer ones take what the budget leaves


@dataclass(frozen=True)
class CardPlan:
    """Bytes on a card.

    dense    weights that stay there
    experts  a prompt's ring, and what a token's step takes: slots where blocks are copied, sums
    state    of a conversation of CONVERSATION_TOKENS, whose prompt came in passes
    prompt   activations of a pass of `pass_tokens`, in pieces of `piece_tokens`
    budget_bytes  all that may be taken, or None
    kept     what a trial keeps there (`nemolab.engine.trials`)
    context  beside torch's tensors: as a rule CONTEXT_BYTES, more where more was found
    """

    pass_tokens: int
    piece_tokens: int
    dense_bytes: int
    experts_bytes: int
    state_bytes: int
    prompt_bytes: int
    budget_bytes: int | None = None
    context_bytes: int = CONTEXT_BYTES
    kept_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        parts = (self.dense_bytes, self.experts_bytes, self.state_bytes, self.prompt_bytes)
        return sum(parts) + self.kept_bytes + WORKSPACE_BYTES + self.context_bytes

    def to_dict(self) -> dict:
        return {
            "pass_tokens": self.pass_tokens,
            "piece_tokens": self.piece_tokens,
            "dense_bytes": self.dense_bytes,
            "experts_bytes": self.experts_bytes,
            "state_bytes": self.state_bytes,
            "prompt_bytes": self.prompt_bytes,
            "kept_bytes": self.kept_bytes,
            "workspace_bytes": WORKSPACE_BYTES,
            "context_bytes": self.context_bytes,
            "total_bytes": self.total_bytes,
        }


def plan_card(
    store,
    ring: int,
    budget_bytes: int | None,
    context_bytes: int = CONTEXT_BYTES,
    transfer: str = DEFAULT,
    kept_bytes: int = 0,
    allowed_by: str = "vram_gib allows",
) -> CardPlan:
    """The plan with the longest prompt passes that the budget allows. Raises EngineError with the numbers.

    ring  blocks of a bank of the cache's ring; transfer  how a token's experts get there
    """
    plans = [
        replace(plan, budget_bytes=budget_bytes, context_bytes=context_bytes, kept_bytes=kept_bytes)
        for plan in _plans(store, ring, transfer)
    ]
    for plan in plans:
        if budget_bytes is None or plan.total_bytes <= budget_bytes:
            return plan
    raise EngineError(_refusal(min(plans, key=lambda plan: plan.total_bytes), allowed_by))


def least_bytes(store, ring: int, transfer: str = DEFAULT) -> int:
    """Of a card's memory, with passes of whatever length takes least: no budget below runs."""
    return min(plan.total_bytes for plan in _plans(store, ring, transfer))


def _plans(store, ring: int, transfer: str) -> Iterator[CardPlan]:
    """With passes and pieces of all lengths, the longest first."""
    config, tokens = store.config, LONGEST_PASS
    experts_bytes = ring_blocks(ring) * store.block_bytes + _step_bytes(config, store.expert_shape, transfer)
    while tokens >= SHORTEST_PASS:
        capacity = 0
        for held in range(tokens, CONVERSATION_TOKENS + 1, tokens):
            capacity = grow_capacity(capacity, held)
        for piece in PIECES:
            yield CardPlan(
                pass_tokens=tokens,
                piece_tokens=piece,
                dense_bytes=card_dense_bytes(store),
                experts_bytes=experts_bytes,
                state_bytes=state_bytes(config, capacity),
                prompt_bytes=_prompt_bytes(config, store.expert_shape, tokens, piece),
            )
        tokens //= 2


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


def _step_bytes(config, expert_shape: tuple[int, int], transfer: str) -> int:
    """Of a token's experts: two banks of slots where they are copied, and sums of each part of their neurons."""
    inter, width = expert_shape
    return slots_bytes(transfer, inter, width, config.top_k) + 4 * config.top_k * parts_of(inter) * width


def _prompt_bytes(config, expert_shape: tuple[int, int], tokens: int, piece: int) -> int:
    """The most that is held at once in a pass: the residual stream and the widest layer, or its logits; and waste."""
    hidden, heads, held = config.hidden_size, config.num_attention_heads, min(tokens, piece)
    h, queries = 2 * hidden * held, heads * config.head_dim
    rows = min(tokens, query_rows(heads, CONVERSATION_TOKENS, piece))
    attention = h + 6 * queries * held + 4 * heads * CONVERSATION_TOKENS * rows + 16 * queries * rows
    mlp = h + 6 * config.intermediate_size * held
    logits = LOGIT_ROWS * (4 * config.vocab_size + 6 * hidden)
    moe = _moe_bytes(config, expert_shape, tokens, piece)
    widest = max(moe, _mamba_bytes(config, held), attention, mlp, logits)
    return 4 * hidden * tokens + widest + min(widest, WASTED_BYTES * piece)


def _moe_bytes(config, expert_shape: tuple[int, int], tokens: int, piece: int) -> int:
    (inter, width), hidden, pairs = expert_shape, config.hidden_size, tokens * config.top_k
    held = min(tokens, piece)
    # The choice: normed tokens, logits, scores, keys and a stable sort of them; then a sort of all pairs.
    choosing = held * (4 * hidden + 44 * config.n_experts) + 12 * pairs
    entering = 2 * width * tokens + held * (2 * hidden + 4 * width + 6 * config.moe_shared_expert_intermediate_size)
    computing = 6 * width * tokens + min(PAIRS * piece, pairs) * (2 * inter + 4 * width)
    leaving = 4 * width * tokens + 2 * width * held
    return max(choosing, 48 * pairs, 32 * pairs + max(entering, computing, leaving))


def _mamba_bytes(config, tokens: int) -> int:
    inner, conv_dim = config.mamba_inner, config.mamba_conv_dim
    # Inputs and what is convolved; that and the scan's y; the gate, y, and what goes into out_proj.
    convolving, scanning, gating = 8 * conv_dim, 4 * (conv_dim + inner), 10 * inner
    return (tokens + config.conv_kernel) * (2 * config.hidden_size + max(convolving, scanning, gating))


def _refusal(plan: CardPlan, allowed_by: str) -> str:
    shown = {name.removesuffix("_bytes").replace("_", " "): value for name, value in plan.to_dict().items()}
    names = ("dense", "experts", "state", "prompt", "kept", "workspace", "context")
    parts = ", ".join(f"{name} {show_bytes(shown[name])}" for name in names if name != "kept" or plan.kept_bytes)
    return (
        f"{allowed_by} {show_bytes(plan.budget_bytes)}, but this model takes {show_bytes(plan.total_bytes)} of a "
        f"card's memory, with prompts in passes of {plan.pass_tokens} tokens ({parts}); that much is needed"
    )
