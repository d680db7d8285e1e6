"""Which code computes on a device, decided here and nowhere else.

On a card: the Triton kernels. On the CPU: their plain twins, with the same signatures and the same roundings, so that
everything around the operators runs without a card; or, in Triton's interpreter (TRITON_INTERPRET=1), the kernels
themselves.
"""

from __future__ import annotations

import os
from types import ModuleType

import torch


def find_operators(device: torch.device) -> ModuleType:
    """A module with AttentionStep, Combine, ExpertStep, MambaPrompt, MambaStep, RouterStep, add_experts,
    expert_prompt, linear_prompt, matvec and rms_norm, as the files of `nemolab.kernels.gpu` describe them."""
    if device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
        from nemolab.engine.gpu import kernels

        return kernels
    from nemolab.engine.gpu import twins

    return twins
