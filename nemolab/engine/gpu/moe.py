"""MoE layers on a card: route there, learn the choice, fetch from the cache, add up in a fixed order."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from nemolab.checkpoint.formats import GROUP
from nemolab.engine.gpu.layers import PIECE_TOKENS, Mlp, Norm
from nemolab.engine.gpu.weights import CardWeights
from nemolab.kernels.matvec import ADD
from nemolab.kernels.router_step import router_step_torch

if TYPE_CHECKING:
    from nemolab.trace import Recorder


class Choice:
    """What a token's routers chose: on the card, where layers write it, and as the CPU learns it.

    A layer's own top_k come first, then guesses for the next MoE layer.
    """

    def __init__(self, top_k: int, device):
        self._device, self.top_k = device, top_k
        self.weights = torch.empty(top_k, device=device.torch_device)
        self.set_guesses(0)

    def set_guesses(self, count: int) -> None:
        self._there = torch.empty(self.top_k + count, dtype=torch.int32, device=self._device.torch_device)
        self._here = self._device.host_tensor(self.top_k + count, dtype=torch.int32)
        self.ids, self.guesses = self._there[: self.top_k], self._there[self.top_k :]
        self.guess_weights = torch.empty(count, device=self._device.torch_device)

    def learn(self) -> np.ndarray:
        """Wait for the card: ids by rank, then guesses by rank. Valid until the next call."""
        self._here.copy_(self._there, non_blocking=True)
        if self._device.torch_device.type == "cuda":
            torch.cuda.current_stream(self._device.torch_device).synchronize()
        return self._here.numpy()


class MoeLayer:
    """norm -> router, latent down, routed experts, latent up, plus the shared expert, plus the residual.

    ordinal    which MoE layer this is, counting MoE layers only: how store and cache number them
    .following the next MoE layer while its experts are guessed here, or None
    .prefetch  how many of those guesses are read ahead
    .recorder  told what was routed, guessed, active and missed; None as a rule
    """

    def __init__(self, config, weights: CardWeights, index: int, ordinal: int, store, cache, shared_parts):
        self.ordinal, self.cache, self._store = ordinal, cache, store
        self.choice, self.token_experts, self.prompt_experts = shared_parts
        self._weights, self._config = weights, config
        hidden, width, device = config.hidden_size, config.expert_in, weights.device
        name = f"backbone.layers.{index}"
        self._gate_name = f"{name}.mixer.gate"
        self.scales_2 = torch.from_numpy(np.ascontiguousarray(store.globals[ordinal])).to(device)
        self.norm = Norm(weights, f"{name}.norm.weight", hidden, config.layer_norm_epsilon)
        self.card_gate = weights.matrix(self._gate_name, config.n_experts, hidden, decoded=True)
        self.card_bias = weights.vector(f"{self._gate_name}.e_score_correction_bias", config.n_experts)
        self.limits = (config.n_group, config.topk_group)
        self.routing = (config.top_k, *self.limits, config.norm_topk_prob, config.routed_scaling_factor)
        self.latent_down = self.latent_up = self.shared = None
        if weights.has_module(f"{name}.mixer.fc1_latent_proj"):
            self.latent_down = weights.matrix(f"{name}.mixer.fc1_latent_proj", width, hidden)
            self.latent_up = weights.matrix(f"{name}.mixer.fc2_latent_proj", hidden, width)
        shared = f"{name}.mixer.shared_experts"
        if weights.has_module(f"{shared}.up_proj"):
            self.shared = Mlp(weights, shared, hidden, config.moe_shared_expert_intermediate_size)
        self._router = weights.operators.RouterStep(config.n_experts, *self.routing, device)
        self._h, self._latent, self._routed, self._logits = (
            torch.empty(size, device=device) for size in (hidden, width, width, config.n_experts)
        )
        self.following: MoeLayer | None = None
        self.prefetch = 0
        self._guesser = None
        self.recorder: Recorder | None = None

    @cached_property
    def gate(self):
        """The router's matrix in the CPU's memory, for what guesses there: a recorder."""
        stored = self._weights.stored.matrix(self._gate_name, self._config.n_experts, self._config.hidden_size)
        return stored.in_float32()

    @cached_property
    def gate_bias(self) -> torch.Tensor:
        return self.card_bias.cpu()

    def guess_for(self, following: MoeLayer | None, count: int, prefetch: int) -> None:
        """Guess so many experts of the next MoE layer (0: none) with its router; read the first `prefetch` ahead."""
        self.following, self.prefetch, self._guesser = (following if count else None), prefetch, None
        if self.following:
            settings = (self._config.n_experts, count, *self.routing[1:], self._weights.device)
            self._guesser = self._weights.operators.RouterStep(*settings)

    def step(self, x: torch.Tensor, state: None) -> None:
        """One token: x float32 [hidden] plus the layer's output, in place."""
        h, choice = self.norm.run(x, self._h), self.choice
        self.card_gate.multiply(h, self._logits)
        self._router.run(self._logits, self.card_bias, choice.ids, choice.weights)
        if self.following:
            self.following.card_gate.multiply(h, self._logits)
            self._guesser.run(self._logits, self.following.card_bias, choice.guesses, choice.guess_weights)
        learned = choice.learn()
        experts, guesses = learned[: choice.top_k], learned[choice.top_k :] if self.following else None
        rows = self.cache.lookup_rows(self.ordinal, experts.tolist(), "decode")
        if self.prefetch:  # read while this layer computes
            self.cache.prefetch(self.ordinal + 1, guesses[: self.prefetch].tolist())
        latent = h
        if self.latent_down:
            latent = self._latent
            self.latent_down.multiply(h, latent)
        self.token_experts.run(rows, choice.ids, choice.weights, self.scales_2, latent, self._routed)
        if self.latent_up:
            self.latent_up.multiply(self._routed, x, ADD)
        else:
            x += self._routed
        if self.shared:
            self.shared.add_step(h, x)
        if self.recorder:
            self._record(h, experts, guesses)

    def _record(self, h: torch.Tensor, experts: np.ndarray, guesses: np.ndarray | None) -> None:
        """All in memory of its own: buffers here are used again by the next layer, before the recorder copies."""
        active = self.token_experts.step.active.cpu().numpy().astype(np.uint16)
        guesses = None if guesses is None else guesses.copy()
        weights = self.choice.weights.to("cpu", copy=True).numpy()
        seen = h.to("cpu", copy=True).numpy()
        self.recorder.decode_layer(self.ordinal, seen, experts.copy(), weights, active, self.cache.missed, guesses)

    def prompt(self, x: torch.Tensor, state: None) -> None:
        """x [tokens, hidden] plus the layer's output, in place; each needed expert is read at most once."""
        tokens = x.shape[0]
        h = self.norm.new(x, torch.float32)
        # What decides is not rounded.
        experts, weights = router_step_torch(self.card_gate.apply_float32(h), self.card_bias, *self.routing)
        rounded, recorder = h.bfloat16(), self.recorder
        if not recorder:
            del h  # as large as the stream itself, and no longer needed
        latent = self.latent_down.apply(rounded).bfloat16() if self.latent_down else rounded
        active = np.zeros((*experts.shape, self._store.expert_shape[0] // GROUP), np.uint16) if recorder else None
        most = most_pairs(tokens)
        routed = self.prompt_experts.run(self.ordinal, latent, experts, weights, self.scales_2, most, active)
        del latent
        if recorder:
            chosen = experts.cpu().numpy(), weights.cpu().numpy()
            recorder.prompt_layer(self.ordinal, h.cpu(), *chosen, active, self.cache.missed)
        for start in range(0, tokens, PIECE_TOKENS):
            piece = slice(start, start + PIECE_TOKENS)
            if self.latent_up:
                self.latent_up.apply(routed[piece].bfloat16(), x[piece], ADD)
            else:
                x[piece] += routed[piece]
            if self.shared:
                self.shared.add_prompt(rounded[piece], x[piece])


def most_pairs(tokens: int) -> int:
    """(token, rank) pairs that routed experts work on at once: an expert has at most one a token."""
    return max(tokens, 4096)
