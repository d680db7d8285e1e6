"""Mamba and MLP layers on a card: a token by step kernels in float32, prompts with BF16 inputs.

In a prompt pass what goes into a matrix is rounded to BF16 (the matrices are exact, sums are float32); norms, scans,
states and the residual stream stay in float32.
"""

from __future__ import annotations

import torch

from nemolab.engine.gpu.state import MambaState
from nemolab.engine.gpu.weights import CardWeights
from nemolab.kernels.matvec import ADD, RELU2


class Norm:
    """An RMS norm."""

    def __init__(self, weights: CardWeights, name: str, size: int, eps: float):
        self.weight, self._eps, self._rms_norm = weights.vector(name, size), eps, weights.operators.rms_norm

    def run(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """x float32 [n] or [tokens, n] into y, float32 or bfloat16; y."""
        self._rms_norm(x, self.weight, self._eps, y)
        return y

    def new(self, x: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return self.run(x, torch.empty_like(x, dtype=dtype))


class MambaLayer:
    """norm -> in_proj -> causal convolution -> selective scan -> gated norm -> out_proj, plus the residual."""

    def __init__(self, config, weights: CardWeights, index: int):
        self.heads, self.head_dim = config.mamba_num_heads, config.mamba_head_dim
        self.groups, self.state_size = config.n_groups, config.ssm_state_size
        self.inner, self.conv_dim = config.mamba_inner, config.mamba_conv_dim
        self.eps, self.dt_limit = config.layer_norm_epsilon, config.time_step_limit
        name, hidden = f"backbone.layers.{index}", config.hidden_size
        self.norm = Norm(weights, f"{name}.norm.weight", hidden, self.eps)
        self.in_proj = weights.matrix(f"{name}.mixer.in_proj", self.inner + self.conv_dim + self.heads, hidden)
        shape = (self.conv_dim, 1, config.conv_kernel)
        self.conv = weights.tensor(f"{name}.mixer.conv1d.weight", shape)[:, 0].contiguous()
        if config.use_conv_bias:
            self.conv_bias = weights.vector(f"{name}.mixer.conv1d.bias", self.conv_dim)
        else:
            self.conv_bias = torch.zeros(self.conv_dim, device=weights.device)
        self.a = -torch.exp(weights.vector(f"{name}.mixer.A_log", self.heads))
        self.d = weights.vector(f"{name}.mixer.D", self.heads)
        self.dt_bias = weights.vector(f"{name}.mixer.dt_bias", self.heads)
        self.gated_norm = weights.vector(f"{name}.mixer.norm.weight", self.inner)
        self.out_proj = weights.matrix(f"{name}.mixer.out_proj", hidden, self.inner)
        mixer = (
            self.conv, self.conv_bias, self.a, self.d, self.dt_bias, self.dt_limit, self.gated_norm, self.groups,
            self.eps,
        )  # fmt: skip
        self._piece_tokens = weights.piece_tokens
        self._step, self._prompt = weights.operators.MambaStep(*mixer), weights.operators.MambaPrompt(*mixer)
        self._h, self._projected, self._y = (
            torch.empty(size, device=weights.device) for size in (hidden, self.in_proj.rows, self.inner)
        )

    def step(self, x: torch.Tensor, state: MambaState) -> None:
        """One token: x float32 [hidden] plus the mixer's output, in place; the state moves on."""
        self.in_proj.multiply(self.norm.run(x, self._h), self._projected)
        self._step.run(self._projected, state.conv, state.ssm, self._y)
        self.out_proj.multiply(self._y, x, ADD)

    def prompt(self, x: torch.Tensor, state: MambaState) -> None:
        """x float32 [tokens, hidden] plus the mixer's output, in place; the state moves on by these tokens."""
        for piece in x.split(self._piece_tokens):
            h = self.norm.new(piece)
            y = self._mix(h, state)
            # The gate is the first part of in_proj, and is not needed before: so it is not held meanwhile.
            gate = self.in_proj.apply(h, rows=(0, self.inner))
            mixed = torch.empty(gate.shape, dtype=torch.bfloat16, device=gate.device)
            self._prompt.gate(y, gate, mixed)
            del y, gate
            self.out_proj.apply(mixed, piece, ADD)

    def _mix(self, h: torch.Tensor, state: MambaState) -> torch.Tensor:
        """The scan's output before the gate, float32 [tokens, inner], for h bfloat16 [tokens, hidden]."""
        tokens, held, end = h.shape[0], self.conv.shape[1] - 1, self.inner + self.conv_dim
        inputs = torch.empty(held + tokens, self.conv_dim, device=h.device)
        inputs[:held] = state.conv.T
        self.in_proj.apply(h, inputs[held:], rows=(self.inner, end))
        state.conv.copy_(inputs[tokens:].T)
        convolved = self._prompt.convolve(inputs)
        del inputs
        return self._prompt.scan(convolved, self.in_proj.apply(h, rows=(end, end + self.heads)), state.ssm)


class Mlp:
    """down(relu(up(x))^2)."""

    def __init__(self, weights: CardWeights, name: str, hidden: int, inter: int):
        self.up = weights.matrix(f"{name}.up_proj", inter, hidden)
        self.down = weights.matrix(f"{name}.down_proj", hidden, inter)
        self._inner = torch.empty(inter, device=weights.device)

    def add_step(self, h: torch.Tensor, x: torch.Tensor) -> None:
        """One token: x += MLP(h), both float32 [hidden]."""
        self.up.multiply(h, self._inner, RELU2)
        self.down.multiply(self._inner, x, ADD)

    def add_prompt(self, h: torch.Tensor, x: torch.Tensor) -> None:
        """x float32 [tokens, hidden] += MLP(h), h bfloat16."""
        self.down.apply(self.up.apply(h, mode=RELU2).bfloat16(), x, ADD)


class MlpLayer:
    """norm -> MLP, plus the residual."""

    def __init__(self, config, weights: CardWeights, index: int):
        name = f"backbone.layers.{index}"
        self.norm = Norm(weights, f"{name}.norm.weight", config.hidden_size, config.layer_norm_epsilon)
        self.mlp = Mlp(weights, f"{name}.mixer", config.hidden_size, config.intermediate_size)
        self._piece_tokens = weights.piece_tokens
        self._h = torch.empty(config.hidden_size, device=weights.device)

    def step(self, x: torch.Tensor, state: None) -> None:
        """One token: x float32 [hidden] plus the MLP's output, in place."""
        self.mlp.add_step(self.norm.run(x, self._h), x)

    def prompt(self, x: torch.Tensor, state: None) -> None:
        """x float32 [tokens, hidden] plus the MLP's output, in place."""
        for piece in x.split(self._piece_tokens):
            self.mlp.add_prompt(self.norm.new(piece), piece)
