"""MoE layers: route, fetch the chosen experts, add them up in a fixed order.

Every sum over experts runs in rank order (the router's order of choice) for each token by itself. No index_add_, no
scatter_add_: the order in which experts arrive (from RAM or from disk) never reaches the arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from nemolab.engine.mlp import PIECE_TOKENS, Mlp
from nemolab.engine.norm import rms_norm
from nemolab.engine.weights import DenseWeights
from nemolab.kernels.nvfp4 import decode_nvfp4_rows


@dataclass(frozen=True)
class Router:
    """Sigmoid router with a correction bias: the bias takes part in the choice, never in the weights. All float32."""

    weight: torch.Tensor  # [experts, hidden]
    bias: torch.Tensor  # [experts]
    top_k: int
    groups: int
    top_groups: int
    normalise: bool
    scaling: float

    def choose(self, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """h [tokens, hidden] -> experts int64 [tokens, top_k] in rank order, weights float32 the same shape.

        Rank = choice key descending; ties go to the lowest id (a stable sort, torch.topk promises nothing there).
        """
        scores = torch.sigmoid(F.linear(h, self.weight))
        key = scores + self.bias
        if self.groups > 1:
            grouped = key.unflatten(-1, (self.groups, -1))
            best_two = grouped.topk(min(2, grouped.shape[-1]), dim=-1)[0].sum(-1)
            ranked = best_two.sort(dim=-1, descending=True, stable=True)[1]
            barred = torch.ones_like(best_two, dtype=torch.bool).scatter_(1, ranked[:, : self.top_groups], False)
            key = grouped.masked_fill(barred[..., None], -torch.inf).flatten(-2)
        experts = key.sort(dim=-1, descending=True, stable=True)[1][:, : self.top_k]
        weights = scores.gather(1, experts)
        if self.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return experts, weights * self.scaling


class MoeLayer:
    """norm -> router, latent down, routed experts, latent up, plus the shared expert, plus the residual."""

    def __init__(self, config, weights: DenseWeights, index: int, ordinal: int, store, cache):
        self.ordinal = ordinal
        self.eps = config.layer_norm_epsilon
        self.store, self.cache = store, cache
        self.inter, self.width = config.expert_inter, config.expert_in
        self.scales_2 = torch.from_numpy(store.globals[ordinal])
        name, hidden = f"backbone.layers.{index}", config.hidden_size
        self.norm = weights.vector(f"{name}.norm.weight", hidden)
        self.router = Router(
            weight=weights.tensor(f"{name}.mixer.gate.weight", (config.n_experts, hidden)),
            bias=weights.vector(f"{name}.mixer.gate.e_score_correction_bias", config.n_experts),
            top_k=config.top_k,
            groups=config.n_group,
            top_groups=config.topk_group,
            normalise=config.norm_topk_prob,
            scaling=config.routed_scaling_factor,
        )
        self.latent_down = self.latent_up = None
        if weights.has_module(f"{name}.mixer.fc1_latent_proj"):
            self.latent_down = weights.matrix(f"{name}.mixer.fc1_latent_proj", self.width, hidden)
            self.latent_up = weights.matrix(f"{name}.mixer.fc2_latent_proj", hidden, self.width)
        shared = f"{name}.mixer.shared_experts"
        self.shared = None
        if weights.has_module(f"{shared}.up_proj"):
            self.shared = Mlp(weights, shared, hidden, config.moe_shared_expert_intermediate_size)

    def prompt(self, x: torch.Tensor, state: None = None) -> torch.Tensor:
        """x [tokens, hidden] -> x plus the layer's output, in place; each needed expert is read at most once."""
        h = rms_norm(x, self.norm, self.eps)
        experts, weights = self.router.choose(h)
        latent = self.latent_down.apply(h) if self.latent_down else h
        routed = self._routed(latent, experts, weights)
        for start in range(0, x.shape[0], PIECE_TOKENS):
            piece = slice(start, start + PIECE_TOKENS)
            out = self.latent_up.apply(routed[piece]) if self.latent_up else routed[piece]
            x[piece] += out + self.shared.apply(h[piece]) if self.shared else out
        return x

    def _routed(self, latent: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The weighted sum of each token's experts, [tokens, width]."""
        tokens, top_k = experts.shape
        results = torch.empty(tokens * top_k, self.width)  # one row for each (token, rank)
        flat = experts.flatten()
        pairs = flat.argsort(stable=True)  # all pairs of an expert side by side, tokens ascending
        counts = flat.bincount(minlength=self.scales_2.shape[0])
        ends = counts.cumsum(0).tolist()
        needed = counts.nonzero().flatten().tolist()
        for batch in self.cache.stream(self.ordinal, needed, "prefill"):
            for expert, block in batch:
                mine = pairs[ends[expert] - int(counts[expert]) : ends[expert]]
                results[mine] = self._expert(latent[mine // top_k], expert, block)
        results = results.view(tokens, top_k, self.width)
        out = results[:, 0] * weights[:, :1]
        for rank in range(1, top_k):
            out += results[:, rank] * weights[:, rank : rank + 1]
        return out

    def _expert(self, x: torch.Tensor, expert: int, block) -> torch.Tensor:
        """One expert on its tokens, [rows, width] -> [rows, width], decoded for the occasion."""
        views = self.store.views(block)
        up_2, down_2 = self.scales_2[expert].tolist()
        up = decode_nvfp4_rows(torch.from_numpy(views.up_values), torch.from_numpy(views.up_scales), up_2)
        h = torch.relu_(F.linear(x, up)).square_()
        down_values, down_scales = torch.from_numpy(views.down_values), torch.from_numpy(views.down_scales)
        if self.store.layout == "neuron":  # rows are neurons here: decode, then multiply from the other side
            raise NotImplementedError
        return F.linear(h, decode_nvfp4_rows(down_values, down_scales, down_2))
