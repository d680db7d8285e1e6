"""What a model weighs: bytes per token, per expert, per part; and the ledger of claims about it."""

from nemolab.plan.claims import check_claims, claims_table, read_claims
from nemolab.plan.comparison import compare_models, read_published
from nemolab.plan.planner import Plan, plan, plan_checkpoint, plan_config

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
