"""One token through the heart of a Mamba-2 mixer on the card: causal convolution, selective state update, gated norm.

    c = silu(conv over the last K inputs of xBC)          split into x [heads, head_dim], B and C [groups, state_size]
    dt = limit(softplus(dt + dt_bias))
    S = exp(dt a) S + dt x B^T                            S [heads, head_dim, state_size], float32, in place
    y = group RMS norm((S C + d x) * silu(z)) * weight

The formulas, the limit and both states are those of `nemolab.kernels.mamba_step`. Three launches, each reading only
what the one before has written: the convolution of all channels (which moves its inputs up by one), the states of
ROWS rows a program, the norm (`rms_norm`'s) of one group a program. Reads and writes the state once, 8 bytes an
element, which bounds it: 8 MiB a layer for the large model. Sums over the state's last axis are trees.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nemolab.kernels.gpu.launch import check_tensor
from nemolab.kernels.gpu.rms_norm import launch_norm, silu
from nemolab.kernels.mamba_step import mamba_step_torch

__all__ = ["MambaStep", "check_mixer", "mamba_step_torch", "time_step"]

_CHANNELS, _ROWS = 128, 16
_NAN: tl.constexpr = tl.constexpr(tl.PropagateNan.ALL)  # the cards' own minimum and maximum of NaN and a number drop it


@triton.jit
def _softplus(x):
    """log(1 + e^x); as torch, beyond 20 it is x. e / (u - 1) takes back what rounding u = 1 + e cost."""
    e = tl.exp(tl.minimum(x, 20.0, propagate_nan=_NAN))
    u = 1.0 + e
    return tl.where(x > 20.0, x, tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0))))


@triton.jit
def time_step(x, low, high):
    """softplus(x) within low to high; NaN stays NaN."""
    return tl.minimum(tl.maximum(_softplus(x), low, propagate_nan=_NAN), high, propagate_nan=_NAN)


@triton.jit
def _convolve_kernel(xbc, weight, bias, state, out, channels, TAPS: tl.constexpr, BLOCK: tl.constexpr):
    # grid: (cdiv(channels, BLOCK),); weight [channels, TAPS], state [channels, TAPS - 1]
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    new = tl.load(xbc + channel, mask=inside, other=0.0)
    total = tl.load(bias + channel, mask=inside, other=0.0)
    for tap in tl.static_range(TAPS - 1):
        held = tl.load(state + channel * (TAPS - 1) + tap, mask=inside, other=0.0)
        total += tl.load(weight + channel * TAPS + tap, mask=inside, other=0.0) * held
        if tap > 0:
            tl.store(state + channel * (TAPS - 1) + tap - 1, held, mask=inside)
    total += tl.load(weight + channel * TAPS + TAPS - 1, mask=inside, other=0.0) * new
    if TAPS > 1:
        tl.store(state + channel * (TAPS - 1) + TAPS - 2, new, mask=inside)
    tl.store(out + channel, silu(total), mask=inside)


@triton.jit
def _update_kernel(
    projected, conv, a, d, dt_bias, low, high, ssm, gated, heads, head_dim, state_size, groups, conv_dim,
    ROWS: tl.constexpr, STATE: tl.constexpr,
):  # fmt: skip
    # grid: (heads, cdiv(head_dim, ROWS))
    head = tl.program_id(0)
    place = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    n = tl.arange(0, STATE)
    inner = heads * head_dim
    in_row, in_state = place < head_dim, n < state_size
    both = in_row[:, None] & in_state[None, :]
    group = head // (heads // groups)
    dt = time_step(tl.load(projected + inner + conv_dim + head) + tl.load(dt_bias + head), low, high)
    decay = tl.exp(dt * tl.load(a + head))
    row = head * head_dim + place
    x = tl.load(conv + row, mask=in_row, other=0.0)
    b = tl.load(conv + inner + group * state_size + n, mask=in_state, other=0.0)
    c = tl.load(conv + inner + (groups + group) * state_size + n, mask=in_state, other=0.0)
    at = ssm + row.to(tl.int64)[:, None] * state_size + n[None, :]
    s = tl.load(at, mask=both, other=0.0) * decay + (dt * x)[:, None] * b[None, :]
    tl.store(at, s, mask=both)
    y = tl.sum(s * c[None, :], 1) + tl.load(d + head) * x
    z = tl.load(projected + row, mask=in_row, other=0.0)
    tl.store(gated + row, y * silu(z), mask=in_row)


def check_mixer(conv_weight, conv_bias, a, d, dt_bias, norm) -> tuple[torch.Tensor, ...]:
    """The weights of a mixer, as they came. Raises EngineError where one does not fit: see `MambaStep`."""
    conv_dim, heads = conv_bias.numel(), a.numel()
    weights = {
        "conv_weight": (conv_weight, (conv_dim, conv_weight.shape[-1])),
        "conv_bias": (conv_bias, (conv_dim,)),
        "a": (a, (heads,)),
        "d": (d, (heads,)),
        "dt_bias": (dt_bias, (heads,)),
        "norm": (norm, (norm.numel(),)),
    }
    for name, (tensor, shape) in weights.items():
        check_tensor("a Mamba mixer's", name, tensor, torch.float32, shape, norm.device)
    return tuple(tensor for tensor, _ in weights.values())


class MambaStep:
    """The step of one mixer on a card, with its weights and scratch memory there.

    conv_weight  float32 [conv_dim, taps]; conv_bias [conv_dim]
    a, d, dt_bias  float32 [heads], a = -exp(A_log); dt_limit (low, high); norm [inner]
    All contiguous, on one device. Raises EngineError where they do not fit.
    """

    def __init__(self, conv_weight, conv_bias, a, d, dt_bias, dt_limit, norm, groups: int, eps: float):
        tensors = check_mixer(conv_weight, conv_bias, a, d, dt_bias, norm)
        self._conv_weight, self._conv_bias, self._a, self._d, self._dt_bias, self._norm = tensors
        self._low, self._high, self._groups, self._eps = float(dt_limit[0]), float(dt_limit[1]), groups, eps
        self._conv, self._gated = torch.empty_like(conv_bias), torch.empty_like(norm)

    def run(self, projected: torch.Tensor, conv_state: torch.Tensor, ssm: torch.Tensor, y: torch.Tensor) -> None:
        """projected float32 [inner + conv_dim + heads] -> y float32 [inner]; both states move on in place.

        conv_state  float32 [conv_dim, taps - 1], the last inputs, oldest first
        ssm         float32 [heads, head_dim, state_size]
        Raises EngineError where sizes or devices do not fit.
        """
        (conv_dim, taps), heads, inner = self._conv_weight.shape, self._a.shape[0], self._norm.shape[0]
        head_dim, state_size = inner // heads, (conv_dim - inner) // (2 * self._groups)
        wanted = {
            "projected": (projected, (inner + conv_dim + heads,)),
            "conv_state": (conv_state, (conv_dim, taps - 1)),
            "ssm": (ssm, (heads, head_dim, state_size)),
            "y": (y, (inner,)),
        }
        for name, (tensor, shape) in wanted.items():
            check_tensor("a Mamba step's", name, tensor, torch.float32, shape, self._norm.device)
        _convolve_kernel[(triton.cdiv(conv_dim, _CHANNELS),)](
            projected[inner:], self._conv_weight, self._conv_bias, conv_state, self._conv, conv_dim,
            TAPS=taps, BLOCK=_CHANNELS, num_warps=_CHANNELS // 32,
        )  # fmt: skip
        rows = min(_ROWS, triton.next_power_of_2(head_dim))
        _update_kernel[(heads, triton.cdiv(head_dim, rows))](
            projected, self._conv, self._a, self._d, self._dt_bias, self._low, self._high, ssm, self._gated,
            heads, head_dim, state_size, self._groups, conv_dim,
            ROWS=rows, STATE=triton.next_power_of_2(state_size), num_warps=4,
        )  # fmt: skip
        launch_norm(self._gated, self._norm, self._eps, y, groups=self._groups)
