"""MoE layers on a card: route there, learn the choice, fetch from the cache, add up in a fixed order."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from nemolab.checkpoint.formats import GROUP
from nemolab.engine.gpu.layers import Mlp, Norm
from nemolab.engine.gpu.token_parts import TokenParts
from nemolab.engine.gpu.weights import CardWeights
from nemolab.kernels.matvec import ADD
from nemolab.kernels.router_step import router_step_torch

if TYPE_CHECKING:
    from nemolab.trace import Recorder


class MoeLayer:
    """norm -> router, latent down, routed experts, latent up, plus the shared expert, plus the residual.

    ordinal     which MoE layer this is, counting MoE layers only: how store and cache number them
    scales_2    float32 [experts, 2] on the card, of this layer
    parts       what MoE layers share in decode; prompts: in prompts
    .following  the next MoE layer, whose experts are guessed here where `parts.guesses` says so, or None
    .recorder   told of prompts what was routed, active and missed; None as a rule
    """

    def __init__(
        self, config, weights: CardWeights, index: int, ordinal: int, store, cache, scales_2, parts: TokenParts, prompts
    ):
        self.ordinal, self.cache, self.scales_2, self._store = ordinal, cache, scales_2, store
        self._parts, self.prompt_experts = parts, prompts
        self._weights, self._config, self.routing = weights, config, parts.routing
        self._piece_tokens = weights.piece_tokens
        hidden, width = config.hidden_size, config.expert_in
        name = f"backbone.layers.{index}"
        self._gate_name = f"{name}.mixer.gate"
        self.norm = Norm(weights, f"{name}.norm.weight", hidden, config.layer_norm_epsilon)
        self.card_gate = weights.matrix(self._gate_name, config.n_experts, hidden, decoded=True)
        self.card_bias = weights.vector(f"{self._gate_name}.e_score_correction_bias", config.n_experts)
        self.latent_down = self.latent_up = self.shared = None
        if weights.has_module(f"{name}.mixer.fc1_latent_proj"):
            self.latent_down = weights.matrix(f"{name}.mixer.fc1_latent_proj", width, hidden)
            self.latent_up = weights.matrix(f"{name}.mixer.fc2_latent_proj", hidden, width)
        shared = f"{name}.mixer.shared_experts"
        if weights.has_module(f"{shared}.up_proj"):
            self.shared = Mlp(weights, shared, hidden, config.moe_shared_expert_intermediate_size)
        self._h = parts.h if self.latent_down else parts.step.x
        self.following: MoeLayer | None = None
        self.recorder: Recorder | None = None

    @cached_property
    def gate(self):
        """The router's matrix in the CPU's memory, for what guesses there: a recorder."""
        stored = self._weights.stored.matrix(self._gate_name, self._config.n_experts, self._config.hidden_size)
        return stored.in_float32()

    @cached_property
    def gate_bias(self) -> torch.Tensor:
        return self.card_bias.cpu()

    def enter(self, x: torch.Tensor) -> None:
        """One token, x float32 [hidden]: queue what comes before the CPU must act: the choice, the experts' input, the
        experts themselves as far as the card can begin; and x plus the shared expert's output, in place."""
        parts, layer = self._parts, self.ordinal
        step, guesses = parts.step, parts.guesses if self.following else None
        h = self.norm.run(x, self._h)
        if self.shared and parts.shared_first:
            self.shared.add_step(h, x)
        self.card_gate.multiply(h, parts.logits)
        parts.router.run(parts.logits, self.card_bias, step.ids, step.weights)
        if parts.forced:
            parts.forced.put_choice(layer, step.ids)
        step.tell(layer)
        if guesses:
            self.following.card_gate.multiply(h, parts.logits)
            guesses.choose(parts.logits, self.following.card_bias)
            if parts.forced:
                parts.forced.put_guesses(layer, guesses.ids)
            guesses.tell(layer)
        if self.latent_down:
            self.latent_down.multiply(h, step.x)
        if self.shared and not parts.shared_first:
            # It reads the card's memory while the experts cross the bus.
            parts.branch.run(lambda: self.shared.add_step(h, x), lambda: step.start(layer))
        else:
            step.start(layer)

    def leave(self, x: torch.Tensor) -> None:
        """Once all its experts are queued: x plus their sum, in place; what they did goes to the recorder."""
        step = self._parts.step
        if self._parts.record:
            self._parts.record.queue(self.ordinal, self._h)
        if self.latent_up:
            self.latent_up.multiply(step.out, x, ADD)
        else:
            x += step.out

    def _choose(self, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Experts int64 and weights [tokens, top_k] for h [tokens, hidden], float32: what decides is not rounded."""
        ids, shares = router_step_torch(self.card_gate.apply_float32(h), self.card_bias, *self.routing)
        return ids.contiguous(), shares  # a copy: a part of all that were sorted would keep the rest

    def prompt(self, x: torch.Tensor, state: None) -> None:
        """x [tokens, hidden] plus the layer's output, in place; each needed expert is read at most once."""
        recorder, chosen, seen = self.recorder, [], []
        for piece in x.split(self._piece_tokens):
            h = self.norm.new(piece, torch.float32)
            chosen.append(self._choose(h))
            if recorder:
                seen.append(h.cpu())
        del h
        experts, weights = (torch.cat(parts) for parts in zip(*chosen, strict=True))
        chosen.clear()
        routing = self.prompt_experts.sort(experts, weights, self._config.n_experts)
        # While the CPU waits for the choice, and while the first experts cross the bus: all that does not need them.
        latent = torch.empty(x.shape[0], self._config.expert_in, dtype=torch.bfloat16, device=x.device)
        for piece, entering in zip(x.split(self._piece_tokens), latent.split(self._piece_tokens), strict=True):
            h = self.norm.new(piece)
            entering.copy_(self.latent_down.apply(h) if self.latent_down else h)
            if self.shared:
                self.shared.add_prompt(h, piece)
        del h
        active = np.zeros((*experts.shape, self._store.expert_shape[0] // GROUP), np.uint16) if recorder else None
        routed = self.prompt_experts.run(self.ordinal, latent, routing, self.scales_2, active)
        del latent
        if recorder:
            known = experts.cpu().numpy(), weights.cpu().numpy()
            recorder.prompt_layer(self.ordinal, torch.cat(seen), *known, active, self.cache.missed)
        for piece, leaving in zip(x.split(self._piece_tokens), routed.split(self._piece_tokens), strict=True):
            if self.latent_up:
                self.latent_up.apply(leaving.bfloat16(), piece, ADD)
            else:
                piece += leaving
