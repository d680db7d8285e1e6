"""MoE layers: route, fetch the chosen experts, add them up in a fixed order.

Every sum over experts runs in rank order (the router's order of choice) for each token by itself. No index_add_, no
scatter_add_: the order in which experts arrive (from RAM or from disk) never reaches the arithmetic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from nemolab.checkpoint.formats import GROUP
from nemolab.engine.guesser import Guesser
from nemolab.engine.mlp import PIECE_TOKENS, Mlp
from nemolab.engine.weights import DenseWeights
from nemolab.kernels.expert_prompt import expert_prompt
from nemolab.kernels.expert_step import ExpertStep
from nemolab.kernels.matvec import ADD
from nemolab.kernels.rms_norm import rms_norm, rms_norm_torch
from nemolab.kernels.router_step import RouterStep, router_step_torch
from nemolab.kernels.simd import array_address
from nemolab.kernels.team import Team

if TYPE_CHECKING:
    from nemolab.trace import Recorder


class MoeLayer:
    """norm -> router, latent down, routed experts, latent up, plus the shared expert, plus the residual.

    ordinal    which MoE layer this is, counting MoE layers only: how store and cache number them
    .guesser   what guesses the next MoE layer's experts from this one's input, or None
    .prefetch  how many of those guesses are read ahead
    .recorder  told what was routed, guessed, active and missed; None as a rule
    """

    def __init__(self, config, weights: DenseWeights, index: int, ordinal: int, store, cache, team: Team):
        self.ordinal, self.store, self.cache, self.team = ordinal, store, cache, team
        self.eps, self.width = config.layer_norm_epsilon, config.expert_in
        self.scales_2 = np.ascontiguousarray(store.globals[ordinal])
        name, hidden = f"backbone.layers.{index}", config.hidden_size
        self.norm = weights.vector(f"{name}.norm.weight", hidden)
        # Router weights are small and decide everything: float32, whatever they are stored in.
        self.gate = weights.matrix(f"{name}.mixer.gate", config.n_experts, hidden).in_float32()
        self.gate_bias = weights.vector(f"{name}.mixer.gate.e_score_correction_bias", config.n_experts)
        self.routing = (
            config.top_k,
            config.n_group,
            config.topk_group,
            config.norm_topk_prob,
            config.routed_scaling_factor,
        )
        self.latent_down = self.latent_up = None
        if weights.has_module(f"{name}.mixer.fc1_latent_proj"):
            self.latent_down = weights.matrix(f"{name}.mixer.fc1_latent_proj", self.width, hidden)
            self.latent_up = weights.matrix(f"{name}.mixer.fc2_latent_proj", hidden, self.width)
        shared = f"{name}.mixer.shared_experts"
        self.shared = None
        if weights.has_module(f"{shared}.up_proj"):
            self.shared = Mlp(weights, shared, hidden, config.moe_shared_expert_intermediate_size)
        self._router = RouterStep(config.n_experts, *self.routing)
        self._experts = ExpertStep(*store.expert_shape, config.top_k, store.layout)
        self._norm, self._bias, self._eps = self.norm.numpy(), self.gate_bias.numpy(), np.float32(self.eps)
        self._h, self._logits = np.empty(hidden, np.float32), np.empty(config.n_experts, np.float32)
        self._latent, self._routed = np.empty(self.width, np.float32), np.empty(self.width, np.float32)
        self.guesser: Guesser | None = None
        self.prefetch = 0
        self.recorder: Recorder | None = None

    def make_guesser(self, count: int) -> Guesser:
        """What guesses this layer's experts from an earlier layer's input."""
        return Guesser(self.gate, self._bias, count, self.routing[1:])

    def step(self, team: Team, x: np.ndarray, state: None = None) -> None:
        """One token: x float32 [hidden] plus the layer's output, in place."""
        h, active = (self._h, None) if self.recorder is None else self.recorder.lend(self.ordinal)
        rms_norm(x, self._norm, self._eps, h)
        self.gate.multiply(h, self._logits)
        experts, weights = self._router.run(self._logits, self._bias)
        rows = self.cache.lookup_rows(self.ordinal, experts.tolist(), "decode")
        guesses = self.guesser.guess(h) if self.guesser else None
        if self.prefetch:  # read while this layer computes
            self.cache.prefetch(self.ordinal + 1, guesses[: self.prefetch].tolist())
        latent = h
        if self.latent_down:
            latent = self._latent
            self.latent_down.multiply(h, latent)
        block_bytes, scales_2 = self.store.block_bytes, self.scales_2[experts]
        self._experts.run(team, self._addresses(rows), block_bytes, scales_2, weights, latent, self._routed, active)
        if self.latent_up:
            self.latent_up.multiply(self._routed, x, ADD)
        else:
            x += self._routed
        if self.shared:
            self.shared.add_step(h, x)
        if self.recorder is not None:
            self.recorder.decode_layer(self.ordinal, h, experts, weights, active, self.cache.missed, guesses)

    def prompt(self, x: torch.Tensor, state: None = None) -> torch.Tensor:
        """x [tokens, hidden] -> x plus the layer's output, in place; each needed expert is read at most once."""
        h = rms_norm_torch(x, self.norm, self.eps)
        experts, weights = router_step_torch(self.gate.apply(h), self.gate_bias, *self.routing)
        latent = self.latent_down.apply(h) if self.latent_down else h
        active = None
        if self.recorder:
            active = np.zeros((*experts.shape, self.store.expert_shape[0] // GROUP), np.uint16)
        routed = self._routed_prompt(latent, experts, weights, active)
        if self.recorder:
            self.recorder.prompt_layer(self.ordinal, h, experts, weights, active, self.cache.missed)
        for start in range(0, x.shape[0], PIECE_TOKENS):
            piece = slice(start, start + PIECE_TOKENS)
            x[piece] += self.latent_up.apply(routed[piece]) if self.latent_up else routed[piece]
            if self.shared:
                x[piece] += self.shared.apply(h[piece])
        return x

    def _routed_prompt(
        self, latent: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, active: np.ndarray | None
    ) -> torch.Tensor:
        """The weighted sum of each token's experts, [tokens, width]. active: as `expert_prompt`, by token and rank."""
        tokens, top_k = experts.shape
        results = torch.empty(tokens * top_k, self.width)  # one row for each (token, rank)
        flat = experts.flatten()
        pairs = flat.argsort(stable=True).numpy()  # all pairs of an expert side by side, tokens ascending
        ends = flat.bincount(minlength=self.scales_2.shape[0]).cumsum(0).numpy()
        needed = torch.unique(flat).tolist()
        for ids, rows in self.cache.stream_rows(self.ordinal, needed, "prefill", flat.numpy()):
            starts = np.concatenate([[ends[ids[0] - 1] if ids[0] else 0], ends[ids]])
            expert_prompt(
                self.team,
                self._addresses(rows),
                self.store.layout,
                self.store.expert_shape[0],
                self.scales_2[ids],
                starts,
                pairs,
                top_k,
                latent.numpy(),
                results.numpy(),
                None if active is None else active.reshape(tokens * top_k, -1),
            )
        results = results.view(tokens, top_k, self.width)
        out = results[:, 0] * weights[:, :1]
        for rank in range(1, top_k):
            out += results[:, rank] * weights[:, rank : rank + 1]
        return out

    def _addresses(self, rows: list[int]) -> np.ndarray:
        """Where blocks lie that the cache keeps in these rows of its arena."""
        return np.array(rows, np.int64) * self.store.block_bytes + array_address(self.cache.arena)
