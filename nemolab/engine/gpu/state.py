"""A conversation's state on a card: the tensors of `nemolab.engine.state`, float32 there too."""

from __future__ import annotations

import torch

from nemolab.engine import state
from nemolab.engine.state import KV_STEP_TOKENS, State


class MambaState(state.MambaState):
    def __post_init__(self):
        pass  # no arrays of the CPU's over these tensors

    def copy(self) -> MambaState:
        return MambaState(self.conv.clone(), self.ssm.clone())


class AttentionState(state.AttentionState):
    """The capacity is a whole number of KV_STEP_TOKENS, so that kernels see few of them."""

    def __post_init__(self):
        pass

    def copy(self) -> AttentionState:
        return AttentionState(self.keys.clone(), self.values.clone(), self.tokens)

    def reserve(self, extra: int) -> None:
        capacity = self.keys.shape[0]
        grown = grow_capacity(capacity, self.tokens + extra)
        if grown == capacity:
            return
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_empty(grown, old.shape[1])
            new[: self.tokens] = old[: self.tokens]
            setattr(self, name, new)


def grow_capacity(capacity: int, needed: int) -> int:
    """Tokens that keys and values have room for, once `needed` must fit."""
    if needed <= capacity:
        return capacity
    return -(-max(needed, capacity + capacity // 2) // KV_STEP_TOKENS) * KV_STEP_TOKENS


def empty_state(config, device: torch.device) -> State:
    """The state before the first token, on a device."""
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
