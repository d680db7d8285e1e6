"""Attention layers on a card: a token by a step kernel in float32, prompts with BF16 inputs.

As in the other layers, what goes into a matrix of a prompt is rounded to BF16; scores, softmax, keys and values stay in
float32.
"""

from __future__ import annotations

import torch

from nemolab.engine.attention import QUERY_ROWS
from nemolab.engine.gpu.layers import Norm
from nemolab.engine.gpu.state import AttentionState, reserve_all
from nemolab.engine.gpu.weights import CardWeights
from nemolab.kernels.matvec import ADD

SCORES_BYTES = 40 * 2**10  # of float32 scores held at once for each token of a piece: about as a Mamba layer's inputs


class AttentionSteps:
    """The one-token attention that a model's layers share: scratch for the capacity in use.

    tokens  int32 [1] on the device: how many tokens there are with the one under way, written before its first layer
    """

    def __init__(self, config, device: torch.device, operators, tokens: torch.Tensor):
        self.shape = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        self._device, self._operators, self._tokens = device, operators, tokens
        self._capacity, self._step = 0, None

    def reserve(self, states: list[AttentionState]) -> None:
        """Before a token: room for it in the states of all layers, and scratch memory as large."""
        reserve_all(states, 1)
        for state in states:
            if state.keys.shape[0] != self._capacity:
                self._capacity = state.keys.shape[0]
                self._step = self._operators.AttentionStep(*self.shape, self._capacity, self._device)

    def run(self, q, k, v, state: AttentionState, mixed) -> None:
        """Append k and v to the state, whose count is kept by others, and attend: see `kernels.gpu.attention_step`."""
        self._step.run(q, k, v, state.keys, state.values, self._tokens, mixed)


class AttentionLayer:
    """norm -> q, k, v -> causal softmax attention -> o_proj, plus the residual."""

    def __init__(self, config, weights: CardWeights, index: int, steps: AttentionSteps):
        self.heads, self.kv_heads, self.head_dim = steps.shape
        self._steps, self._piece_tokens = steps, weights.piece_tokens
        name, hidden = f"backbone.layers.{index}", config.hidden_size
        width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.norm = Norm(weights, f"{name}.norm.weight", hidden, config.layer_norm_epsilon)
        self.q_proj = weights.matrix(f"{name}.mixer.q_proj", width, hidden)
        self.k_proj = weights.matrix(f"{name}.mixer.k_proj", kv_width, hidden)
        self.v_proj = weights.matrix(f"{name}.mixer.v_proj", kv_width, hidden)
        self.o_proj = weights.matrix(f"{name}.mixer.o_proj", hidden, width)
        sizes = (hidden, width, kv_width, kv_width, width)
        self._h, self._q, self._k, self._v, self._mixed = (torch.empty(n, device=weights.device) for n in sizes)

    def step(self, x: torch.Tensor, state: AttentionState) -> None:
        """One token: x float32 [hidden] plus the mixer's output, in place; its key and value are appended."""
        self.norm.run(x, self._h)
        self.q_proj.multiply(self._h, self._q)
        self.k_proj.multiply(self._h, self._k)
        self.v_proj.multiply(self._h, self._v)
        self._steps.run(self._q, self._k, self._v, state, self._mixed)
        self.o_proj.multiply(self._mixed, x, ADD)

    def prompt(self, x: torch.Tensor, state: AttentionState) -> None:
        """x float32 [tokens, hidden] plus the mixer's output, in place; keys and values are appended."""
        tokens, before = x.shape[0], state.tokens
        state.reserve(tokens)  # as a rule there is room already: see `CardModel`
        for start in range(0, tokens, self._piece_tokens):
            piece = slice(before + start, before + min(start + self._piece_tokens, tokens))
            h = self.norm.new(x[start : start + self._piece_tokens])
            self.k_proj.apply(h, state.keys[piece])
            self.v_proj.apply(h, state.values[piece])
        state.tokens, position = before + tokens, before
        rows = query_rows(self.heads, state.tokens, self._piece_tokens)
        for piece in x.split(self._piece_tokens):
            queries = self.q_proj.apply(self.norm.new(piece))
            mixed = torch.empty(queries.shape, dtype=torch.bfloat16, device=x.device)
            for some, out in zip(queries.split(rows), mixed.split(rows), strict=True):
                out.copy_(attend(some, state.keys, state.values, position, self._steps.shape))
                position += some.shape[0]
            self.o_proj.apply(mixed, piece, ADD)


def query_rows(heads: int, tokens: int, piece_tokens: int) -> int:
    """How many queries attend at once to so many keys: SCORES_BYTES bounds what they take."""
    return max(1, min(QUERY_ROWS, piece_tokens * SCORES_BYTES // (4 * heads * tokens)))


def attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, position: int, shape: tuple[int, int, int]
) -> torch.Tensor:
    """`nemolab.engine.attention.attend` with one matrix of scores, changed in place, instead of three."""
    (heads, kv_heads, head_dim), rows = shape, queries.shape[0]
    seen, group = position + rows, heads // kv_heads
    keys = keys[:seen].view(seen, kv_heads, head_dim).permute(1, 2, 0)
    values = values[:seen].view(seen, kv_heads, head_dim).transpose(0, 1)
    # [rows, kv, group * dim] -> [kv, group * rows, dim]: the heads that share keys go as one matrix.
    q = (queries * head_dim**-0.5).view(rows, kv_heads, group, head_dim).permute(1, 2, 0, 3)
    scores = q.reshape(kv_heads, group * rows, head_dim) @ keys
    future = torch.arange(seen, device=q.device) > torch.arange(position, seen, device=q.device)[:, None]
    scores.view(kv_heads, group, rows, seen).masked_fill_(future, -torch.inf)
    scores.sub_(scores.amax(-1, keepdim=True)).exp_()
    mixed = (scores @ values).div_(scores.sum(-1, keepdim=True))
    return mixed.view(kv_heads, group, rows, head_dim).permute(2, 0, 1, 3).reshape(rows, -1)
