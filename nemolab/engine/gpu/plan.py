"""What an engine takes of a card's memory, by arithmetic, before anything is allocated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from nemolab.engine.gpu.attention import query_rows
from nemolab.engine.gpu.moe_step import slots_bytes
from nemolab.engine.gpu.prompt_experts import PAIRS_PER_PIECE_TOKEN, ring_blocks
from nemolab.engine.gpu.state import grow_capacity, state_bytes
from nemolab.engine.gpu.weights import list_tensors
from nemolab.engine.transfers import DEFAULT
from nemolab.errors import EngineError
from nemolab.kernels.gpu.expert_step import parts_of
from nemolab.kernels.gpu.linear_prompt import PIECE_BYTES
from nemolab.units import show_bytes

# Of a process that computes on a card, beside torch's tensors: the driver's context, kernels, the libraries' own. An
# H200 had up to 758 MiB in use beside them, graphs included; for another card that is an assumption.
CONTEXT_BYTES = 768 * 2**20
# Of it, what is still to come when a card was just opened: kernels and graphs. The H200 took some 100 MiB from a loaded
# model to the end of an answer.
LATER_BYTES = 192 * 2**20
# What may come between one look and the next: the driver takes memory for kernels and graphs in small pieces.
SPARE_BYTES = 16 * 2**20
LEAST_CONTEXT_BYTES = 64 * 2**20  # less cannot be a context: another program let go of memory while ours was made
# A piece of a matrix decoded, cuBLAS' through torch (32 MiB on Hopper, 8 elsewhere), and what torch rounds up.
WORKSPACE_BYTES = (32 + 32 + 32) * 2**20
WASTED_BYTES = 2**16  # a token of a piece: torch keeps memory of activations that others of another size cannot use
LOGIT_ROWS = 64  # rows of logits on the card at once
LONGEST_PASS, SHORTEST_PASS = 8192, 256  # tokens of a prompt that go through the layers at once
# Tokens of it that layers project at once: fewer take less memory, and decode weights more often.
PIECES = (1024, 512, 256)
SPLIT_TOKENS = 64  # of a conversation for each of which a token's attention keeps a sum and more
ROUTER, HEADS, HALVES = ".mixer.gate", ("lm_head", "backbone.embeddings"), ("bf16", "f16")
CONVERSATION_TOKENS = 8192  # that the plan has room for; longer ones take what the budget leaves


@dataclass(frozen=True)
class CardPlan:
    """Bytes on a card.

    dense    weights that stay there, vectors in float32
    experts  a prompt's ring, and what a token's step takes: slots where blocks are copied, sums
    state    of a conversation of CONVERSATION_TOKENS, whose prompt came in passes
    prompt   activations of a pass of `pass_tokens`, in pieces of `piece_tokens`
    workspace  WORKSPACE_BYTES, and what layers keep to compute a token in
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
    workspace_bytes: int = WORKSPACE_BYTES
    budget_bytes: int | None = None
    context_bytes: int = CONTEXT_BYTES
    kept_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        parts = (self.dense_bytes, self.experts_bytes, self.state_bytes, self.prompt_bytes)
        return sum(parts) + self.kept_bytes + self.workspace_bytes + self.context_bytes

    def to_dict(self) -> dict:
        return {
            "pass_tokens": self.pass_tokens,
            "piece_tokens": self.piece_tokens,
            "dense_bytes": self.dense_bytes,
            "experts_bytes": self.experts_bytes,
            "state_bytes": self.state_bytes,
            "prompt_bytes": self.prompt_bytes,
            "kept_bytes": self.kept_bytes,
            "workspace_bytes": self.workspace_bytes,
            "context_bytes": self.context_bytes,
            "total_bytes": self.total_bytes,
        }


def context_bytes(found_bytes: int | None) -> int:
    """What to plan for beside torch where so much was found of a card that was just opened (None: not known).

    As assumed or, where less was found, that and what is still to come; more where more was found. Should that be too
    little after all, `Guard` finds it and torch gets less.
    """
    if found_bytes is None or found_bytes < LEAST_CONTEXT_BYTES:
        return CONTEXT_BYTES
    return max(found_bytes + SPARE_BYTES, min(CONTEXT_BYTES, found_bytes + LATER_BYTES))


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
                prompt_bytes=_prompt_bytes(store, tokens, piece),
                workspace_bytes=WORKSPACE_BYTES + _token_bytes(config, capacity),
            )
        tokens //= 2


def host_dense_bytes(store) -> int:
    """Of dense weights in RAM: the embeddings, of which a token takes one row."""
    return store.dense["backbone.embeddings"].nbytes


def card_dense_bytes(store) -> int:
    """Of dense weights on the card: all but the embeddings where a head of its own is there."""
    return sum(list_tensors(store.dense))


def _step_bytes(config, expert_shape: tuple[int, int], transfer: str) -> int:
    """Of a token's experts: two banks of slots where they are copied, and sums of each part of their neurons."""
    inter, width = expert_shape
    return slots_bytes(transfer, inter, width, config.top_k) + 4 * config.top_k * parts_of(inter) * width


def _token_bytes(config, capacity: int) -> int:
    """What layers keep to compute a token in, float32, with room for attention over so many tokens."""
    hidden, heads, kinds = config.hidden_size, config.num_attention_heads, list(config.layer_types)
    inner, projected = config.mamba_inner, config.mamba_inner + config.mamba_conv_dim + config.mamba_num_heads
    queries, keys = heads * config.head_dim, config.num_key_value_heads * config.head_dim
    layers = kinds.count("mamba") * (hidden + projected + inner)
    layers += kinds.count("attention") * (hidden + 2 * queries + 2 * keys)
    layers += kinds.count("moe") * config.moe_shared_expert_intermediate_size
    layers += kinds.count("mlp") * (hidden + config.intermediate_size)
    scratch = heads * (config.head_dim + 2) * -(-capacity // SPLIT_TOKENS)
    return 4 * (layers + scratch + config.n_experts + 4 * hidden + config.vocab_size)


def _prompt_bytes(store, tokens: int, piece: int) -> int:
    """The most that is held at once in a pass: the residual stream and the widest layer, or its logits; and waste."""
    config, held = store.config, min(tokens, piece)
    hidden, heads = config.hidden_size, config.num_attention_heads
    h, queries = 2 * hidden * held, heads * config.head_dim
    rows = min(tokens, query_rows(heads, CONVERSATION_TOKENS, piece))
    attention = h + 6 * queries * held + 4 * heads * CONVERSATION_TOKENS * rows + 16 * queries * rows
    mlp = h + 6 * config.intermediate_size * held
    logits = LOGIT_ROWS * (4 * config.vocab_size + 6 * hidden)
    widest = max(_moe_bytes(store, tokens, piece), _mamba_bytes(config, held), attention, mlp, logits)
    widest += _float32_bytes(store, held)
    return 4 * hidden * tokens + widest + min(widest, WASTED_BYTES * piece)


def _moe_bytes(store, tokens: int, piece: int) -> int:
    config, (inter, width) = store.config, store.expert_shape
    hidden, pairs = config.hidden_size, tokens * config.top_k
    held, shared = min(tokens, piece), config.moe_shared_expert_intermediate_size
    # Of a token and an expert: logit, score and key; the sorted keys and their ids; as much and more to sort them.
    router = (4 + 4 + 4) + (4 + 8) + 20
    # Of a pair: its expert (int64) and weight; once sorted its place, the pair at a place, and that one's share.
    routed, placed = 4 + 8, 4 + 4 + 4
    sorting = 5 * 8  # experts and pairs in order, and what sorting takes: int64 all
    # The choice: normed tokens and what the router makes of a piece, pairs of all so far; then those pieces as one.
    choosing = held * (4 * hidden + router * config.n_experts) + routed * pairs + _router_copy_bytes(store)
    ordering = pairs * (routed + max(routed, sorting + placed))
    # The experts' input in BF16 of all tokens, and a piece's: normed, projected; the shared expert, float32 and BF16.
    entering = 2 * width * tokens + held * (2 * hidden + 4 * width + (4 + 2) * shared)
    # Input and sums of all tokens; of the pairs at once what is between up and down in BF16, and their results.
    computing = (2 + 4) * width * tokens + min(PAIRS_PER_PIECE_TOKEN * piece, pairs) * (2 * inter + 4 * width)
    # The sums, and a piece of them in BF16.
    leaving = 4 * width * tokens + 2 * width * held
    return max(choosing, ordering, pairs * (routed + placed) + max(entering, computing, leaving))


def _router_copy_bytes(store) -> int:
    """In a prompt a router that is not stored in float32 is multiplied as a copy that is."""
    routers = [module for name, module in store.dense.items() if name.endswith(ROUTER) and module.format in HALVES]
    return max((4 * module.shape[0] * module.shape[1] for module in routers), default=0)


def _float32_bytes(store, tokens: int) -> int:
    """Of matrices that prompts multiply in float32: inputs in it, and the products of a piece of rows."""
    most = 0
    for name, module in store.dense.items():
        if module.format in ("f16", "f32") and len(module.shape) == 2 and not name.endswith(ROUTER):
            (rows, columns), held = module.shape, LOGIT_ROWS if name in HEADS else tokens
            most = max(most, 4 * held * (columns + min(rows, max(1, PIECE_BYTES // (4 * columns)))))
    return most


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
