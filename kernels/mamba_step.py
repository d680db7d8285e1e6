"""One token through the heart of a Mamba-2 mixer: causal convolution, selective state update, gated norm.

    c = silu(conv over the last K inputs of xBC)          split into x [heads, head_dim], B and C [groups, state_size]
    dt = limit(softplus(dt + dt_bias))
    S = exp(dt a) S + dt x B^T                            S [heads, head_dim, state_size], float32, in place
    y = group RMS norm((S C + d x) * silu(z)) * weight

Reads and writes the state once (8 bytes an element), which bounds it: 8 MiB a layer for the large model. The sum over
the state's last axis: eight lanes, added in a fixed order; a rest of fewer than 8 comes last. Parts take whole groups.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F

from nemolab.errors import EngineError
from nemolab.jit import jit
from nemolab.kernels import simd
from nemolab.kernels.rms_norm import inverse_rms
from nemolab.kernels.team import Team


def mamba_step_torch(projected, conv_weight, conv_bias, conv_state, a, d, dt_bias, dt_limit, ssm, norm, groups, eps):
    """The plain twin; conv_state and ssm are updated in place. Shapes as in `MambaStep`."""
    heads, head_dim, state_size = ssm.shape
    inner, conv_dim = heads * head_dim, conv_state.shape[0]
    z, xbc, dt = projected.split([inner, conv_dim, heads])
    window = torch.cat([conv_state, xbc[:, None]], dim=1)
    conv_state.copy_(window[:, 1:])
    c = F.silu((window * conv_weight).sum(1) + conv_bias)
    x, b, c = c.split([inner, groups * state_size, groups * state_size])
    x = x.view(heads, head_dim)
    b = b.view(groups, state_size).repeat_interleave(heads // groups, 0)
    c = c.view(groups, state_size).repeat_interleave(heads // groups, 0)
    dt = F.softplus(dt + dt_bias).clamp(*dt_limit)
    ssm.mul_(torch.exp(dt * a)[:, None, None]).add_((dt[:, None] * x)[..., None] * b[:, None])
    y = (ssm @ c[..., None])[..., 0] + d[:, None] * x
    return gated_rms_norm_torch(y.flatten(), z, norm, groups, eps)


def gated_rms_norm_torch(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, groups: int, eps: float):
    """The gate, then the norm in each of `groups` equal parts of the last axis, then the weight. Prompts run it."""
    gated = (x * F.silu(gate)).unflatten(-1, (groups, -1))
    normed = gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + eps)
    return normed.flatten(-2) * weight


@jit
def _silu(x):
    return x / (np.float32(1) + math.exp(-x))


@jit
def _softplus(x):
    # As torch: beyond 20 it is x to the last bit.
    return x if x > 20 else np.float32(math.log1p(math.exp(x)))


@jit
def _convolve(first, last, xbc, weight, bias, state, out):
    """Channels first..last of the convolution, and their inputs move up by one."""
    taps = weight.shape[1]
    for channel in range(first, last):
        sum_ = bias[channel]
        for tap in range(taps - 1):
            sum_ += weight[channel, tap] * state[channel, tap]
        sum_ += weight[channel, taps - 1] * xbc[channel]
        for tap in range(taps - 2):
            state[channel, tap] = state[channel, tap + 1]
        if taps > 1:
            state[channel, taps - 2] = xbc[channel]
        out[channel] = _silu(sum_)


@jit
def _update_row(row_at, b_at, c_at, count, decay, input_):
    """S_row = decay * S_row + input * B; returns S_row . C"""
    decay_, input__, sum_ = simd.splat(decay), simd.splat(input_), simd.zeros()
    n = 0
    while n + 8 <= count:
        s = simd.fma(simd.load_f32(row_at + 4 * n), decay_, simd.mul(simd.load_f32(b_at + 4 * n), input__))
        simd.store_f32(row_at + 4 * n, s)
        sum_ = simd.fma(s, simd.load_f32(c_at + 4 * n), sum_)
        n += 8
    return simd.total(sum_)


@jit
def _mamba_kernel(
    part, parts, projected, conv_weight, conv_bias, conv_state, a, d, dt_bias, low, high, ssm, norm, groups, eps,
    conv, y,
):  # fmt: skip
    heads, head_dim, state_size = ssm.shape
    inner, conv_dim = heads * head_dim, conv_state.shape[0]
    per_group, width = heads // groups, inner // groups
    xbc = projected[inner : inner + conv_dim]
    whole = state_size // 8 * 8
    ssm_at, conv_at, y_at = simd.address_of(ssm), simd.address_of(conv), simd.address_of(y)
    for group in range(groups * part // parts, groups * (part + 1) // parts):
        _convolve(group * width, (group + 1) * width, xbc, conv_weight, conv_bias, conv_state, conv)
        b, c = inner + group * state_size, inner + (groups + group) * state_size
        _convolve(b, b + state_size, xbc, conv_weight, conv_bias, conv_state, conv)
        _convolve(c, c + state_size, xbc, conv_weight, conv_bias, conv_state, conv)
        for head in range(group * per_group, (group + 1) * per_group):
            dt = min(max(_softplus(projected[inner + conv_dim + head] + dt_bias[head]), low), high)
            decay = np.float32(math.exp(dt * a[head]))
            for p in range(head_dim):
                i = head * head_dim + p
                input_ = dt * conv[i]
                sum_ = _update_row(
                    ssm_at + 4 * i * state_size, conv_at + 4 * b, conv_at + 4 * c, state_size, decay, input_
                )
                for n in range(whole, state_size):
                    ssm[head, p, n] = ssm[head, p, n] * decay + input_ * conv[b + n]
                    sum_ += ssm[head, p, n] * conv[c + n]
                y[i] = (sum_ + d[head] * conv[i]) * _silu(projected[i])
        first = group * width
        factor = inverse_rms(y_at + 4 * first, width, eps)
        for i in range(first, first + width):
            y[i] = y[i] * factor * norm[i]


class MambaStep:
    """The step of one mixer, with its weights.

    conv_weight  float32 [conv_dim, taps]; conv_bias [conv_dim]
    a, d, dt_bias  float32 [heads], a = -exp(A_log); dt_limit (low, high); norm [inner]
    """

    def __init__(self, conv_weight, conv_bias, a, d, dt_bias, dt_limit, norm, groups: int, eps: float):
        self._conv_weight, self._conv_bias, self._a, self._d = conv_weight, conv_bias, a, d
        self._dt_bias, self._norm, self._groups, self._eps = dt_bias, norm, groups, np.float32(eps)
        self._low, self._high = np.float32(dt_limit[0]), np.float32(dt_limit[1])
        self._conv = np.empty(conv_weight.shape[0], np.float32)
        self._width = norm.shape[0] + conv_weight.shape[0] + a.shape[0]

    def run(self, team: Team, projected: np.ndarray, conv_state: np.ndarray, ssm: np.ndarray, y: np.ndarray) -> None:
        """projected float32 [inner + conv_dim + heads] -> y float32 [inner]; both states move on in place.

        conv_state  float32 [conv_dim, taps - 1], the last inputs, oldest first
        ssm         float32 [heads, head_dim, state_size]
        """
        if projected.shape[0] != self._width or y.shape[0] != self._norm.shape[0]:
            raise EngineError(
                f"a Mamba step from {projected.shape[0]} values to {y.shape[0]}; "
                f"{self._width} and {self._norm.shape[0]} are needed"
            )
        team.run(
            _mamba_kernel, ssm.nbytes, projected, self._conv_weight, self._conv_bias, conv_state, self._a, self._d,
            self._dt_bias, self._low, self._high, ssm, self._norm, self._groups, self._eps, self._conv, y,
        )  # fmt: skip
