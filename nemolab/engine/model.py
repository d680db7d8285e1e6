"""The model as a list of layers: embeddings, Mamba / MoE / attention / MLP layers in the config's order, head."""

from __future__ import annotations

import numpy as np
import torch

from nemolab.engine.attention import AttentionLayer
from nemolab.engine.mamba import MambaLayer
from nemolab.engine.mlp import MlpLayer
from nemolab.engine.moe import MoeLayer
from nemolab.engine.state import State
from nemolab.engine.weights import DenseWeights
from nemolab.errors import EngineError
from nemolab.kernels.rms_norm import rms_norm, rms_norm_torch
from nemolab.kernels.team import Team
from nemolab.trace import DECODE, PREFILL, Recorder

# What the kernels compute, by the config's field: an activation under another name is another model.
ACTIVATIONS = {"mlp_hidden_act": ("relu2",), "mamba_hidden_act": ("silu", "swish")}


class Model:
    """NemotronH over a store: dense parts in memory, routed experts through a cache.

    prefetch  how many guesses for the next MoE layer are read while one computes
    """

    def __init__(self, store, cache, team: Team, prefetch: int = 0):
        config = store.config
        for field, known in ACTIVATIONS.items():
            if getattr(config, field) not in known:
                raise EngineError(f"{field} is {getattr(config, field)!r}; the engine computes {known[0]!r}")
        weights = DenseWeights(store, team)
        self.config, self.team = config, team
        self.embeddings = weights.matrix("backbone.embeddings", config.vocab_size, config.hidden_size)
        self.layers = []
        ordinal = 0
        for index, kind in enumerate(config.layer_types):
            if kind == "moe":
                self.layers.append(MoeLayer(config, weights, index, ordinal, store, cache, team))
                ordinal += 1
            else:
                maker = {"mamba": MambaLayer, "attention": AttentionLayer, "mlp": MlpLayer}[kind]
                self.layers.append(maker(config, weights, index))
        self.norm = weights.vector("backbone.norm_f.weight", config.hidden_size)
        # A stored head wins over the flag: that is what the bytes say.
        stored = weights.has_module("lm_head")
        self.head = weights.matrix("lm_head", config.vocab_size, config.hidden_size) if stored else self.embeddings
        self.nbytes = weights.nbytes
        self._norm, self._eps = self.norm.numpy(), np.float32(config.layer_norm_epsilon)
        self._h = np.empty(config.hidden_size, np.float32)
        self.moe_layers = [layer for layer in self.layers if isinstance(layer, MoeLayer)]
        self._prefetch = prefetch
        self.set_recorder(None)

    def set_recorder(self, recorder: Recorder | None) -> None:
        """Let a recorder be told everything from now on, or (None) nobody."""
        self._recorder = recorder
        # Without prefetch the recorder makes the same guesses for many tokens at once, bit for bit.
        count = max(self._prefetch, recorder.guesses if recorder else 0) if self._prefetch else 0
        for layer, following in zip(self.moe_layers, [*self.moe_layers[1:], None], strict=True):
            layer.recorder = recorder
            layer.guesser = following.make_guesser(count) if count and following else None
            layer.prefetch = self._prefetch if following else 0

    def prompt(self, ids: torch.Tensor, state: State) -> torch.Tensor:
        """ids int64 [tokens] -> normed hidden states [tokens, hidden]; the state moves on by these tokens."""
        if self._recorder:
            self._recorder.begin_step(PREFILL, state, ids)
        x = self.embeddings.take(ids)
        for layer, layer_state in zip(self.layers, state.layers, strict=True):
            x = layer.prompt(x, layer_state)
        state.tokens += ids.shape[0]
        if self._recorder:
            self._recorder.end_step()
        return rms_norm_torch(x, self.norm, self.config.layer_norm_epsilon)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normed hidden states [tokens, hidden] -> logits [tokens, vocab] float32."""
        return self.head.apply(hidden)

    def step(self, token_id: int, state: State) -> torch.Tensor:
        """One token -> logits [vocab] float32, by the step kernels; the state moves on by it."""
        if self._recorder:
            self._recorder.begin_step(DECODE, state, (token_id,))
        x = self.embeddings.row(token_id).numpy()
        for layer, layer_state in zip(self.layers, state.layers, strict=True):
            layer.step(self.team, x, layer_state)
        state.tokens += 1
        if self._recorder:
            self._recorder.end_step()
        rms_norm(x, self._norm, self._eps, self._h)
        logits = np.empty(self.head.rows, np.float32)
        self.head.multiply(self._h, logits)
        return torch.from_numpy(logits)
