"""How strong the common direction stands before each MoE layer, so that ReLU^2 leaves the share of zeros asked for.

What decides is one ratio, the direction against the rest of what experts read, and three things make it:
- how strong the rest is. The residual stream grows with every layer, and a norm divides both by it while the direction
  stays as it was embedded. `find_norm_weights` walks through the layers and adds up what each writes.
- what the drawn matrices really hold: rows of `up` differ in strength and in how much they hold back, narrow formats
  round. `sample` draws rows of a matrix, and everything is solved for these.
- what cannot be known beforehand: which experts are chosen (a router's own favourites weigh evenly, forced ones do
  not) and how far attention averages. Both write little. It matters more than it looks: too few active neurons write
  less, so the direction is stronger in the next layer and leaves fewer still. That loop has to stay well below one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

import numpy as np

from nemolab.checkpoint.formats import E2M1_VALUES, GROUP
from nemolab.synthetic import draws
from nemolab.synthetic.draws import Plant
from nemolab.synthetic.floats import BITS, to_float
from nemolab.synthetic.form import Form

EMBEDDED = 2.0  # the common direction in the embeddings
NORM_SPREAD = 0.1  # of norm weights around 1
# What a layer adds to the variance of the residual stream, which begins at 1. Attention's is for a token that attends
# to itself alone; over a text values average out to about _AVERAGED of it.
ADDED = {"mamba": 1.0, "attention": 0.25, "mlp": 1.0}
ADDED_BY_ROUTED, ADDED_BY_SHARED = 0.5, 0.4
_AVERAGED = 0.3
# A token's experts weigh unevenly, which adds more than as many even ones would: 1.03 times as much where routers
# choose among 512, 1.17 times where choices are forced.
UNEVEN = 1.1
_SAMPLED_VALUES, _MOST_ROWS = 1 << 21, 4096

# (role of a matrix, its shape) -> (rms of its ordinary entries, what is planted)
Draws = Callable[[str, tuple[int, int]], tuple[float, Plant]]


@cache
def sample(format: str, columns: int, spread: float, plant: Plant) -> np.ndarray:
    """Some first rows of a matrix drawn so, as float32 [rows, columns]; the same for every seed."""
    rows = min(_MOST_ROWS, max(2 * GROUP, _SAMPLED_VALUES // columns))

    def drawn(draw, width: int, storage: type) -> np.ndarray:
        out = draws.random_bytes(0, "sample", 0, (rows, width * np.dtype(storage).itemsize)).view(storage)
        draw.fill(out, out, 0, 1 << 40)  # of a tensor so long that its last, odd rows are not here
        return out

    if format == "nvfp4":
        codes, scales, scale_2 = draws.nvfp4_matrix(spread, 0, plant)
        packed, table = drawn(codes, columns // 2, np.uint8), np.array(E2M1_VALUES, np.float32)
        values = np.stack([table[packed & 15], table[packed >> 4]], axis=-1).reshape(rows, columns // GROUP, GROUP)
        blocks = to_float("fp8", drawn(scales, columns // GROUP, np.uint8)) * scale_2
        return (values * blocks.astype(np.float32)[:, :, None]).reshape(rows, columns)
    draw, scale = draws.fp8_matrix(spread, plant) if format == "fp8" else (draws.float_matrix(format, spread, plant), 1)
    return (to_float(format, drawn(draw, columns, BITS[format].storage)) * scale).astype(np.float32)


@dataclass(frozen=True)
class Rows:
    """Rows of an `up` matrix over an input whose ordinary columns have a spread of 1.

    spreads  of each row's pre-activations;  holds: how far below zero a direction of 1 puts them
    """

    spreads: np.ndarray
    holds: np.ndarray

    @classmethod
    def of(cls, matrix: np.ndarray, planted: int) -> Rows:
        """matrix: float32 [rows, columns], of which the first `planted` read the direction."""
        wide = matrix.astype(np.float64)
        return cls(np.sqrt((wide[:, planted:] ** 2).sum(1)).clip(1e-9), -wide[:, :planted].sum(1))

    def zeros(self, strength: float) -> float:
        """Share of pre-activations below zero under a direction of this strength."""
        thresholds = self.holds * strength / self.spreads
        return sum(map(NormalDist().cdf, thresholds)) / len(thresholds)

    def strength(self, zero_share: float) -> float:
        """The strength of the direction that leaves a share of 0.5 to 0.99 at zero."""
        low, high = 0.0, 1.0
        while self.zeros(high) < zero_share and high < 1e3:
            high *= 2
        for _ in range(25):
            middle = (low + high) / 2
            low, high = (middle, high) if self.zeros(middle) < zero_share else (low, middle)
        return high

    def moment(self, strength: float) -> float:
        """Mean square of ReLU^2 of the pre-activations."""
        thresholds = self.holds * strength / self.spreads
        return float(np.mean(self.spreads**4 * [upper_moment(threshold) for threshold in thresholds]))


def upper_moment(threshold: float) -> float:
    """Mean square of ReLU^2 of a normal number `threshold` spreads below zero: E[max(0, N - threshold)^4]."""
    normal, t = NormalDist(), threshold
    return max(0.0, (t**4 + 6 * t**2 + 3) * (1 - normal.cdf(t)) - (t**3 + 5 * t) * normal.pdf(t))


@cache
def solve(format: str, columns: int, spread: float, plant: Plant, zero_share: float) -> tuple[float, float]:
    """(strength of the direction at experts whose `up` is drawn so, mean square of their ReLU^2).

    The strength is relative to the spread of the other columns they read; nothing planted: 0.
    """
    rows = Rows.of(sample(format, columns, spread, plant), plant.columns)
    strength = rows.strength(zero_share) if plant.columns else 0.0
    return strength, rows.moment(strength)


def find_norm_weights(form: Form, hidden: int, matrix: Draws, kinds: Sequence[str], prefix: str) -> dict[int, float]:
    """Number of a MoE layer -> weight of its norm in the columns of the common direction.

    hidden  columns of the direction in the hidden state;  kinds, prefix: layers of one stack, and "backbone." or "mtp."
    Exact but for sampling, for what attention and routed experts write, and for BF16.
    """
    config, width, part = form.config, form.config.hidden_size, "mtp" if prefix == "mtp." else ""
    ordinary = width - hidden
    variance = (ordinary + hidden * EMBEDDED**2) / width  # of the residual stream, over all its columns
    weights, counts = {}, dict.fromkeys(kinds, 0)
    for layer, kind in enumerate(kinds):
        ordinal = 0 if part else counts[kind]
        counts[kind] += 1

        def see(role: str, shape: tuple[int, int], layer=layer, ordinal=ordinal) -> tuple:
            name = f"{prefix}layers.{layer}.mixer.{role}"
            return form.formats.of(name, part, ordinal), shape[1], *matrix(role.replace(".0.", "."), shape)

        rest = (1 + NORM_SPREAD**2) * (width * variance - hidden * EMBEDDED**2) / (ordinary * variance)
        if kind == "moe":
            experts_in, carried = rest, 1.0
            if config.moe_latent_size:
                spread, carried = _latent(*see("fc1_latent_proj", (config.expert_in, width)))
                experts_in = rest * spread**2
            strength, _ = solve(*see("experts.0.up_proj", (config.expert_inter, config.expert_in)), form.zero_share)
            normed = strength * math.sqrt(experts_in) / carried if hidden else 0.0
            weights[layer] = normed * math.sqrt(variance) / EMBEDDED
            read = (ordinary * rest + hidden * normed**2) / width
            added = ADDED_BY_ROUTED * experts_in**2
            if config.n_shared_experts:
                shape = (config.moe_shared_expert_intermediate_size, width)
                added += ADDED_BY_SHARED * read**2 * _unevenness(*see("shared_experts.up_proj", shape))
        elif kind == "mlp":
            shape = (config.intermediate_size, width)
            added = ADDED[kind] * (1 + NORM_SPREAD**2) ** 2 * _unevenness(*see("up_proj", shape))
        else:
            added = ADDED[kind] * (1 + NORM_SPREAD**2) * (_AVERAGED if kind == "attention" else 1)
        variance += added * ordinary / width
    return weights


@cache
def _unevenness(format: str, columns: int, spread: float, plant: Plant) -> float:
    """How much more ReLU^2 gives because rows differ in strength."""
    return float((Rows.of(sample(format, columns, spread, plant), 0).spreads ** 4).mean())


@cache
def _latent(format: str, columns: int, spread: float, plant: Plant) -> tuple[float, float]:
    """What a projection makes of ordinary columns with a spread of 1, and of a direction of 1."""
    matrix = sample(format, columns, spread, plant).astype(np.float64)
    ordinary = matrix[plant.carry_rows :, plant.columns :]
    return math.sqrt((ordinary**2).sum(1).mean()), float(matrix[0, : plant.columns].sum())
