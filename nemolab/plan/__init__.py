"""What a model weighs: bytes per token, per expert, per part; and the ledger of claims about it.

geometry      the modules that a config implies, without any file of weights
precision     the format in which each of them is counted
planner       the count, of a config or of a checkpoint's tensors: Plan
comparison    models side by side, those published by others among them
claims        the ledger
"""

from nemolab.plan.claims import check_claims, claims_table, read_claims
from nemolab.plan.comparison import compare_models, read_published
from nemolab.plan.planner import plan, plan_checkpoint, plan_config
from nemolab.plan.result import Plan

__all__ = [
    "Plan",
    "check_claims",
    "claims_table",
    "compare_models",
    "plan",
    "plan_checkpoint",
    "plan_config",
    "read_claims",
    "read_published",
]
