"""Attention layers: grouped queries, causal, no positions (Nemotron-H needs none: the Mamba layers carry order)."""

from __future__ import annotations

import numpy as np
import torch

from nemolab.engine.state import AttentionState
from nemolab.engine.weights import DenseWeights
from nemolab.kernels.attention_step import attention_step
from nemolab.kernels.matvec import ADD
from nemolab.kernels.rms_norm import rms_norm, rms_norm_torch
from nemolab.kernels.team import Team

SCORES_BYTES = 64 * 2**20  # float32 scores held at once: the queries of a long prompt go in pieces ...
QUERY_ROWS = 256  # ... of at most this many, which do not look at keys that all of them come before


class AttentionLayer:
    """norm -> q, k, v -> causal softmax attention -> o_proj, plus the residual."""

    def __init__(self, config, weights: DenseWeights, index: int):
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.eps = config.layer_norm_epsilon
        name, hidden = f"backbone.layers.{index}", config.hidden_size
        width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.norm = weights.vector(f"{name}.norm.weight", hidden)
        self.q_proj = weights.matrix(f"{name}.mixer.q_proj", width, hidden)
        self.k_proj = weights.matrix(f"{name}.mixer.k_proj", kv_width, hidden)
        self.v_proj = weights.matrix(f"{name}.mixer.v_proj", kv_width, hidden)
        self.o_proj = weights.matrix(f"{name}.mixer.o_proj", hidden, width)
        self._norm, self._eps = self.norm.numpy(), np.float32(self.eps)
        self._h, self._q, self._mixed = (np.empty(size, np.float32) for size in (hidden, width, width))
        self._scores = np.empty((self.heads, 0), np.float32)

    def step(self, team: Team, x: np.ndarray, state: AttentionState) -> None:
        """One token: x float32 [hidden] plus the mixer's output, in place; its key and value are appended."""
        rms_norm(x, self._norm, self._eps, self._h)
        state.reserve(1)
        self.q_proj.multiply(self._h, self._q)
        self.k_proj.multiply(self._h, state.key_array[state.tokens])
        self.v_proj.multiply(self._h, state.value_array[state.tokens])
        state.tokens += 1
        if self._scores.shape[1] < state.tokens:
            self._scores = np.empty((self.heads, state.keys.shape[0]), np.float32)
        attention_step(
            team, self._q, state.key_array, state.value_array, state.tokens, self.head_dim, self._scores, self._mixed
        )
        self.o_proj.multiply(self._mixed, x, ADD)

    def prompt(self, x: torch.Tensor, state: AttentionState) -> torch.Tensor:
        """x [tokens, hidden] -> x plus the mixer's output, in place; keys and values are appended."""
        tokens, before = x.shape[0], state.tokens
        h = rms_norm_torch(x, self.norm, self.eps)
        state.reserve(tokens)
        state.keys[before : before + tokens] = self.k_proj.apply(h)
        state.values[before : before + tokens] = self.v_proj.apply(h)
        state.tokens = before + tokens
        queries = self.q_proj.apply(h)
        rows = max(1, min(QUERY_ROWS, SCORES_BYTES // (4 * self.heads * state.tokens)))
        mixed, shape = torch.empty_like(queries), (self.heads, self.kv_heads, self.head_dim)
        for start in range(0, tokens, rows):
            stop = min(start + rows, tokens)
            mixed[start:stop] = attend(queries[start:stop], state.keys, state.values, before + start, shape)
        x += self.o_proj.apply(mixed)
        return x


def attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, position: int, shape: tuple[int, int, int]
) -> torch.Tensor:
    """Queries [rows, heads * head_dim] at position, position + 1, ... over everything up to themselves.

    keys, values [tokens or more, kv_heads * head_dim]; shape  (heads, kv_heads, head_dim)
    """
    heads, kv_heads, head_dim = shape
    rows, device = queries.shape[0], queries.device
    seen = position + rows
    keys = keys[:seen].view(seen, kv_heads, head_dim).permute(1, 2, 0)
    values = values[:seen].view(seen, kv_heads, head_dim).transpose(0, 1)
    # [rows, kv, group * dim] -> [kv, group * rows, dim]: the heads that share keys go as one matrix.
    group = heads // kv_heads
    q = queries.view(rows, kv_heads, group, head_dim).permute(1, 2, 0, 3)
    scores = q.reshape(kv_heads, group * rows, head_dim) @ keys * head_dim**-0.5
    future = torch.arange(seen, device=device) > torch.arange(position, seen, device=device)[:, None]
    scores.view(kv_heads, group, rows, seen).masked_fill_(future, -torch.inf)
    mixed = torch.softmax(scores, dim=-1) @ values
    return mixed.view(kv_heads, group, rows, head_dim).permute(2, 0, 1, 3).reshape(rows, -1)
