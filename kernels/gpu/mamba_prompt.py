"""A stretch of a prompt through the heart of a Mamba-2 mixer on the card: as `mamba_step`, for many tokens.

    c = silu(conv over the last K inputs of xBC)          split into x [heads, head_dim], B and C [groups, state_size]
    dt = limit(softplus(dt + dt_bias))
    S_t = exp(dt a) S_(t-1) + dt x B^T;   y_t = S_t C + d x
    out = bfloat16(group RMS norm(y * silu(z)) * weight)

Three launches. The convolution reads its inputs K times (later out of a cache) and writes c. The scan: a program takes
DIM rows of a head's state through all tokens, CHUNK of them at once: within a chunk token s reaches token t through
exp(sum of log decay between them), a matrix. Its products are float32's to about 2^-21 (three of TF32 each), its sums
of log decay float64, since their differences count. It reads c (B and C once a head, out of a cache) and the state,
and writes y: bound by latency, a chunk after the other. The gated norm (`rms_norm`'s) reads y and z.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nemolab.kernels.gpu.launch import check_tensor
from nemolab.kernels.gpu.mamba_step import check_mixer, time_step
from nemolab.kernels.gpu.rms_norm import launch_norm, silu
from nemolab.kernels.mamba_step import mamba_step_torch

_TOKENS, _CHANNELS = 8, 256
_CHUNK, _DIM, _SLICE = 64, 32, 16  # tokens, rows and columns of the state that a program of the scan works on at once


def mamba_prompt_torch(projected, *arguments) -> torch.Tensor:
    """The plain twin: `mamba_step_torch`, token by token; projected [tokens, ...] and y [tokens, inner]."""
    return torch.stack([mamba_step_torch(token, *arguments) for token in projected])


@triton.jit
def _convolve_kernel(
    inputs, weight, bias, out, tokens, channels, TAPS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr
):
    # grid: (cdiv(tokens, TOKENS), cdiv(channels, BLOCK)); inputs [TAPS - 1 + tokens, channels]
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS))[:, None]
    channel = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    inside = (token < tokens) & (channel < channels)
    at = token.to(tl.int64) * channels + channel
    total = tl.zeros([TOKENS, BLOCK], tl.float32) + tl.load(bias + channel, mask=channel < channels, other=0.0)
    for tap in tl.static_range(TAPS):
        factor = tl.load(weight + channel * TAPS + tap, mask=channel < channels, other=0.0)
        total += factor * tl.load(inputs + at + tap * channels, mask=inside, other=0.0)
    tl.store(out + at, silu(total), mask=inside)


@triton.jit
def _scan_kernel(
    conv, dt, a, d, dt_bias, low, high, ssm, y, tokens, heads, head_dim, state_size, groups,
    CHUNK: tl.constexpr, DIM: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    # grid: (heads, cdiv(head_dim, DIM)); conv [tokens, inner + 2 * groups * state_size]
    head = tl.program_id(0)
    place = tl.program_id(1) * DIM + tl.arange(0, DIM)
    part, step = tl.arange(0, SLICE), tl.arange(0, CHUNK)
    inner, in_row = heads * head_dim, place < head_dim
    conv_dim, group = inner + 2 * groups * state_size, head // (heads // groups)
    row = head * head_dim + place
    factor, skip, bias = tl.load(a + head), tl.load(d + head), tl.load(dt_bias + head)
    causal = step[:, None] >= step[None, :]
    for first in range(0, tokens, CHUNK):
        token = (first + step).to(tl.int64)
        inside = token < tokens
        here = inside[:, None] & in_row[None, :]
        x = tl.load(conv + token[:, None] * conv_dim + row[None, :], mask=here, other=0.0)
        time = time_step(tl.load(dt + token * heads + head, mask=inside, other=0.0) + bias, low, high)
        time = tl.where(inside, time, 0.0)  # tokens behind the last one neither decay the state nor add to it
        logs = (time * factor).to(tl.float64)
        sums, total = tl.cumsum(logs, 0), tl.sum(logs, 0)
        # The state lies in memory (in a cache): with B and C whole, and it, registers would not do.
        scores = tl.zeros([CHUNK, CHUNK], tl.float32)
        mixed = tl.zeros([CHUNK, DIM], tl.float32)
        for first_n in range(0, state_size, SLICE):
            n = first_n + part
            b_at = conv + token[:, None] * conv_dim + inner + group * state_size + n[None, :]
            both = inside[:, None] & (n < state_size)[None, :]
            b = tl.load(b_at, mask=both, other=0.0)
            c = tl.load(b_at + groups * state_size, mask=both, other=0.0)
            held = in_row[:, None] & (n < state_size)[None, :]
            state = tl.load(ssm + row.to(tl.int64)[:, None] * state_size + n[None, :], mask=held, other=0.0)
            scores = tl.dot(c, tl.trans(b), scores, input_precision="tf32x3")
            mixed = tl.dot(c, tl.trans(state), mixed, input_precision="tf32x3")
        between = (sums[:, None] - sums[None, :]).to(tl.float32)
        scores *= tl.where(causal, tl.exp(tl.where(causal, between, 0.0)), 0.0)
        weighted = x * time[:, None]
        mixed *= tl.exp(sums.to(tl.float32))[:, None]
        mixed = tl.dot(scores, weighted, mixed, input_precision="tf32x3")
        at = y + token[:, None] * inner + row[None, :]
        tl.store(at, mixed + skip * x, mask=here)
        weighted = tl.trans(weighted * tl.exp((total - sums).to(tl.float32))[:, None])
        decay = tl.exp(total.to(tl.float32))
        tl.debug_barrier()  # all have read the state
        for first_n in range(0, state_size, SLICE):
            n = first_n + part
            b_at = conv + token[:, None] * conv_dim + inner + group * state_size + n[None, :]
            b = tl.load(b_at, mask=inside[:, None] & (n < state_size)[None, :], other=0.0)
            held = in_row[:, None] & (n < state_size)[None, :]
            state_at = ssm + row.to(tl.int64)[:, None] * state_size + n[None, :]
            state = tl.load(state_at, mask=held, other=0.0) * decay
            tl.store(state_at, tl.dot(weighted, b, state, input_precision="tf32x3"), mask=held)
        tl.debug_barrier()  # and all have written it


class MambaPrompt:
    """The prompt's way through one mixer, with its weights: arguments as of `mamba_step.MambaStep`."""

    def __init__(self, conv_weight, conv_bias, a, d, dt_bias, dt_limit, norm, groups: int, eps: float):
        tensors = check_mixer(conv_weight, conv_bias, a, d, dt_bias, norm)
        self._conv_weight, self._conv_bias, self._a, self._d, self._dt_bias, self._norm = tensors
        self._low, self._high, self._groups, self._eps = float(dt_limit[0]), float(dt_limit[1]), groups, eps

    def convolve(self, inputs: torch.Tensor) -> torch.Tensor:
        """inputs float32 [taps - 1 + tokens, conv_dim], the last ones before these tokens first -> [tokens, conv_dim].

        Raises EngineError where sizes or devices do not fit, as the others do.
        """
        (conv_dim, taps), tokens = self._conv_weight.shape, inputs.shape[0] - self._conv_weight.shape[1] + 1
        self._check("inputs", inputs, torch.float32, (taps - 1 + tokens, conv_dim))
        convolved = torch.empty(tokens, conv_dim, device=inputs.device)
        _convolve_kernel[(triton.cdiv(tokens, _TOKENS), triton.cdiv(conv_dim, _CHANNELS))](
            inputs, self._conv_weight, self._conv_bias, convolved, tokens, conv_dim,
            TAPS=taps, TOKENS=_TOKENS, BLOCK=_CHANNELS, num_warps=4,
        )  # fmt: skip
        return convolved

    def scan(self, convolved: torch.Tensor, dt: torch.Tensor, ssm: torch.Tensor) -> torch.Tensor:
        """y float32 [tokens, inner]; the state moves on in place.

        convolved  float32 [tokens, conv_dim]; dt float32 [tokens, heads] as projected
        ssm        float32 [heads, head_dim, state_size]
        """
        (tokens, heads), conv_dim, inner = dt.shape, self._conv_weight.shape[0], self._norm.shape[0]
        head_dim, state_size = inner // heads, (conv_dim - inner) // (2 * self._groups)
        self._check("convolved", convolved, torch.float32, (tokens, conv_dim))
        self._check("dt", dt, torch.float32, (tokens, self._a.shape[0]))
        self._check("ssm", ssm, torch.float32, (heads, head_dim, state_size))
        y = torch.empty(tokens, inner, device=dt.device)
        # Nothing smaller than 16 goes into a card's matrix units.
        dim, part = (max(16, triton.next_power_of_2(size)) for size in (min(head_dim, _DIM), min(state_size, _SLICE)))
        _scan_kernel[(heads, triton.cdiv(head_dim, dim))](
            convolved, dt, self._a, self._d, self._dt_bias, self._low, self._high, ssm, y, tokens, heads, head_dim,
            state_size, self._groups, CHUNK=_CHUNK, DIM=dim, SLICE=part, num_warps=4, num_stages=1,
        )  # fmt: skip
        return y

    def gate(self, y: torch.Tensor, gate: torch.Tensor, out: torch.Tensor) -> None:
        """The gated norm of y and gate, float32 [tokens, inner], into out, bfloat16."""
        shape = (y.shape[0], self._norm.shape[0])
        self._check("y", y, torch.float32, shape)
        self._check("gate", gate, torch.float32, shape)
        self._check("out", out, torch.bfloat16, shape)
        launch_norm(y, self._norm, self._eps, out, gate, self._groups)

    def _check(self, name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        check_tensor("a Mamba mixer's", name, tensor, dtype, shape, self._norm.device)
