"""Mamba-2 layers: a chunked scan for prompts, one fused kernel for a token. Both carry the same float32 state.

The time step is softplus(dt + dt_bias), limited by `config.time_step_limit` and by nothing else, in both paths alike.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from nemolab.engine.state import MambaState
from nemolab.engine.weights import DenseWeights
from nemolab.kernels.mamba_step import MambaStep, gated_rms_norm_torch
from nemolab.kernels.matvec import ADD
from nemolab.kernels.rms_norm import rms_norm, rms_norm_torch
from nemolab.kernels.team import Team

CHUNK = 64  # tokens whose mutual influence is computed at once, as a matrix
PIECE_TOKENS = 1024  # tokens projected at once: in_proj's output is the widest activation of the model


class MambaLayer:
    """norm -> in_proj -> causal convolution -> selective scan -> gated norm -> out_proj, plus the residual."""

    def __init__(self, config, weights: DenseWeights, index: int):
        self.heads, self.head_dim = config.mamba_num_heads, config.mamba_head_dim
        self.groups, self.state_size = config.n_groups, config.ssm_state_size
        self.inner, self.conv_dim = config.mamba_inner, config.mamba_conv_dim
        self.kernel = config.conv_kernel
        self.eps = config.layer_norm_epsilon
        self.dt_limit = config.time_step_limit
        name = f"backbone.layers.{index}"
        hidden = config.hidden_size
        self.norm = weights.vector(f"{name}.norm.weight", hidden)
        self.in_proj = weights.matrix(f"{name}.mixer.in_proj", self.inner + self.conv_dim + self.heads, hidden)
        self.conv = weights.tensor(f"{name}.mixer.conv1d.weight", (self.conv_dim, 1, self.kernel))
        if config.use_conv_bias:
            self.conv_bias = weights.vector(f"{name}.mixer.conv1d.bias", self.conv_dim)
        else:
            self.conv_bias = torch.zeros(self.conv_dim)
        self.a = -torch.exp(weights.vector(f"{name}.mixer.A_log", self.heads))
        self.d = weights.vector(f"{name}.mixer.D", self.heads)
        self.dt_bias = weights.vector(f"{name}.mixer.dt_bias", self.heads)
        self.gated_norm = weights.vector(f"{name}.mixer.norm.weight", self.inner)
        self.out_proj = weights.matrix(f"{name}.mixer.out_proj", hidden, self.inner)
        self._step = MambaStep(
            self.conv[:, 0].numpy(), self.conv_bias.numpy(), self.a.numpy(), self.d.numpy(), self.dt_bias.numpy(),
            self.dt_limit, self.gated_norm.numpy(), self.groups, self.eps,
        )  # fmt: skip
        self._norm, self._eps = self.norm.numpy(), np.float32(self.eps)
        self._h = np.empty(hidden, np.float32)
        self._projected = np.empty(self.in_proj.rows, np.float32)
        self._y = np.empty(self.inner, np.float32)

    def step(self, team: Team, x: np.ndarray, state: MambaState) -> None:
        """One token: x float32 [hidden] plus the mixer's output, in place; the state moves on."""
        rms_norm(x, self._norm, self._eps, self._h)
        self.in_proj.multiply(self._h, self._projected)
        self._step.run(team, self._projected, state.conv_array, state.ssm_array, self._y)
        self.out_proj.multiply(self._y, x, ADD)

    def prompt(self, x: torch.Tensor, state: MambaState) -> torch.Tensor:
        """x [tokens, hidden] -> x plus the mixer's output, in place; the state moves on by these tokens."""
        for start in range(0, x.shape[0], PIECE_TOKENS):
            piece = x[start : start + PIECE_TOKENS]
            piece += self._mix(rms_norm_torch(piece, self.norm, self.eps), state)
        return x

    def _mix(self, x: torch.Tensor, state: MambaState) -> torch.Tensor:
        tokens = x.shape[0]
        gate, conv_in, dt = self.in_proj.apply(x).split([self.inner, self.conv_dim, self.heads], dim=-1)
        padded = torch.cat([state.conv, conv_in.T], dim=1)
        state.conv.copy_(padded[:, tokens:])
        convolved = F.silu(F.conv1d(padded[None], self.conv, self.conv_bias, groups=self.conv_dim)[0]).T
        values, b, c = convolved.split([self.inner, *[self.groups * self.state_size] * 2], dim=-1)
        dt = F.softplus(dt + self.dt_bias).clamp(*self.dt_limit)
        y = scan(
            values.reshape(tokens, self.heads, self.head_dim),
            dt,
            self.a,
            b.reshape(tokens, self.groups, self.state_size),
            c.reshape(tokens, self.groups, self.state_size),
            self.d,
            state.ssm,
        )
        y = gated_rms_norm_torch(y.reshape(tokens, self.inner), gate, self.gated_norm, self.groups, self.eps)
        return self.out_proj.apply(y)


def scan(x, dt, a, b, c, d, state, chunk: int = CHUNK) -> torch.Tensor:
    """The selective scan of Mamba-2 over a stretch of tokens, in chunks; equals the recurrence token by token.

    x      [tokens, heads, head_dim]          dt [tokens, heads] after softplus and limit
    a, d   [heads]                            b, c [tokens, groups, state_size]
    state  [heads, head_dim, state_size], read as the state before and overwritten with the state after
    returns y [tokens, heads, head_dim]:  S_t = exp(dt a) S_(t-1) + dt x b^T,  y_t = S_t c + d x
    """
    tokens, heads, head_dim = x.shape
    groups = b.shape[1]
    per_group = heads // groups
    y = torch.empty(tokens, heads, head_dim, device=x.device)
    now = state.view(groups, per_group, head_dim, -1)
    for start in range(0, tokens, chunk):
        stop = min(start + chunk, tokens)
        length = stop - start
        # Sums of log decay in float64: their differences are what counts, and neighbours differ by little.
        decay_sum = (dt[start:stop] * a).double().cumsum(0).T.reshape(groups, per_group, length)
        weighted = (
            (x[start:stop] * dt[start:stop, :, None]).transpose(0, 1).reshape(groups, per_group, length, head_dim)
        )
        b_chunk = b[start:stop].transpose(0, 1)
        c_chunk = c[start:stop].transpose(0, 1)

        # Within the chunk: token s reaches token l >= s through exp(sum of log decay between them).
        between = decay_sum[..., :, None] - decay_sum[..., None, :]
        reach = torch.exp(between.tril().float()).tril()
        scores = (c_chunk @ b_chunk.transpose(1, 2))[:, None] * reach
        out = scores @ weighted

        # From before the chunk, and on to the next.
        since_start = torch.exp(decay_sum.float())[..., None]
        to_end = torch.exp((decay_sum[..., -1:] - decay_sum).float())[..., None]
        out += (c_chunk[:, None] @ now.transpose(2, 3)) * since_start
        now.mul_(since_start[..., -1:, :]).add_((weighted * to_end).transpose(2, 3) @ b_chunk[:, None])
        y[start:stop] = out.reshape(heads, length, head_dim).transpose(0, 1)
    return y.add_(x * d[:, None])
