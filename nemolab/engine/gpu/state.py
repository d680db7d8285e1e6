"""A conversation's state on a card: the tensors of `nemolab.engine.state`, float32 there too.

What stays must not lie in pieces of memory that torch keeps of a prompt's activations: it would hold them for good, and
the next prompt would need its own anew. So torch gives back what it keeps before a state takes anything: once for all
layers, since what one layer's state let go of is as good a place for another's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from nemolab.engine import state
from nemolab.engine.gpu.allocator import give_back
from nemolab.engine.state import KV_STEP_TOKENS, State


class MambaState(state.MambaState):
    def __post_init__(self):
        pass  # no arrays of the CPU's over these tensors

    @property
    def device(self) -> torch.device:
        return self.ssm.device

    def copy(self) -> MambaState:
        return MambaState(self.conv.clone(), self.ssm.clone())


class AttentionState(state.AttentionState):
    """The capacity is a whole number of KV_STEP_TOKENS, so that kernels see few of them; both lie in one allocation."""

    def __post_init__(self):
        pass

    @property
    def device(self) -> torch.device:
        return self.keys.device

    def copy(self) -> AttentionState:
        return AttentionState(*self._in_room_for(self.keys.shape[0]), self.tokens)

    def grows(self, extra: int) -> bool:
        """Does it need new memory for so many more tokens?"""
        return self.tokens + extra > self.keys.shape[0]

    def reserve(self, extra: int) -> None:
        """As of one layer: see `reserve_all`."""
        if self.grows(extra):
            self.keys, self.values = self._in_room_for(grow_capacity(self.keys.shape[0], self.tokens + extra))

    def _in_room_for(self, capacity: int) -> torch.Tensor:
        """Keys and values in new memory, [2, capacity, kv_width]."""
        both = self.keys.new_empty(2, capacity, self.keys.shape[1])
        both[0, : self.tokens], both[1, : self.tokens] = self.keys[: self.tokens], self.values[: self.tokens]
        return both


@dataclass
class CardState(State):
    """take  runs what takes memory for a copy (see `Guard.take`), and says what is wrong where that ends"""

    take: Callable[[str, Callable[[], State]], State] = lambda what, compute: compute()

    def copy(self) -> CardState:
        return self.take("a copy of a conversation", self._copy)

    def _copy(self) -> CardState:
        for device in {layer.device for layer in self.layers if layer}:
            give_back(device)
        layers = [layer.copy() if layer else None for layer in self.layers]
        return CardState(layers, self.tokens, self.whole, self.mark, self.take)


def reserve_all(layers: Sequence[AttentionState], extra: int) -> None:
    """Room for so many more tokens in the states of all attention layers."""
    growing = [layer for layer in layers if layer.grows(extra)]
    if growing:
        give_back(growing[0].device)
    for layer in growing:
        layer.reserve(extra)


def grow_capacity(capacity: int, needed: int) -> int:
    """Tokens that keys and values have room for, once `needed` must fit."""
    if needed <= capacity:
        return capacity
    return -(-max(needed, capacity + capacity // 2) // KV_STEP_TOKENS) * KV_STEP_TOKENS


def empty_state(config, device: torch.device, take: Callable[[str, Callable[[], State]], State]) -> CardState:
    """The state before the first token, on a device; take  see `CardState`."""
    return take("a conversation", lambda: _empty_state(config, device, take))


def _empty_state(config, device: torch.device, take) -> CardState:
    give_back(device)
    layers = []
    for layer in State.empty(config).layers:
        if isinstance(layer, state.MambaState):
            layer = MambaState(layer.conv.to(device), layer.ssm.to(device))
        elif isinstance(layer, state.AttentionState):
            layer = AttentionState(layer.keys.to(device), layer.values.to(device))
        layers.append(layer)
    return CardState(layers, take=take)


def state_bytes(config, tokens: int) -> int:
    """Of a conversation of so many tokens."""
    inner, conv_dim = config.mamba_inner, config.mamba_conv_dim
    mamba = conv_dim * (config.conv_kernel - 1) + inner * config.ssm_state_size
    capacity = -(-tokens // KV_STEP_TOKENS) * KV_STEP_TOKENS
    attention = 2 * capacity * config.num_key_value_heads * config.head_dim
    kinds = list(config.layer_types)
    return 4 * (kinds.count("mamba") * mamba + kinds.count("attention") * attention)
