"""What a model weighs: bytes per token, per expert, per part; and the ledger of claims about it.

planner         the count, of a config or of a checkpoint's tensors; result is what it gives, a Plan
geometry        the modules that a config of the family implies, without any file of weights
precision       the format in which each of them is counted; weight_formats is what a format costs
any_model       the count of any other family that transformers knows:
                meta_model builds it, expert_finder and router_probe see what an expert is, model_parts lists the rest,
                quantization reads what its config says of formats, facts what it says of experts,
                unstated what it leaves unsaid
comparison      models side by side, those published by others among them
claims          the ledger
"""

from nemolab.plan.claims import check_claims, claims_table, read_claims
from nemolab.plan.comparison import compare_families, compare_models, family_configs, read_published
from nemolab.plan.planner import plan, plan_checkpoint, plan_config
from nemolab.plan.result import Plan

__all__ = [
    "Plan",
    "check_claims",
    "claims_table",
    "compare_families",
    "compare_models",
    "family_configs",
    "plan",
    "plan_checkpoint",
    "plan_config",
    "read_claims",
    "read_published",
]
