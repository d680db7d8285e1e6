"""The operators as Triton kernels; importing this imports triton."""

from nemolab.kernels.gpu.add_experts import add_experts
from nemolab.kernels.gpu.attention_step import AttentionStep
from nemolab.kernels.gpu.combine import Combine
from nemolab.kernels.gpu.expert_prompt import expert_prompt
from nemolab.kernels.gpu.expert_step import ExpertStep
from nemolab.kernels.gpu.linear_prompt import linear_prompt
from nemolab.kernels.gpu.mamba_prompt import MambaPrompt
from nemolab.kernels.gpu.mamba_step import MambaStep
from nemolab.kernels.gpu.matvec import matvec
from nemolab.kernels.gpu.rms_norm import rms_norm
from nemolab.kernels.gpu.router_step import RouterStep

__all__ = [
    "AttentionStep",
    "Combine",
    "ExpertStep",
    "MambaPrompt",
    "MambaStep",
    "RouterStep",
    "add_experts",
    "expert_prompt",
    "linear_prompt",
    "matvec",
    "rms_norm",
]
