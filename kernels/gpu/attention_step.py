"""One token's attention over everything before it and itself, on the card: grouped queries, no positions.

mixed[h] = sum over tokens of softmax(q[h] . k / sqrt(head_dim)) * v,   h shares keys and values with its neighbours

    q float32 [heads * head_dim]; k, v float32 [kv_heads * head_dim]: the token's own, appended to
    keys, values [capacity, kv_heads * head_dim], float32 or bfloat16, whose row tokens - 1 they become

Reads keys and values once for all query heads that share them: 2 * tokens * kv_heads * head_dim elements. The number of
tokens is read from the card, so that one CUDA graph serves every position; the grid covers the capacity.

Order (split over the tokens, as flash decoding is): each split of TOKENS tokens has a partial softmax, its largest
score, sum and mix; the second launch merges them, MERGE splits at a time. Neither depends on card or capacity.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nemolab.errors import EngineError
from nemolab.kernels.attention_step import attention_step_torch
from nemolab.kernels.gpu.launch import check_tensor

__all__ = ["AttentionStep", "attention_step_torch"]

_TOKENS, _MERGE = 64, 32


@triton.jit
def _split_kernel(
    q, k, v, keys, values, tokens_ptr, largest_out, sums_out, mixes_out, scale, share, kv_width, head_dim, splits,
    TOKENS: tl.constexpr, SHARE: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    # grid: (kv_heads, splits of the capacity)
    kv_head, split = tl.program_id(0), tl.program_id(1)
    tokens = tl.load(tokens_ptr)
    token = split * TOKENS + tl.arange(0, TOKENS)
    if split * TOKENS < tokens:
        mine, dim = tl.arange(0, SHARE), tl.arange(0, DIM)
        in_share, in_dim = mine < share, dim < head_dim
        head = kv_head * share + mine
        here = in_share[:, None] & in_dim[None, :]
        q_tile = tl.load(q + head[:, None] * head_dim + dim[None, :], mask=here, other=0.0) * scale
        new_k = tl.load(k + kv_head * head_dim + dim, mask=in_dim, other=0.0).to(keys.dtype.element_ty)
        new_v = tl.load(v + kv_head * head_dim + dim, mask=in_dim, other=0.0).to(values.dtype.element_ty)
        at = token.to(tl.int64)[:, None] * kv_width + kv_head * head_dim + dim[None, :]
        held = (token < tokens - 1)[:, None] & in_dim[None, :]
        own = (token == tokens - 1)[:, None] & in_dim[None, :]
        key = tl.where(own, new_k[None, :], tl.load(keys + at, mask=held, other=0.0))
        value = tl.where(own, new_v[None, :], tl.load(values + at, mask=held, other=0.0))
        tl.store(keys + at, key, mask=own)
        tl.store(values + at, value, mask=own)
        scores = tl.dot(q_tile, tl.trans(key.to(tl.float32)), input_precision="ieee")
        scores = tl.where((token < tokens)[None, :], scores, float("-inf"))
        largest = tl.max(scores, 1)
        weight = tl.exp(scores - largest[:, None])
        mix = tl.dot(weight, value.to(tl.float32), input_precision="ieee")
        place = head * splits + split
        tl.store(largest_out + place, largest, mask=in_share)
        tl.store(sums_out + place, tl.sum(weight, 1), mask=in_share)
        tl.store(mixes_out + place[:, None] * head_dim + dim[None, :], mix, mask=here)


@triton.jit
def _merge_kernel(
    largest_in, sums_in, mixes_in, tokens_ptr, mixed, head_dim, splits,
    TOKENS: tl.constexpr, MERGE: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    # grid: (heads,)
    head = tl.program_id(0)
    split, dim = tl.arange(0, MERGE), tl.arange(0, DIM)
    used = tl.cdiv(tl.load(tokens_ptr), TOKENS)
    start = head * splits
    most = tl.full([MERGE], float("-inf"), tl.float32)
    for first in range(0, used, MERGE):
        inside = first + split < used
        most = tl.maximum(most, tl.load(largest_in + start + first + split, mask=inside, other=float("-inf")))
    largest = tl.max(most, 0)
    total = tl.zeros([MERGE], tl.float32)
    mix = tl.zeros([DIM], tl.float32)
    for first in range(0, used, MERGE):
        inside = first + split < used
        fade = tl.exp(tl.load(largest_in + start + first + split, mask=inside, other=float("-inf")) - largest)
        total += tl.load(sums_in + start + first + split, mask=inside, other=0.0) * fade
        at = mixes_in + (start + first + split)[:, None] * head_dim + dim[None, :]
        tile = tl.load(at, mask=inside[:, None] & (dim < head_dim)[None, :], other=0.0)
        mix += tl.sum(tile * fade[:, None], 0)
    tl.store(mixed + head * head_dim + dim, mix / tl.sum(total, 0), mask=dim < head_dim)


class AttentionStep:
    """The step of layers with these sizes, with scratch memory for `capacity` tokens on `device`; layers share it."""

    def __init__(self, heads: int, kv_heads: int, head_dim: int, capacity: int, device):
        if heads % kv_heads:
            raise EngineError(f"{heads} query heads do not share {kv_heads} key heads evenly")
        self._heads, self._kv_heads, self._head_dim, self._capacity = heads, kv_heads, head_dim, capacity
        self._splits = triton.cdiv(capacity, _TOKENS)
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
        cached = torch.bfloat16 if keys.dtype == torch.bfloat16 else torch.float32
        wanted = {
            "q": (q, torch.float32, (width,)),
            "k": (k, torch.float32, (kv_width,)),
            "v": (v, torch.float32, (kv_width,)),
            "keys": (keys, cached, (self._capacity, kv_width)),
            "values": (values, cached, (self._capacity, kv_width)),
            "tokens": (tokens, torch.int32, (1,)),
            "mixed": (mixed, torch.float32, (width,)),
        }
        for name, expected in wanted.items():
            check_tensor("attention's", name, *expected, self._sums.device)
        share, dim = self._heads // self._kv_heads, triton.next_power_of_2(max(16, self._head_dim))
        _split_kernel[(self._kv_heads, self._splits)](
            q, k, v, keys, values, tokens, self._largest, self._sums, self._mixes, self._head_dim**-0.5, share,
            kv_width, self._head_dim, self._splits, TOKENS=_TOKENS,
            SHARE=triton.next_power_of_2(max(16, share)), DIM=dim, num_warps=8,
        )  # fmt: skip
        _merge_kernel[(self._heads,)](
            self._largest, self._sums, self._mixes, tokens, mixed, self._head_dim, self._splits,
            TOKENS=_TOKENS, MERGE=_MERGE, DIM=dim, num_warps=4,
        )  # fmt: skip
