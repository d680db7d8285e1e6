"""The plain twins of the kernels under the launchers' own names and signatures, on CPU tensors.

Each rounds where its kernel rounds. Contracts, shapes and units: the files of `nemolab.kernels.gpu`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

from nemolab.checkpoint.formats import GROUP
from nemolab.engine.mamba import scan
from nemolab.kernels.attention_step import attention_step_torch
from nemolab.kernels.gpu.add_experts import add_experts_torch
from nemolab.kernels.gpu.combine import combine_torch
from nemolab.kernels.gpu.decode import E2M1_UNIT, E4M3_UNIT
from nemolab.kernels.gpu.decode_bf16 import decode_bf16_torch
from nemolab.kernels.gpu.expert_step import ROWS, expert_step_torch, parts_of
from nemolab.kernels.mamba_step import gated_rms_norm_torch, mamba_step_torch
from nemolab.kernels.matvec import ADD, F16, F32, FP8, NVFP4, PLAIN, RELU2, Packed, matvec_torch
from nemolab.kernels.rms_norm import rms_norm_torch
from nemolab.kernels.router_step import router_step_torch
from nemolab.store.layout import BlockLayout

_DOWN_UNIT = E2M1_UNIT * E4M3_UNIT


def matvec(packed: Packed, x: torch.Tensor, y: torch.Tensor, mode: int = PLAIN) -> None:
    y.copy_(matvec_torch(packed, x, y, mode))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, y: torch.Tensor) -> None:
    y.copy_(rms_norm_torch(x, weight, eps))


def linear_prompt(packed: Packed, x: torch.Tensor, y: torch.Tensor, mode: int = PLAIN, rows=None) -> None:
    code, (weight, scales, bias) = int(packed.table[0]), packed.keep
    mine = slice(*(rows or (0, packed.rows)))
    weight, bias = weight.view(packed.rows, -1)[mine], None if bias is None else bias[mine]
    if code in (FP8, NVFP4):
        weight = decode_bf16_torch(weight, None if scales is None else scales[mine])
    product = x.float() @ weight.float().T
    if code not in (F16, F32):
        product *= float(packed.scale)
    if bias is not None:
        product += bias
    if mode == RELU2:
        product.clamp_(min=0).square_()
    y.copy_(product + y if mode == ADD else product)


class MambaStep:
    def __init__(self, conv_weight, conv_bias, a, d, dt_bias, dt_limit, norm, groups: int, eps: float):
        self._before = (conv_weight, conv_bias)
        self._between = (a, d, dt_bias, dt_limit)
        self._after = (norm, groups, eps)

    def run(self, projected, conv_state, ssm, y) -> None:
        y.copy_(mamba_step_torch(projected, *self._before, conv_state, *self._between, ssm, *self._after))


class MambaPrompt:
    """Its scan is the CPU engine's."""

    def __init__(self, conv_weight, conv_bias, a, d, dt_bias, dt_limit, norm, groups: int, eps: float):
        self._conv, self._rates, self._after = (conv_weight, conv_bias), (a, d, dt_bias, dt_limit), (norm, groups, eps)

    def convolve(self, inputs) -> torch.Tensor:
        weight, bias = self._conv
        tokens = inputs.shape[0] - weight.shape[1] + 1
        return F.silu(bias + sum(inputs[tap : tap + tokens] * weight[:, tap] for tap in range(weight.shape[1])))

    def scan(self, convolved, dt, ssm) -> torch.Tensor:
        (a, d, dt_bias, limit), groups, (heads, head_dim, size) = self._rates, self._after[1], ssm.shape
        x, b, c = convolved.split([heads * head_dim, groups * size, groups * size], dim=1)
        x, b, c = (t.unflatten(1, (count, -1)) for t, count in ((x, heads), (b, groups), (c, groups)))
        return scan(x, F.softplus(dt + dt_bias).clamp(*limit), a, b, c, d, ssm).flatten(1)

    def gate(self, y, gate, out) -> None:
        out.copy_(gated_rms_norm_torch(y, gate, *self._after))


class AttentionStep:
    def __init__(self, heads: int, kv_heads: int, head_dim: int, capacity: int, device):
        self._head_dim = head_dim

    def run(self, q, k, v, keys, values, tokens: torch.Tensor, mixed) -> None:
        count = int(tokens)
        keys[count - 1], values[count - 1] = k, v
        mixed.copy_(attention_step_torch(q, keys[:count].float(), values[:count].float(), self._head_dim))


class RouterStep:
    def __init__(self, experts: int, top_k: int, groups: int, top_groups: int, normalise: bool, scaling: float, device):
        self._settings = (top_k, groups, top_groups, normalise, scaling)

    def run(self, logits, bias, experts, weights) -> None:
        ids, shares = router_step_torch(logits, bias, *self._settings)
        experts.copy_(ids)
        weights.copy_(shares)


class ExpertStep:
    def __init__(self, inter: int, width: int, top_k: int, device="cpu"):
        self.inter, self.width, self.top_k, self.parts = inter, width, top_k, parts_of(inter)
        self.partial = torch.zeros(top_k, self.parts, width)
        self.active = torch.empty(top_k, inter // GROUP, dtype=torch.int32)
        self.all_ranks = torch.arange(top_k, dtype=torch.int32)
        self._layout = BlockLayout("neuron", inter, width)

    def bind(self, up, down, ids, scales_2, x, ranks=None) -> BoundStep:
        return BoundStep(self, up, down, ids, scales_2, x, self.all_ranks if ranks is None else ranks)

    def compute(self, rank: int, up_at: int, down_at: int, scales_2, x, amount: int) -> None:
        planes = (*self._planes(up_at)[:2], *self._planes(down_at)[2:])
        partial, self.active[rank] = expert_step_torch(planes, scales_2, x, amount)
        # As the kernel leaves it: output 8 * w + p at p * X/8 + w, in units that `Combine` takes back.
        self.partial[rank] = partial.unflatten(1, (-1, 8)).transpose(1, 2).flatten(1) / _DOWN_UNIT

    def _planes(self, address: int) -> list[torch.Tensor]:
        return [torch.from_numpy(plane) for plane in _views(self._layout, address)]


class BoundStep:
    def __init__(self, step: ExpertStep, up, down, ids, scales_2, x, ranks):
        self._step, self._tables, self._ids, self._scales_2, self._x = step, (up, down), ids, scales_2, x
        self._ranks = ranks

    def launch(self, *, amount=ROWS, first=0, count=None, post=None) -> None:
        for rank in self._ranks.tolist()[first : None if count is None else first + count]:
            expert = int(self._ids[rank])
            if post is not None:
                ctypes.c_int32.from_address(post + 4 * rank).value = expert
            up_at, down_at = (int(table[int(index[rank])]) for table, index in self._tables)
            if up_at and down_at:
                self._step.compute(rank, up_at, down_at, self._scales_2[expert], self._x, amount)


class Combine:
    def __init__(self, ranks: int, parts: int, width: int):
        pass

    def bind(self, partial, weights, ids, scales_2, out) -> Callable[[], None]:
        return lambda: out.copy_(combine_torch(partial, weights, ids, scales_2))


def expert_prompt(addresses, ids, inter, scales_2, starts, pairs, span, most, top_k, x, h, results) -> None:
    layout, (begin, end) = BlockLayout("neuron", inter, x.shape[1]), span
    for address, expert in zip(addresses.tolist(), ids.tolist(), strict=True):
        first, last = max(begin, int(starts[expert])), min(end, int(starts[expert + 1]))
        if first >= last:
            continue
        up_values, up_scales, down_values, down_scales = _views(layout, address)
        up = decode_bf16_torch(torch.from_numpy(up_values), torch.from_numpy(up_scales)).float()
        # Down's codes of neighbouring outputs share a byte and a group's scales lie one an output.
        codes = decode_bf16_torch(torch.from_numpy(down_values), torch.full((inter, x.shape[1] // GROUP), 0x38).byte())
        scales = torch.from_numpy(down_scales).view(torch.float8_e4m3fn).float().repeat_interleave(GROUP, 0)
        tokens, rows = pairs[first:last].long() // top_k, slice(first - begin, last - begin)
        h[rows] = torch.relu(scales_2[expert, 0] * (x[tokens].float() @ up.T)).square().bfloat16()
        results[rows] = scales_2[expert, 1] * (h[rows].float() @ (codes.float() * scales))


def add_experts(results, span, places, shares, out) -> None:
    add_experts_torch(results, span, places, shares, out)


def _views(layout: BlockLayout, address: int):
    """The planes of the block at an address of this process."""
    return layout.views(np.ctypeslib.as_array((ctypes.c_uint8 * layout.payload_bytes).from_address(address)))
