"""Plain ReLU^2 MLP layers ('-' in the pattern), and the same thing as the shared expert of an MoE layer."""

from __future__ import annotations

import numpy as np
import torch

from nemolab.engine.weights import DenseWeights
from nemolab.kernels.matvec import ADD, RELU2
from nemolab.kernels.rms_norm import rms_norm, rms_norm_torch
from nemolab.kernels.team import Team

PIECE_TOKENS = 1024


class Mlp:
    """down(relu(up(x))^2)."""

    def __init__(self, weights: DenseWeights, name: str, hidden: int, inter: int):
        self.up = weights.matrix(f"{name}.up_proj", inter, hidden)
        self.down = weights.matrix(f"{name}.down_proj", hidden, inter)
        self._inner = np.empty(inter, np.float32)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, hidden] -> [tokens, hidden]."""
        return self.down.apply(torch.relu_(self.up.apply(x)).square_())

    def add_step(self, h: np.ndarray, x: np.ndarray) -> None:
        """One token: x += MLP(h), both float32 [hidden]."""
        self.up.multiply(h, self._inner, RELU2)
        self.down.multiply(self._inner, x, ADD)


class MlpLayer:
    """norm -> MLP, plus the residual."""

    def __init__(self, config, weights: DenseWeights, index: int):
        name = f"backbone.layers.{index}"
        self.eps = config.layer_norm_epsilon
        self.norm = weights.vector(f"{name}.norm.weight", config.hidden_size)
        self.mlp = Mlp(weights, f"{name}.mixer", config.hidden_size, config.intermediate_size)
        self._norm, self._eps = self.norm.numpy(), np.float32(self.eps)
        self._h = np.empty(config.hidden_size, np.float32)

    def step(self, team: Team, x: np.ndarray, state: None = None) -> None:
        """One token: x float32 [hidden] plus the MLP's output, in place."""
        rms_norm(x, self._norm, self._eps, self._h)
        self.mlp.add_step(self._h, x)

    def prompt(self, x: torch.Tensor, state: None = None) -> torch.Tensor:
        """x [tokens, hidden] -> x plus the MLP's output, in place."""
        for start in range(0, x.shape[0], PIECE_TOKENS):
            piece = x[start : start + PIECE_TOKENS]
            piece += self.mlp.apply(rms_norm_torch(piece, self.norm, self.eps))
        return x
