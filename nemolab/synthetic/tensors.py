"""Every tensor of a form in the order of the files: name, dtype, shape and how its values are drawn.

What is drawn, so that wrong bytes change the logits and the planted facts hold:
- Embeddings have a spread of 1, other matrices 1/sqrt(columns): what a layer reads and computes has a spread of 1.
- A *common direction*: the first few columns of the embeddings hold one constant that no layer writes to. Norms hand it
  to the experts (through `fc1_latent_proj` where there is one), whose `up` rows are negative there: most
  pre-activations fall below zero, and ReLU^2 leaves the share asked for at zero. Norms before MoE layers make up for
  what earlier layers wrote beside it (`balance`).
- A routed expert's output is large enough that a model without it is another model.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

import numpy as np

from nemolab.checkpoint.names import CANONICAL_BACKBONE, stored_name
from nemolab.checkpoint.structure import HEAD, Expected, expect_modules, expect_mtp
from nemolab.synthetic import draws
from nemolab.synthetic.balance import (
    ADDED,
    ADDED_BY_ROUTED,
    ADDED_BY_SHARED,
    EMBEDDED,
    NORM_SPREAD,
    UNEVEN,
    find_norm_weights,
    solve,
)
from nemolab.synthetic.draws import NOTHING, Plant
from nemolab.synthetic.floats import BITS
from nemolab.synthetic.form import Form
from nemolab.synthetic.vision import list_vision

ITEM_BYTES = {"U8": 1, "F8_E4M3": 1, "BF16": 2, "F16": 2, "F32": 4, "I64": 8}

_HEAD_SPREAD = 2.5  # of the logits: enough that the likeliest token stands out
_HOLDING = draws.HOLDING_CODES_MEAN / (draws.CODE_RMS * draws.scale_rms())  # entries of `up` that hold back, in rms
OCTAVES = 6  # weight_scale_2 of two matrices lie up to 2^5 apart


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a file. `key` is its canonical name, from which its values are drawn whatever the prefix."""

    name: str
    key: str
    dtype: str
    shape: tuple[int, ...]
    draw: object

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def columns(self) -> int:
        return self.shape[-1] if self.shape else 1

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def list_tensors(form: Form) -> list[Tensor]:
    """All tensors, the backbone first, then head, MTP and vision. Lists only: nothing is drawn."""
    return list(_Lister(form).everything())


def list_linears(form: Form) -> Iterator[tuple[str, tuple[int, int], str]]:
    """(canonical name, logical shape, format) of every module that is or could be quantised."""
    lister = _Lister(form)
    for name, part, expected, ordinal in lister.modules():
        if len(expected.shape) == 2 and not expected.leaf:
            yield name, expected.shape, form.formats.of(name, part, ordinal)


@dataclass(frozen=True)
class Direction:
    """The common direction of a form: how wide it is and how strong where.

    hidden, latent  columns of the hidden state and of what experts read; 0: nothing is planted
    carry           what takes it from the hidden state to the experts' latent state, in each column of each row

    What these make of it is nearly what gives the wanted share of zeros; the norms (`balance`) do the rest.
    """

    hidden: int
    latent: int
    carry: float

    @classmethod
    def of(cls, form: Form) -> Direction:
        config = form.config
        if form.zero_share <= 0.5 or "moe" not in (*config.layer_types, *config.mtp_layer_types):
            return cls(0, 0, 0.0)
        hidden, width = _columns(config.hidden_size), _columns(config.expert_in)
        threshold = NormalDist().inv_cdf(form.zero_share)
        at_experts = threshold * math.sqrt(max(1, config.expert_in - width)) / (width * _HOLDING)
        return cls(hidden, width, at_experts / (hidden * EMBEDDED))


def _columns(width: int) -> int:
    return max(2, min(16, width // 8 // 2 * 2))


class _Lister:
    def __init__(self, form: Form):
        self.form, self.config = form, form.config
        self.direction = Direction.of(form)

    @cached_property
    def norm_weights(self) -> dict[str, float]:
        """Canonical name of a MoE layer's norm -> its weight where the common direction lies."""
        config, found = self.config, {}
        for prefix, kinds in ((CANONICAL_BACKBONE, config.layer_types), ("mtp.", config.mtp_layer_types)):
            weights = find_norm_weights(self.form, self.direction.hidden, self._matrix, kinds, prefix)
            found |= {f"{prefix}layers.{layer}.norm": weight for layer, weight in weights.items()}
        return found

    @cached_property
    def fourth_moment(self) -> float:
        """Mean square of what ReLU^2 leaves in a routed expert, in the format most of them have."""
        shape = (self.config.expert_inter, self.config.expert_in)
        format = self.form.formats.of("backbone.layers.0.mixer.experts.0.up_proj", "", 0)
        return solve(format, shape[1], *self._matrix("experts.up_proj", shape), self.form.zero_share)[1]

    def everything(self) -> Iterator[Tensor]:
        for name, part, expected, ordinal in self.modules():
            yield from self._module(name, part, expected, ordinal)
        if self.form.vision:
            for name, dtype, shape, draw in list_vision(self.form.vision, self.config.hidden_size):
                yield Tensor(name, name, dtype, shape, draw)

    def modules(self) -> Iterator[tuple[str, str, Expected, int]]:
        """(canonical name, part, what it is, which layer of its type it stands in)"""
        counts: dict[str, int] = {}
        ordinals = []
        for kind in self.config.layer_types:
            ordinals.append(counts.get(kind, 0))
            counts[kind] = ordinals[-1] + 1
        for name, expected in expect_modules(self.config).items():
            layer = layer_of(name)
            yield name, expected.part, expected, ordinals[layer] if layer is not None else 0
        for name, expected in expect_mtp(self.config).items():
            yield name, "mtp", expected, 0

    def _module(self, name: str, part: str, expected: Expected, ordinal: int) -> Iterator[Tensor]:
        shape, form = expected.shape, self.form
        format = form.formats.of(name, part, ordinal)
        role = name.rpartition("mixer.")[2] if "mixer." in name else name.rpartition(".")[2]
        if role.startswith("experts."):
            role = "experts." + role.rpartition(".")[2]
        if len(shape) == 2 and not expected.leaf:
            yield from self._linear(name, shape, format, *self._matrix(role, shape))
        elif role == "conv1d":
            draw = draws.float_matrix("bf16", shape[-1] ** -0.5)
            yield self._tensor(f"{name}.weight", "BF16", shape, draw)
        else:
            stored = name if expected.leaf else f"{name}.weight"
            draw = self._vector(name, role, shape[0])
            yield self._tensor(stored, BITS[draw_format(draw)].dtype, shape, draw)
        if expected.bias:
            zero = self.direction.hidden if role in WRITERS else 0
            draw = draws.Vector("bf16", 0.0, 0.05, zero, 0.0)
            yield self._tensor(f"{name}.bias", "BF16", shape[:1], draw)
        if form.kv_scales and part == "attention" and role in ("k_proj", "v_proj"):
            yield self._scalar(f"{name}.{role[0]}_scale", 1.0, ())

    def _matrix(self, role: str, shape: tuple[int, int]) -> tuple[float, Plant]:
        """(rms of the ordinary entries, what is planted) for a matrix of a role."""
        rows, columns = shape
        spread, way = columns**-0.5, self.direction
        unwritten = Plant(zero_rows=way.hidden) if way.hidden else NOTHING
        latent = bool(self.config.moe_latent_size)
        if role == "embeddings":
            return 1.0, Plant(columns=way.hidden, value=EMBEDDED) if way.hidden else NOTHING
        if role == HEAD:
            return _HEAD_SPREAD * spread, NOTHING
        if role == "gate":
            return spread, Plant(columns=way.hidden) if way.hidden else NOTHING
        if role in ("out_proj", "o_proj"):
            return spread * math.sqrt(ADDED["attention" if role == "o_proj" else "mamba"]), unwritten
        if role in ("down_proj", "shared_experts.down_proj"):  # ReLU^2 of N(0, 1): a mean square of 1.5
            added = ADDED["mlp"] if role == "down_proj" else ADDED_BY_SHARED
            return spread * math.sqrt(added / 1.5), unwritten
        if role == "fc1_latent_proj" and way.hidden:
            plant = Plant(columns=way.hidden, carry_rows=way.latent, carry=way.carry)
            return max(1, columns - way.hidden) ** -0.5, plant
        if role == "fc2_latent_proj":
            return spread * math.sqrt(ADDED_BY_ROUTED), unwritten
        if role == "experts.up_proj" and way.latent:
            spread = max(1, columns - way.latent) ** -0.5
            return spread, Plant(columns=way.latent, value=-_HOLDING * spread)
        if role == "experts.down_proj":
            spread *= math.sqrt(self._expert_variance() / self.fourth_moment)
            return (spread, NOTHING) if latent else (spread * math.sqrt(ADDED_BY_ROUTED), unwritten)
        return spread, NOTHING

    def _expert_variance(self) -> float:
        """Of one expert's output, so that the weighted sum of a token's experts has a variance of 1."""
        config = self.config
        weight = config.routed_scaling_factor * (1 / config.top_k if config.norm_topk_prob else 0.6)
        return 1 / (UNEVEN * config.top_k * weight**2) if weight else 1.0

    def _vector(self, name: str, role: str, width: int):
        way = self.direction
        if role in HEADS:
            return draws.Counted("bf16", HEADS[role])
        if role == "gate.e_score_correction_bias":
            return draws.Popularity(self.config.top_k, self.form.skew)
        if name == "backbone.norm_f" and self.config.tie_word_embeddings:
            tied = _HEAD_SPREAD * width**-0.5
            return draws.Vector("bf16", tied, tied / 10)
        if way.hidden and name in self.norm_weights:
            return draws.Vector("bf16", 1.0, NORM_SPREAD, way.hidden, self.norm_weights[name])
        return draws.Vector("bf16", 1.0, NORM_SPREAD)

    def _linear(self, name: str, shape: tuple[int, int], format: str, spread: float, plant: Plant) -> Iterator[Tensor]:
        rows, columns = shape
        if format == "nvfp4":
            octave = zlib.crc32(name.encode()) % OCTAVES
            codes, scales, scale_2 = draws.nvfp4_matrix(spread, octave, plant)
            yield self._tensor(f"{name}.weight", "U8", (rows, columns // 2), codes)
            yield self._tensor(f"{name}.weight_scale", "F8_E4M3", (rows, columns // 16), scales)
            yield self._scalar(f"{name}.weight_scale_2", scale_2, self.form.scalar_shape)
        elif format == "fp8":
            draw, scale = draws.fp8_matrix(spread, plant)
            yield self._tensor(f"{name}.weight", "F8_E4M3", shape, draw)
            yield self._scalar(f"{name}.weight_scale", scale, self.form.scalar_shape)
        else:
            draw = draws.float_matrix(format, spread, plant)
            yield self._tensor(f"{name}.weight", BITS[format].dtype, shape, draw)
        if self.form.has_input_scale(format):
            yield self._scalar(f"{name}.input_scale", 0.01, self.form.scalar_shape)

    def _scalar(self, key: str, value: float, shape: tuple[int, ...]) -> Tensor:
        return self._tensor(key, "F32", shape, draws.Numbers("f32", (value,)))

    def _tensor(self, key: str, dtype: str, shape: tuple[int, ...], draw) -> Tensor:
        return Tensor(stored_name(key, self.form.prefix), key, dtype, tuple(shape), draw)


# Linear maps into the residual stream, or into what experts read: their biases leave the common direction alone.
WRITERS = ("out_proj", "o_proj", "down_proj", "shared_experts.down_proj", "fc2_latent_proj", "fc1_latent_proj")

# What a Mamba head begins as, by its number and how many there are.
HEADS = {
    "A_log": lambda head, heads: np.log(head + 1),
    "dt_bias": lambda head, heads: np.log(np.expm1(1e-3 * 100 ** (head / max(1, heads - 1)))),
    "D": lambda head, heads: np.ones_like(head),
}


def layer_of(name: str) -> int | None:
    """N of `....layers.N....`"""
    head, found, rest = name.partition(".layers.")
    return int(rest.partition(".")[0]) if found else None


def draw_format(draw) -> str:
    return "f32" if isinstance(draw, draws.Popularity) else draw.format
