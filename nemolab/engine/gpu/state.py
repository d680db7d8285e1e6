"""A conversation's state on a card: the tensors of `nemolab.engine.state`, float32 there too.

What stays must not lie in pieces of memory that torch keeps of a prompt's activations: it would hold them for good, and
the next prompt would need its own anew. So torch gives back what it keeps before a state takes anything.
"""

from __future__ import annotations

import torch

from nemolab.engine import state
from nemolab.engine.state import KV_STEP_TOKENS, State


class MambaState(state.MambaState):
    def __post_init__(self):
        pass  # no arrays of the CPU's over these tensors

    def copy(self) -> MambaState:
        _give_back(self.ssm.device)
        return MambaState(self.conv.clone(), self.ssm.clone())


class AttentionState(state.AttentionState):
    """The capacity is a whole number of KV_STEP_TOKENS, so that kernels see few of them; both lie in one allocation."""

    def __post_init__(self):
        pass

    def copy(self) -> AttentionState:
        return AttentionState(*self._in_room_for(self.keys.shape[0]), self.tokens)

    def reserve(self, extra: int) -> None:
        capacity = self.keys.shape[0]
        grown = grow_capacity(capacity, self.tokens + extra)
        if grown != capacity:
            self.keys, self.values = self._in_room_for(grown)

    def _in_room_for(self, capacity: int) -> torch.Tensor:
        """Keys and values in new memory, [2, capacity, kv_width]."""
        _give_back(self.keys.device)
        both = self.keys.new_empty(2, capacity, self.keys.shape[1])
        both[0, : self.tokens], both[1, : self.tokens] = self.keys[: self.tokens], self.values[: self.tokens]
        return both


def _give_back(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


def grow_capacity(capacity: int, needed: int) -> int:
    """Tokens that keys and values have room for, once `needed` must fit."""
    if needed <= capacity:
        return capacity
    return -(-max(needed, capacity + capacity // 2) // KV_STEP_TOKENS) * KV_STEP_TOKENS


def empty_state(config, device: torch.device) -> State:
    """The state before the first token, on a device."""
    _give_back(device)
    layers = []
    for layer in State.empty(config).layers:
        if isinstance(layer, state.MambaState):
            layer = MambaState(layer.conv.to(device), layer.ssm.to(device))
        elif isinstance(layer, state.AttentionState):
            layer = AttentionState(layer.keys.to(device), layer.values.to(device))
        layers.append(layer)
    return State(layers)


def state_bytes(config, tokens: int) -> int:
    """Of a conversation of so many tokens."""
    inner = config.mamba_num_heads * config.mamba_head_dim
    conv_dim = inner + 2 * config.n_groups * config.ssm_state_size
    mamba = conv_dim * (config.conv_kernel - 1) + inner * config.ssm_state_size
    capacity = -(-tokens // KV_STEP_TOKENS) * KV_STEP_TOKENS
    attention = 2 * capacity * config.num_key_value_heads * config.head_dim
    kinds = list(config.layer_types)
    return 4 * (kinds.count("mamba") * mamba + kinds.count("attention") * attention)
