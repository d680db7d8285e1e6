"""One token's attention over everything before it and itself, on the card: grouped queries, no positions.

mixed[h] = sum over tokens of softmax(q[h] . k / sqrt(head_dim)) * v,   h shares keys and values with its neighbours

    q float32 [heads * head_dim]; k, v float32 [kv_heads * head_dim]: the token's own, appended to
    keys, values [capacity, kv_heads * head_dim], float32 or bfloat16, whose row tokens - 1 they become

Reads keys and values once for all query heads that share them: 2 * tokens * kv_heads * head_dim elements. The number of
tokens is read from the card, so that one CUDA graph serves every position; the grid covers the capacity.

Order: stretches of SPLIT tokens each keep their largest score, sum and mix, in pieces of TOKENS; the second launch adds
the stretches in their order. Neither depends on the card or on the capacity.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nemolab.errors import EngineError
from nemolab.kernels.attention_step import attention_step_torch

__all__ = ["AttentionStep", "attention_step_torch"]

_SPLIT, _TOKENS = 256, 32


@triton.jit
def _split_kernel(
    q, k, v, keys, values, tokens_ptr, largest_out, sums_out, mixes_out, scale, share, kv_width, head_dim,
    splits, SPLIT: tl.constexpr, TOKENS: tl.constexpr, SHARE: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    # grid: (kv_heads, splits of the capacity)
    kv_head, split = tl.program_id(0), tl.program_id(1)
    tokens = tl.load(tokens_ptr)
    start = split * SPLIT
    if start < tokens:
        mine, dim = tl.arange(0, SHARE), tl.arange(0, DIM)
        in_share, in_dim = mine < share, dim < head_dim
        query = (kv_head * share + mine)[:, None] * head_dim + dim[None, :]
        here = in_share[:, None] & in_dim[None, :]
        q_tile = tl.load(q + query, mask=here, other=0.0) * scale
        new_k = tl.load(k + kv_head * head_dim + dim, mask=in_dim, other=0.0).to(keys.dtype.element_ty)
        new_v = tl.load(v + kv_head * head_dim + dim, mask=in_dim, other=0.0).to(keys.dtype.element_ty)
        largest = tl.full([SHARE], float("-inf"), tl.float32)
        total = tl.zeros([SHARE], tl.float32)
        mix = tl.zeros([SHARE, DIM], tl.float32)
        for first in range(start, tl.minimum(start + SPLIT, tokens), TOKENS):
            token = first + tl.arange(0, TOKENS)
            at = token.to(tl.int64)[:, None] * kv_width + kv_head * head_dim + dim[None, :]
            held = (token < tokens - 1)[:, None] & in_dim[None, :]
            own = (token == tokens - 1)[:, None] & in_dim[None, :]
            key = tl.where(own, new_k[None, :], tl.load(keys + at, mask=held, other=0.0))
            value = tl.where(own, new_v[None, :], tl.load(values + at, mask=held, other=0.0))
            tl.store(keys + at, key, mask=own)
            tl.store(values + at, value, mask=own)
            scores = tl.dot(q_tile, tl.trans(key.to(tl.float32)), input_precision="ieee")
            scores = tl.where((token < tokens)[None, :], scores, float("-inf"))
            now = tl.maximum(largest, tl.max(scores, 1))
            fade, weight = tl.exp(largest - now), tl.exp(scores - now[:, None])
            total = total * fade + tl.sum(weight, 1)
            mix = mix * fade[:, None] + tl.dot(weight, value.to(tl.float32), input_precision="ieee")
            largest = now
        head = kv_head * share + mine
        tl.store(largest_out + head * splits + split, largest, mask=in_share)
        tl.store(sums_out + head * splits + split, total, mask=in_share)
        at = (head * splits + split)[:, None] * head_dim + dim[None, :]
        tl.store(mixes_out + at, mix, mask=here)


@triton.jit
def _merge_kernel(
    largest_in, sums_in, mixes_in, tokens_ptr, mixed, head_dim, splits, SPLIT: tl.constexpr, DIM: tl.constexpr
):
    # grid: (heads,)
    head = tl.program_id(0)
    dim = tl.arange(0, DIM)
    used = tl.cdiv(tl.load(tokens_ptr), SPLIT)
    largest = tl.load(largest_in + head * splits)
    for split in range(1, used):
        largest = tl.maximum(largest, tl.load(largest_in + head * splits + split))
    total = 0.0
    mix = tl.zeros([DIM], tl.float32)
    for split in range(0, used):
        fade = tl.exp(tl.load(largest_in + head * splits + split) - largest)
        total += tl.load(sums_in + head * splits + split) * fade
        mix += tl.load(mixes_in + (head * splits + split) * head_dim + dim, mask=dim < head_dim, other=0.0) * fade
    tl.store(mixed + head * head_dim + dim, mix / total, mask=dim < head_dim)


class AttentionStep:
    """The step of layers with these sizes, with scratch memory for `capacity` tokens on `device`; layers share it."""

    def __init__(self, heads: int, kv_heads: int, head_dim: int, capacity: int, device):
        if heads % kv_heads:
            raise EngineError(f"{heads} query heads do not share {kv_heads} key heads evenly")
        self._heads, self._kv_heads, self._head_dim, self._capacity = heads, kv_heads, head_dim, capacity
        self._splits = triton.cdiv(capacity, _SPLIT)
        self._largest = torch.empty(heads, self._splits, dtype=torch.float32, device=device)
        self._sums = torch.empty_like(self._largest)
        self._mixes = torch.empty(heads, self._splits, head_dim, dtype=torch.float32, device=device)

    def run(self, q, k, v, keys, values, tokens: torch.Tensor, mixed: torch.Tensor) -> None:
        """Append k and v as row tokens - 1 and attend over all `tokens` rows; shapes as in the file's contract.

        tokens  int32 [1] on the card, from 1 to the capacity (not checked: nothing waits for the card)
        mixed   float32 [heads * head_dim] receives the result
        Raises EngineError where sizes, types or devices do not fit.
        """
        width, kv_width = self._heads * self._head_dim, self._kv_heads * self._head_dim
        wanted = (("q", q, (width,)), ("k", k, (kv_width,)), ("v", v, (kv_width,)), ("mixed", mixed, (width,)))
        for name, tensor, shape in wanted:
            if tuple(tensor.shape) != shape or tensor.dtype != torch.float32 or not tensor.is_contiguous():
                raise EngineError(f"attention's {name} is {tensor.dtype} {list(tensor.shape)}, not float32 {shape}")
        cache = (self._capacity, kv_width)
        for name, tensor in (("keys", keys), ("values", values)):
            fits = tensor.dtype == keys.dtype and tensor.dtype in (torch.float32, torch.bfloat16)
            if tuple(tensor.shape) != cache or not fits or not tensor.is_contiguous():
                raise EngineError(f"attention's {name}: {tensor.dtype} {list(tensor.shape)}, not contiguous {cache}")
        devices = {str(t.device) for t in (q, k, v, keys, values, tokens, mixed, self._sums)}
        if len(devices) > 1 or tokens.dtype != torch.int32 or tokens.numel() != 1:
            raise EngineError(f"attention on {sorted(devices)} over {tokens.dtype} {list(tokens.shape)} tokens")
        share, dim = self._heads // self._kv_heads, triton.next_power_of_2(max(16, self._head_dim))
        _split_kernel[(self._kv_heads, self._splits)](
            q, k, v, keys, values, tokens, self._largest, self._sums, self._mixes, self._head_dim**-0.5, share,
            kv_width, self._head_dim, self._splits, SPLIT=_SPLIT, TOKENS=_TOKENS,
            SHARE=triton.next_power_of_2(max(16, share)), DIM=dim, num_warps=4,
        )  # fmt: skip
        _merge_kernel[(self._heads,)](
            self._largest, self._sums, self._mixes, tokens, mixed, self._head_dim, self._splits,
            SPLIT=_SPLIT, DIM=dim, num_warps=4 if dim >= 128 else 1,
        )  # fmt: skip
