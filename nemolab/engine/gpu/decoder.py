"""One token through all layers on a card: what the CPU does between the segments that the card computes.

    segment 0:   [layers before the first MoE layer] [that layer as far as the card gets by itself]
    between:     learn its choice, fetch from the cache, queue what was missing, begin to read the next layer's guesses
    segment 1:   [its experts' sum into the residual] [layers up to the next MoE layer] [that one, as far ...]
    ...
    the last:    [the last sum into the residual] [what layers are left] [final norm, head]

Segments queue the same for every token, so that they can be captured as graphs; whatever depends on a token's choices,
or waits, lies between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from nemolab.engine.gpu.attention import AttentionSteps
from nemolab.engine.gpu.expert_fetch import ExpertFetcher
from nemolab.engine.gpu.moe import MoeLayer
from nemolab.engine.gpu.pinned import PinnedArray
from nemolab.engine.gpu.state import AttentionState, MambaState
from nemolab.engine.gpu.token_parts import TokenParts
from nemolab.engine.state import State


class TokenInput:
    """What a token brings to the card: its embedding and its place, in one copy.

    .x       float32 [hidden] on the card: the residual stream from then on
    .tokens  int32 [1] on the card: how many tokens there are with this one
    """

    def __init__(self, hidden: int, device):
        self._device, self._here = device, PinnedArray((hidden + 1,), np.float32, device.locker)
        there = torch.zeros(hidden + 1, device=device.torch_device)
        self.x, self.tokens = there[:hidden], there[hidden:].view(torch.int32)

    def send(self, embedding: torch.Tensor, tokens: int) -> None:
        """Queue the copy. embedding  float32 [hidden] on the CPU"""
        self._here.array[:-1] = embedding.numpy()
        self._here.array[-1:].view(np.int32)[0] = tokens
        self._device.copy(self.x.data_ptr(), self._here.address, self._here.nbytes)

    def close(self) -> None:
        self._here.close()


class Decoder:
    """Runs tokens.

    layers    of the model, in order; head  queues what makes logits float32 [vocab] on the card of a finished x there
    token, attention, parts  what those layers work on
    prefetch  of the guesses for the next MoE layer, how many are read
    speculate of them, how many are copied, as far as they are cached: for a step that can
    """

    def __init__(
        self, layers: Sequence, head: Callable[[torch.Tensor], torch.Tensor], vocab: int, token: TokenInput,
        attention: AttentionSteps, parts: TokenParts, fetcher: ExpertFetcher, prefetch: int, speculate: int, device,
    ):  # fmt: skip
        self._layers, self._head, self._token, self._attention = layers, head, token, attention
        self._parts, self._fetcher, self._device = parts, fetcher, device
        self._prefetch, self._speculate = prefetch, speculate
        self._moe_layers = [layer for layer in layers if isinstance(layer, MoeLayer)]
        places = [place for place, layer in enumerate(layers) if isinstance(layer, MoeLayer)]
        # The layers of each segment that are no MoE layers: first and last + 1.
        self._between = list(zip([0, *(place + 1 for place in places)], [*places, len(layers)], strict=True))
        self._logits = PinnedArray((vocab,), np.float32, device.locker)
        self._is_sound = True

    def run(self, embedding: torch.Tensor, state: State) -> torch.Tensor:
        """One token: embedding float32 [hidden] on the CPU -> logits float32 [vocab] there; the state moves on by it.

        Raises StoreError and EngineError; the state is then of no use any more, everything else is.
        """
        if not self._is_sound:
            self._recover()
        self._is_sound = False
        parts, step, fetcher = self._parts, self._parts.step, self._fetcher
        growing = [layer for layer in state.layers if isinstance(layer, AttentionState)]
        self._attention.reserve(growing)
        self._parts.segments.begin(_tensors(state))
        self._token.send(embedding, state.tokens + 1)
        if parts.forced:
            parts.forced.send()
        if parts.record:
            parts.record.begin()
        for number in range(len(self._moe_layers)):
            following = number + 1 < len(self._moe_layers)
            guesses = parts.guesses if following else None
            step.expect(number)
            if guesses:
                guesses.expect(number)
            self._parts.segments.run(number, partial(self._queue, number, state))
            experts = step.choice(number)
            fetch = fetcher.fetch(number, experts)
            missed = fetcher.cache.missed
            step.finish(number, fetch)
            if guesses:
                guessed = guesses.learn(number)
                if self._prefetch:  # in the gap: not beside what this layer itself reads
                    fetcher.cache.prefetch(number + 1, guessed[: self._prefetch].tolist())
                if self._speculate:
                    step.look_ahead(number + 1, guessed[: self._speculate].tolist(), fetcher.keeper.find)
            if parts.record:
                parts.record.note(experts, missed, guessed if guesses else None)
        self._parts.segments.run(len(self._moe_layers), partial(self._queue, len(self._moe_layers), state))
        self._device.main_stream().synchronize()
        if parts.record:
            parts.record.hand_over()
        for layer in growing:
            layer.tokens += 1
        self._is_sound = True
        return torch.from_numpy(self._logits.array.copy())

    def _queue(self, number: int, state: State) -> None:
        """Queue a segment: the same for every token on tensors of a state, so that it can be captured."""
        x, (first, last) = self._token.x, self._between[number]
        if number > 0:
            self._moe_layers[number - 1].leave(x)
        for layer, layer_state in zip(self._layers[first:last], state.layers[first:last], strict=True):
            layer.step(x, layer_state)
        if number < len(self._moe_layers):
            self._moe_layers[number].enter(x)
        else:
            logits = self._head(x)
            self._device.copy(self._logits.address, logits.data_ptr(), self._logits.nbytes)

    def _recover(self) -> None:
        """After a token that broke off anywhere: whatever it had queued is done, and nothing it half wrote is used."""
        self._parts.segments.drop()  # first: as long as a graph is being captured, waiting fails
        self._device.wait()
        self._fetcher.start_over()
        self._parts.step.start_over()

    def close(self) -> None:
        """Once the card is done. Closing twice is fine."""
        self._parts.segments.drop()
        self._logits.close()


def _tensors(state: State) -> list[torch.Tensor]:
    """All tensors of a state that segments work on."""
    found = []
    for layer in state.layers:
        if isinstance(layer, MambaState):
            found += (layer.conv, layer.ssm)
        elif isinstance(layer, AttentionState):
            found += (layer.keys, layer.values)
    return found
