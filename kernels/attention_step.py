"""One token's attention over everything before it and itself: grouped queries, no positions, float32.

mixed[h] = sum over tokens of softmax(q[h] . k / sqrt(head_dim)) * v,   h shares keys and values with its neighbours

Reads keys and values once for each query head. Scores: dots in lanes; the softmax's sum and the weighted values run
over tokens in order. Parts take whole heads.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from nemolab.errors import EngineError
from nemolab.jit import jit
from nemolab.kernels import simd
from nemolab.kernels.matvec import dot_f32
from nemolab.kernels.team import Team


def attention_step_torch(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, head_dim: int) -> torch.Tensor:
    """The plain twin: q [heads * head_dim], keys and values [tokens, kv_heads * head_dim] -> [heads * head_dim]."""
    q = q.view(-1, head_dim)
    keys = keys.view(keys.shape[0], -1, head_dim).transpose(0, 1)
    values = values.view(values.shape[0], -1, head_dim).transpose(0, 1)
    repeat = q.shape[0] // keys.shape[0]
    keys, values = keys.repeat_interleave(repeat, 0), values.repeat_interleave(repeat, 0)
    scores = torch.softmax((keys @ q[..., None])[..., 0] * head_dim**-0.5, dim=-1)
    return (scores[:, None] @ values)[:, 0].flatten()


@jit
def _attention_kernel(part, parts, q, keys, values, tokens, head_dim, scores, mixed):
    heads, kv_width = q.shape[0] // head_dim, keys.shape[1]
    share = heads // (kv_width // head_dim)
    scale = np.float32(1 / math.sqrt(head_dim))
    q_at, keys_at, values_at = simd.address_of(q), simd.address_of(keys), simd.address_of(values)
    mixed_at = simd.address_of(mixed)
    whole = head_dim // 8 * 8
    for head in range(heads * part // parts, heads * (part + 1) // parts):
        start = head // share * head_dim
        largest = np.float32(-np.inf)
        for t in range(tokens):
            score = dot_f32(q_at + 4 * head * head_dim, keys_at + 4 * (t * kv_width + start), head_dim) * scale
            scores[head, t] = score
            largest = max(largest, score)
        sum_ = np.float32(0)
        mine = mixed[head * head_dim : (head + 1) * head_dim]
        mine[:] = 0
        at = mixed_at + 4 * head * head_dim
        for t in range(tokens):
            weight = np.float32(math.exp(scores[head, t] - largest))
            sum_ += weight
            weights, row = simd.splat(weight), values_at + 4 * (t * kv_width + start)
            for k in range(0, whole, 8):
                simd.store_f32(at + 4 * k, simd.fma(weights, simd.load_f32(row + 4 * k), simd.load_f32(at + 4 * k)))
            for k in range(whole, head_dim):
                mine[k] += weight * values[t, start + k]
        for k in range(head_dim):
            mine[k] /= sum_


def attention_step(
    team: Team,
    q: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    tokens: int,
    head_dim: int,
    scores: np.ndarray,
    mixed: np.ndarray,
) -> None:
    """q float32 [heads * head_dim] over the first `tokens` rows of keys and values [capacity, kv_heads * head_dim].

    scores  scratch float32 [heads, tokens or more]; mixed float32 [heads * head_dim] receives the result
    Raises EngineError where sizes do not fit.
    """
    heads = q.shape[0] // head_dim
    if not 0 < tokens <= keys.shape[0] or keys.shape != values.shape or mixed.shape != q.shape:
        raise EngineError(f"attention over {tokens} tokens with keys {keys.shape}, values {values.shape}, q {q.shape}")
    if scores.shape[0] < heads or scores.shape[1] < tokens:
        raise EngineError(f"scores {scores.shape} for {heads} heads and {tokens} tokens")
    work = heads * tokens * head_dim * 8
    team.run(_attention_kernel, work, q, keys, values, tokens, head_dim, scores, mixed)
