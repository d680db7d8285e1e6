"""The model on a card: embeddings in RAM, everything else dense on the card, routed experts through the cache."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise

import numpy as np
import torch

from nemolab.engine.gpu.attention import AttentionLayer, AttentionSteps
from nemolab.engine.gpu.cache_memory import CacheMemory
from nemolab.engine.gpu.decoder import Decoder, TokenInput
from nemolab.engine.gpu.expert_fetch import ExpertFetcher
from nemolab.engine.gpu.guard import Guard
from nemolab.engine.gpu.kept import CopyWatcher, KeepingStep, make_step
from nemolab.engine.gpu.layers import MambaLayer, MlpLayer, Norm
from nemolab.engine.gpu.moe import MoeLayer
from nemolab.engine.gpu.operators import find_operators
from nemolab.engine.gpu.plan import LOGIT_ROWS
from nemolab.engine.gpu.prompt_experts import PAIRS_PER_PIECE_TOKEN, PromptExperts
from nemolab.engine.gpu.segments import LONG_PROMPT_TOKENS, Segments
from nemolab.engine.gpu.state import AttentionState, empty_state, reserve_all
from nemolab.engine.gpu.table import ExpertTable, TableKeeper
from nemolab.engine.gpu.token_parts import TokenParts
from nemolab.engine.gpu.weights import QUANTISED, CardWeights, room_bytes
from nemolab.engine.model import ACTIVATIONS
from nemolab.engine.state import State
from nemolab.engine.trials import Trials
from nemolab.engine.weights import DenseWeights
from nemolab.errors import EngineError
from nemolab.kernels.team import Team
from nemolab.trace import DECODE, PREFILL, Recorder

EMBEDDED_TOKENS = 256  # tokens whose embeddings go up at once


class CardModel:
    """NemotronH over a store, as `nemolab.engine.model.Model`; logits come back to the CPU's memory.

    transfer  how a token's experts reach the arithmetic: see `moe_step`
    prefetch  how many guesses for the next MoE layer are read while one computes
    guard     watches the card's memory; trials  what is tried, as a rule nothing
    piece_tokens  of a prompt that layers project at once
    """

    def __init__(
        self, store, cache, team: Team, device, transfer: str, prefetch: int, guard: Guard, trials: Trials, piece_tokens
    ):
        config, operators = store.config, find_operators(device.torch_device)
        for field, known in ACTIVATIONS.items():
            if getattr(config, field) not in known:
                raise EngineError(f"{field} is {getattr(config, field)!r}; the engine computes {known[0]!r}")
        if store.layout != "neuron":
            raise EngineError(f"this store has layout {store.layout!r}; a card needs 'neuron': nemolab repack makes it")
        self.config, self.team, self.device, self._prefetch = config, team, device, prefetch
        self._guard, self._guesses = guard, max(prefetch, trials.speculate)
        stored = DenseWeights(store, team)
        weights = CardWeights(stored, room_bytes(store.dense), piece_tokens, device.torch_device, operators)
        self.embeddings = stored.matrix("backbone.embeddings", config.vocab_size, config.hidden_size)
        self.memory = CacheMemory(cache, device)
        scales_2 = torch.from_numpy(np.ascontiguousarray(store.globals)).to(device.torch_device)
        self._table = ExpertTable(store.n_layers, store.n_experts, device)
        keeper = cache.watcher = TableKeeper(self._table, self.memory)
        self._fetcher = ExpertFetcher(cache, self.memory, keeper, device)
        step = make_step(trials, transfer, store, self._table, scales_2, device, operators)
        if trials.speculate:
            # The cache knows one watcher. Copies on a guess, which nobody waits for, must have ended before what they
            # read is overwritten; only then the table is told. Without guesses, the table alone.
            cache.watcher = CopyWatcher(keeper, step)
        self._parts = TokenParts(
            config, step, Segments(device.new_graphs), self._fetcher.make_locked, device, operators
        )
        self._parts.shared_first = trials.shared_first
        self._parts.segments.wanted = not trials.no_graphs
        prompts = self._prompts = PromptExperts(
            store.expert_shape, int(PAIRS_PER_PIECE_TOKEN * piece_tokens), cache, self.memory, device, operators
        )
        self._token = TokenInput(config.hidden_size, device)
        attention, ordinal = AttentionSteps(config, device.torch_device, operators, self._token.tokens), 0
        self.layers = []
        for index, kind in enumerate(config.layer_types):
            if kind == "moe":
                parts = (store, cache, scales_2[ordinal], self._parts, prompts)
                self.layers.append(MoeLayer(config, weights, index, ordinal, *parts))
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
        self.moe_layers = [layer for layer in self.layers if isinstance(layer, MoeLayer)]
        for layer, following in pairwise(self.moe_layers):
            layer.following = following
        parts = (self._token, attention, self._parts, self._fetcher)
        head = _head(self.norm, self.head, config.hidden_size, config.vocab_size, device)
        self._decoder = Decoder(self.layers, head, config.vocab_size, *parts, prefetch, trials.speculate, device)
        self.set_recorder(None)

    @property
    def kept(self) -> dict[str, int]:
        """What a trial that keeps experts on the card counted; without one, nothing."""
        step = self._parts.step
        return step.counts if isinstance(step, KeepingStep) else {}

    @property
    def prompt_copies(self) -> int:
        """Blocks that prompts had copied to the card so far."""
        return self._prompts.copies

    def new_state(self) -> State:
        self.device.use()
        return empty_state(self.config, self.device.torch_device, self._guard.take)

    def set_recorder(self, recorder: Recorder | None) -> None:
        """Let a recorder be told everything from now on, or (None) nobody."""
        self.device.use()
        self._recorder = recorder
        # Without prefetch the recorder guesses by itself, on the CPU.
        self._parts.guess(max(self._guesses, recorder.guesses if recorder else 0) if self._guesses else 0)
        self._parts.queue_record_by(recorder)
        for layer in self.moe_layers:
            layer.recorder = recorder

    def force(self, chosen: np.ndarray | None, guesses: np.ndarray | None = None) -> None:
        """For benchmarks: from the next token on, whatever the routers say, these experts are chosen and guessed.

        chosen   int [layers, top_k] by rank; the weights stay the routers'. None: no more
        guesses  int [layers, n] by rank, made in each layer for the next; None: the routers', where there are any
        Raises EngineError for another shape, and for ids that cannot be.
        """
        self.device.use()
        self._parts.force(chosen, guesses)

    def prompt(self, ids: torch.Tensor, state: State) -> torch.Tensor:
        """ids int64 [tokens] on the CPU -> normed hidden states [tokens, hidden] on the card.

        A token that broke off before needs no mending here, as it does before the next token (`Decoder`): a prompt
        looks at no table and none of a token's buffers, and what the token had queued comes first on the same stream.
        """
        self.device.use()
        if self._recorder:
            self._recorder.begin_step(PREFILL, state, ids)
        tokens = ids.shape[0]
        if tokens > LONG_PROMPT_TOKENS:
            self._parts.segments.drop()
            self.device.release()
        hidden = self._guard.run(
            tokens, f"a pass of {tokens} tokens behind {state.tokens}", lambda: self._prompt(ids, state)
        )
        state.tokens += tokens
        if self._recorder:
            self._recorder.end_step()
        return hidden

    def _prompt(self, ids: torch.Tensor, state: State) -> torch.Tensor:
        # What stays comes first: see `state`.
        reserve_all([layer for layer in state.layers if isinstance(layer, AttentionState)], ids.shape[0])
        x = torch.empty(ids.shape[0], self.config.hidden_size, device=self.device.torch_device)
        for some, piece in zip(ids.split(EMBEDDED_TOKENS), x.split(EMBEDDED_TOKENS), strict=True):
            piece.copy_(self._embed(some))
        for layer, layer_state in zip(self.layers, state.layers, strict=True):
            layer.prompt(x, layer_state)
        return self.norm.run(x, x)

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows of these ids on the card: as stored over the bus, where that is a type it knows."""
        table = self.embeddings
        rows = table.take(ids) if table.format in QUANTISED else table.weight[ids]
        return rows.to(self.device.torch_device).float()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normed hidden states [tokens, hidden], wherever they are -> logits float32 [tokens, vocab] on the CPU."""
        self.device.use()
        out = torch.empty(hidden.shape[0], self.config.vocab_size)

        def compute() -> torch.Tensor:
            for rows, piece in zip(hidden.split(LOGIT_ROWS), out.split(LOGIT_ROWS), strict=True):
                piece.copy_(self.head.apply(rows.to(self.device.torch_device).bfloat16()))
            return out

        return self._guard.run(0, f"logits of {hidden.shape[0]} tokens", compute)

    def step(self, token_id: int, state: State) -> torch.Tensor:
        """One token -> logits float32 [vocab] on the CPU; the state moves on by it."""
        self.device.use()
        if self._recorder:
            self._recorder.begin_step(DECODE, state, (token_id,))
        embedding = self.embeddings.row(token_id)
        logits = self._guard.run(1, f"a token behind {state.tokens}", lambda: self._decoder.run(embedding, state))
        state.tokens += 1
        if self._recorder:
            self._recorder.end_step()
        return logits

    def close(self) -> None:
        """Wait for the card and unlock what is page-locked. Closing twice is fine."""
        parts = (self._decoder, self._parts, self._parts.step, self._fetcher, self._table, self._token, self.memory)
        # Each whatever the others raise, the cache's memory above all: it may not go while it is page-locked.
        with ExitStack() as stack:
            for part in reversed(parts):
                stack.callback(part.close)
            self._fetcher.cache.watcher = None
            self.device.use()
            self._parts.segments.drop()  # first: as long as a graph is being captured, waiting fails
            self.device.wait()


def _head(norm: Norm, head, hidden: int, vocab: int, device) -> Callable[[torch.Tensor], torch.Tensor]:
    """What queues the logits of a finished x. No method: a model that holds itself would stay until it is collected."""
    h, logits = (torch.empty(size, device=device.torch_device) for size in (hidden, vocab))

    def queue(x: torch.Tensor) -> torch.Tensor:
        head.multiply(norm.run(x, h), logits)
        return logits

    return queue
