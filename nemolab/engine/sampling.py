"""Choosing the next token: greedy, or drawn from the softmax with temperature, top-k, top-p and a seed.

The order is top-k, then temperature, then top-p. Ties go to the lowest id, in every place.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from nemolab.errors import EngineError

GREEDY_BELOW = 1e-6  # a temperature at or below this is greedy: dividing by it would only make infinities


@dataclass
class Sampler:
    """Draws ids from logits; the same seed and the same logits give the same ids on every machine.

    temperature  0 and up; at most 1e-6 means greedy
    top_p        0..1: the smallest set of likeliest ids that reaches this mass; 0 keeps only the first
    top_k        ids kept, 0 keeps all
    Raises EngineError for anything else, NaN included.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    _random: np.random.Generator = field(init=False, repr=False)

    def __post_init__(self):
        for name in ("temperature", "top_p"):
            if isinstance(getattr(self, name), bool) or not isinstance(getattr(self, name), int | float):
                raise EngineError(f"{name} is {getattr(self, name)!r}; a number is needed")
        for name in ("top_k", "seed"):
            if isinstance(getattr(self, name), bool) or not isinstance(getattr(self, name), int):
                raise EngineError(f"{name} is {getattr(self, name)!r}; a whole number is needed")
        if not 0 <= self.temperature < math.inf:
            raise EngineError(f"temperature is {self.temperature}; 0 (greedy) or a positive number is needed")
        if not 0 <= self.top_p <= 1:
            raise EngineError(f"top_p is {self.top_p}; a number from 0 to 1 is needed")
        if self.top_k < 0 or self.seed < 0:
            raise EngineError(f"top_k {self.top_k} and seed {self.seed} must not be negative")
        self._random = np.random.Generator(np.random.PCG64(self.seed))

    @property
    def greedy(self) -> bool:
        return self.temperature <= GREEDY_BELOW or self.top_p == 0 or self.top_k == 1

    def choose(self, logits: np.ndarray) -> int:
        """The next id from logits float32 [vocab]. Raises EngineError when they hold NaN."""
        best = int(np.argmax(logits))  # the first of equals; NaN wins, which is how it is noticed
        if math.isnan(logits[best]):
            raise EngineError("the logits hold NaN: the checkpoint's weights are damaged or not what its config says")
        if self.greedy:
            return best
        ids = None
        kept = logits.astype(np.float64)
        if 0 < self.top_k < len(kept):
            ids = np.argsort(-kept, kind="stable")[: self.top_k]
            kept = kept[ids]
        weights = np.exp((kept - kept.max()) / self.temperature)
        if self.top_p < 1:
            order = np.argsort(-weights, kind="stable")
            mass = np.cumsum(weights[order])
            count = int(np.searchsorted(mass, self.top_p * mass[-1])) + 1
            order = order[:count]
            ids = order if ids is None else ids[order]
            weights = weights[order]
        mass = np.cumsum(weights)
        place = min(int(np.searchsorted(mass, self._random.random() * mass[-1], side="right")), len(mass) - 1)
        return place if ids is None else int(ids[place])
