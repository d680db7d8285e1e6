"""The model on a card: embeddings in RAM, everything else dense on the card, routed experts through the cache."""

from __future__ import annotations

import torch

from nemolab.engine.gpu.attention import AttentionLayer, AttentionSteps
from nemolab.engine.gpu.cache_memory import CacheMemory
from nemolab.engine.gpu.experts import TokenExperts
from nemolab.engine.gpu.guard import Guard
from nemolab.engine.gpu.layers import MambaLayer, MlpLayer, Norm
from nemolab.engine.gpu.moe import Choice, MoeLayer
from nemolab.engine.gpu.operators import find_operators
from nemolab.engine.gpu.plan import LOGIT_ROWS
from nemolab.engine.gpu.prompt_experts import PromptExperts
from nemolab.engine.gpu.state import empty_state
from nemolab.engine.gpu.weights import CardWeights
from nemolab.engine.model import ACTIVATIONS
from nemolab.engine.state import State
from nemolab.engine.weights import DenseWeights
from nemolab.errors import EngineError
from nemolab.kernels.team import Team
from nemolab.trace import DECODE, PREFILL, Recorder


class CardModel:
    """NemotronH over a store, as `nemolab.engine.model.Model`; logits come back to the CPU's memory.

    transfer  how a token's experts reach the arithmetic: see `experts`
    prefetch  how many guesses for the next MoE layer are read while one computes
    guard     watches the card's memory
    """

    def __init__(self, store, cache, team: Team, device, transfer: str, prefetch: int, guard: Guard):
        config, operators = store.config, find_operators(device.torch_device)
        for field, known in ACTIVATIONS.items():
            if getattr(config, field) not in known:
                raise EngineError(f"{field} is {getattr(config, field)!r}; the engine computes {known[0]!r}")
        if store.layout != "neuron":
            raise EngineError(f"this store has layout {store.layout!r}; a card needs 'neuron': nemolab repack makes it")
        self.config, self.team, self.device, self._prefetch = config, team, device, prefetch
        self._guard = guard
        stored = DenseWeights(store, team)
        weights = CardWeights(stored, device.torch_device, operators)
        self.embeddings = stored.matrix("backbone.embeddings", config.vocab_size, config.hidden_size)
        self.memory = CacheMemory(cache, device)
        shape, top_k = store.expert_shape, config.top_k
        self._choice = Choice(top_k, device)
        parts = (
            self._choice,
            TokenExperts(transfer, shape, top_k, self.memory, device, operators),
            PromptExperts(shape, cache.ring, cache, self.memory, device, operators),
        )
        attention, ordinal = AttentionSteps(config, device.torch_device, operators), 0
        self.layers = []
        for index, kind in enumerate(config.layer_types):
            if kind == "moe":
                self.layers.append(MoeLayer(config, weights, index, ordinal, store, cache, parts))
                ordinal += 1
            elif kind == "attention":
                self.layers.append(AttentionLayer(config, weights, index, attention))
            else:
                self.layers.append({"mamba": MambaLayer, "mlp": MlpLayer}[kind](config, weights, index))
        self.norm = Norm(weights, "backbone.norm_f.weight", config.hidden_size, config.layer_norm_epsilon)
        # A stored head wins over the flag: that is what the bytes say.
        if weights.has_module("lm_head"):
            self.head = weights.matrix("lm_head", config.vocab_size, config.hidden_size)
        else:
            self.head = weights.put(self.embeddings)
        self.nbytes = weights.nbytes
        self._h, self._x = (torch.empty(config.hidden_size, device=device.torch_device) for _ in range(2))
        self._logits = torch.empty(config.vocab_size, device=device.torch_device)
        self.moe_layers = [layer for layer in self.layers if isinstance(layer, MoeLayer)]
        self.set_recorder(None)

    def new_state(self) -> State:
        return empty_state(self.config, self.device.torch_device)

    def set_recorder(self, recorder: Recorder | None) -> None:
        """Let a recorder be told everything from now on, or (None) nobody."""
        self._recorder = recorder
        # Without prefetch the recorder guesses by itself, on the CPU.
        count = max(self._prefetch, recorder.guesses if recorder else 0) if self._prefetch else 0
        self._choice.set_guesses(count)
        for layer, following in zip(self.moe_layers, [*self.moe_layers[1:], None], strict=True):
            layer.recorder = recorder
            layer.guess_for(following, count, self._prefetch if following else 0)

    def prompt(self, ids: torch.Tensor, state: State) -> torch.Tensor:
        """ids int64 [tokens] on the CPU -> normed hidden states [tokens, hidden] on the card."""
        if self._recorder:
            self._recorder.begin_step(PREFILL, state, ids)
        tokens = ids.shape[0]
        hidden = self._guard.run(
            tokens, f"a pass of {tokens} tokens behind {state.tokens}", lambda: self._prompt(ids, state)
        )
        state.tokens += tokens
        if self._recorder:
            self._recorder.end_step()
        return hidden

    def _prompt(self, ids: torch.Tensor, state: State) -> torch.Tensor:
        x = self.embeddings.take(ids).to(self.device.torch_device)
        for layer, layer_state in zip(self.layers, state.layers, strict=True):
            layer.prompt(x, layer_state)
        return self.norm.new(x, torch.float32)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normed hidden states [tokens, hidden], wherever they are -> logits float32 [tokens, vocab] on the CPU."""
        out = torch.empty(hidden.shape[0], self.config.vocab_size)

        def compute() -> torch.Tensor:
            for rows, piece in zip(hidden.split(LOGIT_ROWS), out.split(LOGIT_ROWS), strict=True):
                piece.copy_(self.head.apply(rows.to(self.device.torch_device).bfloat16()))
            return out

        return self._guard.compute(f"logits of {hidden.shape[0]} tokens", compute)

    def step(self, token_id: int, state: State) -> torch.Tensor:
        """One token -> logits float32 [vocab] on the CPU; the state moves on by it."""
        if self._recorder:
            self._recorder.begin_step(DECODE, state, (token_id,))
        self._guard.run(1, f"a token behind {state.tokens}", lambda: self._step(token_id, state))
        state.tokens += 1
        if self._recorder:
            self._recorder.end_step()
        self.head.multiply(self.norm.run(self._x, self._h), self._logits)
        return self._logits.cpu().clone()

    def _step(self, token_id: int, state: State) -> None:
        self._x.copy_(self.embeddings.take(torch.tensor([token_id]))[0])
        for layer, layer_state in zip(self.layers, state.layers, strict=True):
            layer.step(self._x, layer_state)

    def close(self) -> None:
        """Wait for the card and unlock the cache's memory."""
        self.device.wait()
        self.memory.close()
