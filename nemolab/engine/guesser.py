"""Guesses: which experts the next MoE layer will choose, told by its own router from what this one was given."""

from __future__ import annotations

import numpy as np

from nemolab.kernels.router_step import RouterStep


class Guesser:
    """The router of the next MoE layer on the input of this one, rescaled by nothing.

    gate, bias  the next layer's; routing  (groups, top_groups, normalise, scaling) as for its own choice
    count       how many guesses
    """

    def __init__(self, gate, bias: np.ndarray, count: int, routing: tuple):
        self.gate, self.bias, self.count = gate, bias, count
        self._router = RouterStep(gate.rows, count, *routing)
        self._logits = np.empty(gate.rows, np.float32)

    def guess(self, h: np.ndarray) -> np.ndarray:
        """h float32 [hidden], a MoE layer's input behind its norm -> ids int64 [count] by rank, new."""
        self.gate.multiply(h, self._logits)
        return self._router.run(self._logits, self.bias)[0]
