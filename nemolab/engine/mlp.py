"""Plain ReLU^2 MLP layers ('-' in the pattern), and the same thing as the shared expert of an MoE layer."""

from __future__ import annotations

import torch

from nemolab.engine.norm import rms_norm
from nemolab.engine.weights import DenseWeights

PIECE_TOKENS = 1024


class Mlp:
    """down(relu(up(x))^2)."""

    def __init__(self, weights: DenseWeights, name: str, hidden: int, inter: int):
        self.up = weights.matrix(f"{name}.up_proj", inter, hidden)
        self.down = weights.matrix(f"{name}.down_proj", hidden, inter)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, hidden] -> [tokens, hidden]."""
        return self.down.apply(torch.relu_(self.up.apply(x)).square_())


class MlpLayer:
    """norm -> MLP, plus the residual."""

    def __init__(self, config, weights: DenseWeights, index: int):
        name = f"backbone.layers.{index}"
        self.eps = config.layer_norm_epsilon
        self.norm = weights.vector(f"{name}.norm.weight", config.hidden_size)
        self.mlp = Mlp(weights, f"{name}.mixer", config.hidden_size, config.intermediate_size)

    def prompt(self, x: torch.Tensor, state: None = None) -> torch.Tensor:
        """x [tokens, hidden] -> x plus the MLP's output, in place."""
        for start in range(0, x.shape[0], PIECE_TOKENS):
            piece = x[start : start + PIECE_TOKENS]
            piece += self.mlp.apply(rms_norm(piece, self.norm, self.eps))
        return x
