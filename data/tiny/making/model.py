"""NemotronH with latent mixture of experts, written for training: a plain function for each block, compiled once.

Shapes: b sequences, s positions, d hidden, h Mamba heads of p, g groups of state n, E experts, k chosen, X latent,
I neurons of an expert. Equal to transformers' NemotronHForCausalLM without a floor on the time step (see measure.py).
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from quantise import ROUND, stored_format


@dataclass(frozen=True)
class Shape:
    """The sizes of the model. Blocks of 2*I*X*9/16 = 36,864 bytes are exactly nine pages of 4096."""

    vocabulary: int = 4096
    hidden: int = 256
    pattern: str = "MEM*EMEMEM*EME"
    latent: int = 128
    expert_inter: int = 256
    experts: int = 64
    top_k: int = 6
    shared_inter: int = 256
    scaling: float = 2.5
    mamba_heads: int = 8
    mamba_head_dim: int = 64
    state: int = 64
    groups: int = 2
    conv: int = 4
    chunk: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5) * weight).to(x.dtype)


def state_space(x, dt, a, b_matrix, c_matrix, skip, chunk: int):
    """Mamba-2 in chunks (state-space duality): inside a chunk a masked product, between chunks the carried state.

    x (b,s,h,p), dt (b,s,h) fp32, a (h) fp32 below zero, b_matrix and c_matrix (b,s,g,n), s a multiple of `chunk`.
    """
    b, s, h, p = x.shape
    g, n = b_matrix.shape[2:]
    c, dtype = s // chunk, x.dtype
    scaled = (x * dt.to(dtype)[..., None]).view(b, c, chunk, h, p).permute(0, 1, 3, 2, 4)
    decay = (dt * a).view(b, c, chunk, h).permute(0, 1, 3, 2).cumsum(-1)  # b c h chunk
    keys = b_matrix.view(b, c, chunk, g, n).permute(0, 1, 3, 2, 4)
    queries = c_matrix.view(b, c, chunk, g, n).permute(0, 1, 3, 2, 4)
    below = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).tril()
    within = torch.exp((decay[..., :, None] - decay[..., None, :]).masked_fill(~below, float("-inf")))
    scores = torch.matmul(queries, keys.transpose(-1, -2)).view(b, c, g, 1, chunk, chunk).float()
    mixed = (scores * within.view(b, c, g, h // g, chunk, chunk)).to(dtype).view(b, c, h, chunk, chunk)
    y = torch.matmul(mixed, scaled)
    # the state each chunk adds, decayed to its end
    to_end = torch.exp(decay[..., -1:] - decay).view(b, c, g, h // g, chunk, 1)
    keys_by_head = (keys.view(b, c, g, 1, chunk, n).float() * to_end).to(dtype).view(b, c, h, chunk, n)
    states = torch.matmul(keys_by_head.transpose(-1, -2), scaled)  # b c h n p
    # the state at the start of chunk i is the sum over chunks j < i, decayed over j+1 .. i-1
    total = F.pad(decay[..., -1].permute(0, 2, 1).cumsum(-1), (1, 0))  # b h c+1
    earlier = torch.ones(c, c, dtype=torch.bool, device=x.device).tril(-1)
    between = torch.exp((total[..., :-1, None] - total[..., None, 1:]).masked_fill(~earlier, float("-inf")))
    with torch.autocast(x.device.type, enabled=False):
        flat = states.float().permute(0, 2, 1, 3, 4).reshape(b, h, c, n * p)
        carried = torch.matmul(between, flat).view(b, h, c, n, p).permute(0, 2, 1, 3, 4).to(dtype)
    from_start = torch.exp(decay).view(b, c, g, h // g, chunk, 1)
    queries_by_head = (queries.view(b, c, g, 1, chunk, n).float() * from_start).to(dtype).view(b, c, h, chunk, n)
    y = y + torch.matmul(queries_by_head, carried)
    return y.permute(0, 1, 3, 2, 4).reshape(b, s, h, p) + x * skip.to(dtype)[:, None]


def mamba_block(
    x, norm, in_proj, conv, conv_bias, dt_bias, a_log, skip, gated_norm, out_proj, shape: Shape, residual=True
):
    """x + Mamba-2(norm(x)); the time step is softplus(dt + bias), with no floor and no ceiling."""
    b, s, _ = x.shape
    h, p, g, n = shape.mamba_heads, shape.mamba_head_dim, shape.groups, shape.state
    inner = h * p
    gate, xbc, dt = F.linear(rms_norm(x, norm), in_proj).split([inner, inner + 2 * g * n, h], -1)
    padded = F.pad(xbc, (0, 0, shape.conv - 1, 0))
    summed = conv_bias.to(xbc.dtype)
    for i in range(shape.conv):
        summed = summed + padded[:, i : i + s] * conv[:, 0, i].to(xbc.dtype)
    inputs, b_matrix, c_matrix = F.silu(summed).split([inner, g * n, g * n], -1)
    dt = F.softplus(dt.float() + dt_bias)
    missing = -s % shape.chunk
    if missing:
        inputs, b_matrix, c_matrix, dt = (F.pad(t, (0, 0, 0, missing)) for t in (inputs, b_matrix, c_matrix, dt))
    y = state_space(
        inputs.reshape(b, s + missing, h, p),
        dt,
        -torch.exp(a_log.float()),
        b_matrix.reshape(b, s + missing, g, n),
        c_matrix.reshape(b, s + missing, g, n),
        skip,
        shape.chunk,
    )[:, :s]
    y = (y.reshape(b, s, inner).float() * F.silu(gate.float())).view(b, s, g, inner // g)
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)
    y = F.linear((gated_norm * y.reshape(b, s, inner)).to(x.dtype), out_proj)
    return x + y if residual else y


def attention_block(x, norm, q_proj, k_proj, v_proj, o_proj, shape: Shape):
    """x + causal attention(norm(x)), grouped keys and values, no positions."""
    b, s, _ = x.shape
    y = rms_norm(x, norm)
    q = F.linear(y, q_proj).view(b, s, shape.heads, shape.head_dim).transpose(1, 2)
    k = F.linear(y, k_proj).view(b, s, shape.kv_heads, shape.head_dim).transpose(1, 2)
    v = F.linear(y, v_proj).view(b, s, shape.kv_heads, shape.head_dim).transpose(1, 2)
    repeat = shape.heads // shape.kv_heads
    out = F.scaled_dot_product_attention(
        q, k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1), is_causal=True
    )
    return x + F.linear(out.transpose(1, 2).reshape(b, s, -1), o_proj)


def route(y, gate, bias, shape: Shape):
    """Sigmoid router, fp32: the bias chooses, the plain score weighs. Returns scores (T,E), experts, weights (T,k)."""
    with torch.autocast(y.device.type, enabled=False):
        scores = F.linear(y.float(), gate.float()).sigmoid()
    chosen = torch.topk(scores + bias, shape.top_k, -1)[1]
    weights = scores.gather(-1, chosen)
    return scores, chosen, weights / (weights.sum(-1, keepdim=True) + 1e-20) * shape.scaling


def moe_block(
    x, norm, gate, bias, to_latent, from_latent, up, down, shared_up, shared_down, shape: Shape, capacity: int
):
    """x + experts + shared expert. Tokens are sorted by expert into buffers of `capacity`, so all shapes are static.

    Returns the output and what the training watches: load (E) lookups an expert, mean relu activation (for the L1
    term), overlap (router mass on the experts of the token before, beyond chance), share of lookups that were dropped.
    """
    b, s, d = x.shape
    tokens, k, experts = b * s, shape.top_k, shape.experts
    y = rms_norm(x, norm).view(tokens, d)
    scores, chosen, weights = route(y, gate, bias, shape)
    flat = chosen.reshape(-1)
    load = torch.zeros(experts, device=x.device).scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.float32))
    order = torch.argsort(flat, stable=True)
    by_expert = flat[order]
    first = F.pad(load.cumsum(0), (1, 0))[:-1].long()
    rank = torch.arange(tokens * k, device=x.device) - first[by_expert]
    slot_sorted = torch.where(rank < capacity, by_expert * capacity + rank, experts * capacity)  # overflow: last slot
    slot = torch.empty_like(slot_sorted).scatter_(0, order, slot_sorted)
    token_of_slot = torch.arange(experts * capacity + 1, device=x.device) % tokens
    token_of_slot = token_of_slot.scatter_(0, slot_sorted, order // k)
    filled = torch.zeros(experts * capacity + 1, device=x.device, dtype=x.dtype)
    filled = filled.scatter_(0, slot_sorted, torch.ones_like(slot_sorted, dtype=x.dtype))
    latent = F.linear(y, to_latent)
    buffers = (latent[token_of_slot] * filled[:, None])[:-1].view(experts, capacity, -1)
    active = F.relu(torch.bmm(buffers, up.to(buffers.dtype).transpose(1, 2)))
    out = torch.bmm(active * active, down.to(buffers.dtype).transpose(1, 2)).view(experts * capacity, -1)
    out = F.pad(out, (0, 0, 0, 1))[slot].view(tokens, k, -1)
    routed = F.linear((out * weights.to(out.dtype)[..., None]).sum(1), from_latent)
    shared = F.linear(F.relu(F.linear(y, shared_up)).square(), shared_down)
    share = (scores / scores.sum(-1, keepdim=True)).view(b, s, experts)
    before = torch.zeros_like(share).scatter_(-1, chosen.view(b, s, k), 1.0)[:, :-1]
    # less what any token of the batch would get: a router that always picks the same experts gains nothing
    overlap = (share[:, 1:] * (before - load / tokens)).sum(-1).mean()
    dropped = (rank >= capacity).float().mean()
    return x + (routed + shared).view(b, s, d), load, active.float().mean(), overlap, dropped


BLOCKS = {"M": mamba_block, "*": attention_block, "E": moe_block}
PARAMETERS = {
    "M": ("norm", "in_proj", "conv1d", "conv1d_bias", "dt_bias", "A_log", "D", "gated_norm", "out_proj"),
    "*": ("norm", "q_proj", "k_proj", "v_proj", "o_proj"),
    "E": ("norm", "gate", "fc1_latent_proj", "fc2_latent_proj", "up_proj", "down_proj", "shared_up", "shared_down"),
}


class TinyNemotronH(nn.Module):
    """The whole model; `quantised` makes the forward pass see every weight as it will be stored."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape, self.quantised, self.blocks = shape, False, dict(BLOCKS)
        d, inner = shape.hidden, shape.mamba_heads * shape.mamba_head_dim
        conv_dim, shrink = inner + 2 * shape.groups * shape.state, len(shape.pattern) ** -0.5

        def matrix(*sizes: int, std: float | None = None) -> nn.Parameter:
            return nn.Parameter(torch.randn(*sizes) * (sizes[-1] ** -0.5 if std is None else std))

        def ones(size: int) -> nn.Parameter:
            return nn.Parameter(torch.ones(size))

        self.embeddings, self.lm_head, self.norm_f = (
            matrix(shape.vocabulary, d, std=0.1),
            matrix(shape.vocabulary, d, std=0.02),
            ones(d),
        )
        self.layers = nn.ModuleList()
        for kind in shape.pattern:
            layer = nn.ParameterDict({"norm": ones(d)})
            if kind == "M":
                step = torch.exp(torch.rand(shape.mamba_heads) * math.log(100) + math.log(0.001))
                layer.update(
                    {
                        "in_proj": matrix(inner + conv_dim + shape.mamba_heads, d),
                        "conv1d": nn.Parameter(torch.rand(conv_dim, 1, shape.conv) - 0.5),
                        "conv1d_bias": nn.Parameter(torch.zeros(conv_dim)),
                        "dt_bias": nn.Parameter(step + torch.log(-torch.expm1(-step))),
                        "A_log": nn.Parameter(torch.log(torch.arange(1.0, shape.mamba_heads + 1))),
                        "D": ones(shape.mamba_heads),
                        "gated_norm": ones(inner),
                        "out_proj": matrix(d, inner, std=inner**-0.5 * shrink),
                    }
                )
            elif kind == "*":
                width = shape.heads * shape.head_dim
                layer.update(
                    {
                        "q_proj": matrix(width, d),
                        "k_proj": matrix(shape.kv_heads * shape.head_dim, d),
                        "v_proj": matrix(shape.kv_heads * shape.head_dim, d),
                        "o_proj": matrix(d, width, std=width**-0.5 * shrink),
                    }
                )
            else:
                layer.update(
                    {
                        "gate": matrix(shape.experts, d, std=0.02),
                        "fc1_latent_proj": matrix(shape.latent, d),
                        "fc2_latent_proj": matrix(d, shape.latent, std=shape.latent**-0.5 * shrink),
                        "up_proj": matrix(shape.experts, shape.expert_inter, shape.latent),
                        "down_proj": matrix(
                            shape.experts, shape.latent, shape.expert_inter, std=shape.expert_inter**-0.5 * 0.5
                        ),
                        "shared_up": matrix(shape.shared_inter, d),
                        "shared_down": matrix(d, shape.shared_inter, std=shape.shared_inter**-0.5 * 0.5 * shrink),
                    }
                )
            self.layers.append(layer)
        self.register_buffer("bias", torch.zeros(shape.pattern.count("E"), shape.experts))

    def compile_blocks(self) -> None:
        self.blocks = {kind: torch.compile(block, dynamic=False) for kind, block in BLOCKS.items()}

    def stored(self, index: int, name: str) -> torch.Tensor:
        """A weight as the forward pass sees it: rounded to its stored format (straight through) when `quantised`."""
        weight = self.layers[index][name]
        if not self.quantised:
            return weight
        rounded = ROUND[stored_format(index, name, self.shape.pattern)](weight.detach())
        return weight + (rounded - weight.detach())

    def forward(self, ids: torch.Tensor, capacity_factor: float = 2.0, plain: bool = False, dropout: float = 0.0):
        """ids (b,s) -> logits (b,s,V) and one tuple (load, activation, overlap, dropped) a MoE layer.

        `plain` runs the blocks uncompiled; `dropout` applies to the embeddings and before the head.
        """
        shape, blocks = self.shape, BLOCKS if plain else self.blocks
        x = F.dropout(F.embedding(ids, self.embeddings), dropout)
        x = x.bfloat16() if ids.is_cuda else x
        capacity = min(ids.numel(), math.ceil(ids.numel() * shape.top_k / shape.experts * capacity_factor / 16) * 16)
        figures, moe_index = [], 0
        for index, kind in enumerate(shape.pattern):
            weights = [self.stored(index, name) for name in PARAMETERS[kind]]
            if kind == "E":
                norm, gate, *rest = weights
                x, *figure = blocks[kind](x, norm, gate, self.bias[moe_index], *rest, shape, capacity)
                figures.append(figure)
                moe_index += 1
            else:
                x = blocks[kind](x, *weights, shape)
        y = F.dropout(rms_norm(x, self.norm_f), dropout)
        return F.linear(y, self.lm_head.to(x.dtype)), figures
