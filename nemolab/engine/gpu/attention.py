"""Attention layers on a card: a token by a step kernel in float32, prompts with BF16 inputs.

As in the other layers, what goes into a matrix of a prompt is rounded to BF16; scores, softmax, keys and values stay in
float32.
"""

from __future__ import annotations

import torch

from nemolab.engine.attention import QUERY_ROWS, SCORES_BYTES, attend
from nemolab.engine.gpu.layers import Norm
from nemolab.engine.gpu.state import AttentionState
from nemolab.engine.gpu.weights import CardWeights
from nemolab.kernels.matvec import ADD


class AttentionSteps:
    """The one-token attention that a model's layers share: scratch for the capacity in use, the place in the card."""

    def __init__(self, config, device: torch.device, operators):
        self.shape = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        self._device, self._operators = device, operators
        self._tokens = torch.zeros(1, dtype=torch.int32, device=device)
        self._count = self._capacity = 0
        self._step = None

    def run(self, q, k, v, state: AttentionState, mixed) -> None:
        """Append k and v to the state and attend; shapes as in `kernels.gpu.attention_step`."""
        state.reserve(1)
        capacity = state.keys.shape[0]
        if capacity != self._capacity:
            self._step = self._operators.AttentionStep(*self.shape, capacity, self._device)
            self._capacity = capacity
        state.tokens += 1
        if state.tokens != self._count:
            self._tokens.fill_(state.tokens)
            self._count = state.tokens
        self._step.run(q, k, v, state.keys, state.values, self._tokens, mixed)


class AttentionLayer:
    """norm -> q, k, v -> causal softmax attention -> o_proj, plus the residual."""

    def __init__(self, config, weights: CardWeights, index: int, steps: AttentionSteps):
        self.heads, self.kv_heads, self.head_dim = steps.shape
        self._steps = steps
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
        state.reserve(tokens)
        h = self.norm.new(x)
        self.k_proj.apply(h, state.keys[before : before + tokens])
        self.v_proj.apply(h, state.values[before : before + tokens])
        state.tokens = before + tokens
        rows = max(1, min(QUERY_ROWS, SCORES_BYTES // (4 * self.heads * state.tokens)))
        for start in range(0, tokens, rows):
            stop = min(start + rows, tokens)
            queries = self.q_proj.apply(h[start:stop])
            mixed = attend(queries, state.keys, state.values, before + start, self._steps.shape)
            self.o_proj.apply(mixed.bfloat16(), x[start:stop], ADD)
