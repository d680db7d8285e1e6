"""How much is fuzzed: NEMOLAB_FUZZ examples of each kind. The suite's few are always the same ones."""

import os

from hypothesis import HealthCheck, settings

EXAMPLES = int(os.environ.get("NEMOLAB_FUZZ", "30"))


def fuzzing(share: float = 1) -> settings:
    """share  of EXAMPLES; at least one is tried"""
    return settings(
        max_examples=max(1, int(share * EXAMPLES)),
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
