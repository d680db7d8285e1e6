"""What a conversation leaves behind in the model: Mamba states, convolution tails, keys and values.

Everything is float32: the recurrent state drifts in anything less, and a state that was filled token by token must
mean the same as one filled by a prompt pass. A state belongs to one model and one token sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

KV_STEP_TOKENS = 256  # keys and values grow by half, at least by this many tokens


@dataclass
class MambaState:
    """conv [conv_dim, kernel - 1]: the last inputs of the convolution; ssm [heads, head_dim, state_size]."""

    conv: torch.Tensor
    ssm: torch.Tensor

    def __post_init__(self):
        # The same memory, as the step kernels take it.
        self.conv_array, self.ssm_array = self.conv.numpy(), self.ssm.numpy()

    def copy(self) -> MambaState:
        return MambaState(self.conv.clone(), self.ssm.clone())


@dataclass
class AttentionState:
    """keys and values [capacity, kv_heads * head_dim]; the first `tokens` rows are in use."""

    keys: torch.Tensor
    values: torch.Tensor
    tokens: int = 0

    def __post_init__(self):
        self.key_array, self.value_array = self.keys.numpy(), self.values.numpy()

    def copy(self) -> AttentionState:
        return AttentionState(self.keys[: self.tokens].clone(), self.values[: self.tokens].clone(), self.tokens)

    def reserve(self, extra: int) -> None:
        """Make room for `extra` more tokens."""
        needed = self.tokens + extra
        capacity = self.keys.shape[0]
        if needed <= capacity:
            return
        grown = max(needed, capacity + max(KV_STEP_TOKENS, capacity // 2))
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = torch.empty(grown, old.shape[1])
            new[: self.tokens] = old[: self.tokens]
            setattr(self, name, new)
        self.key_array, self.value_array = self.keys.numpy(), self.values.numpy()


@dataclass(frozen=True)
class Mark:
    """What a state fits: engines of the same model (`Store.fingerprint`) whose states lie in the same place."""

    place: str
    model: str


@dataclass
class State:
    """One layer state for each layer that keeps one (else None), and how many tokens went in.

    whole  False while a pass runs: a pass that failed half-way leaves layers at different tokens, and a state like
           that must never be continued.
    mark   of the engine that made it
    """

    layers: list[MambaState | AttentionState | None]
    tokens: int = 0
    whole: bool = True
    mark: Mark | None = None

    @classmethod
    def empty(cls, config) -> State:
        """The state before the first token."""
        layers: list[MambaState | AttentionState | None] = []
        kv_width = config.num_key_value_heads * config.head_dim
        for kind in config.layer_types:
            if kind == "mamba":
                ssm = torch.zeros(config.mamba_num_heads, config.mamba_head_dim, config.ssm_state_size)
                layers.append(MambaState(torch.zeros(config.mamba_conv_dim, config.conv_kernel - 1), ssm))
            elif kind == "attention":
                layers.append(AttentionState(torch.empty(0, kv_width), torch.empty(0, kv_width)))
            else:
                layers.append(None)
        return cls(layers)

    def copy(self) -> State:
        """An independent copy, to branch a conversation."""
        return State([layer.copy() if layer else None for layer in self.layers], self.tokens, self.whole, self.mark)

    @property
    def nbytes(self) -> int:
        """Bytes in use (not capacity)."""
        total = 0
        for layer in self.layers:
            if isinstance(layer, MambaState):
                total += 4 * (layer.conv.numel() + layer.ssm.numel())
            elif isinstance(layer, AttentionState):
                total += 4 * 2 * layer.tokens * layer.keys.shape[1]
        return total
