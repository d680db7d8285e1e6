"""Many replays of one trace: every policy at every budget and prefetch depth, as rows of a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nemolab.progress import Progress
from nemolab.simulate.asked import check_answerable
from nemolab.simulate.lookups import Lookups
from nemolab.simulate.replay import replay
from nemolab.simulate.sizes import read_scale
from nemolab.units import Budget

DEFAULT_SHARES = (0.05, 0.1, 0.25, 0.5, 1.0)  # of all blocks, where nobody names a budget
DEFAULT_POLICIES = ("lru", "belady")


def sweep(
    lookups: Lookups,
    budgets: Sequence[Budget],
    policies: Iterable[str] = DEFAULT_POLICIES,
    prefetches: Iterable[int] = (0,),
    *,
    cold: bool = False,
    reads_in_time: int | None = None,
    progress: Progress | None = None,
) -> list[dict]:
    """Rows as of `Replay.row`, three for each policy, budget and prefetch depth: phases prefill, decode and all.

    Raises what `replay` raises, and TraceError where the trace does not know what is asked for, before any work.
    """
    prefetches = list(prefetches)
    check_answerable(lookups, budgets, prefetches)
    cases = [(policy, budget, depth) for policy in policies for budget in budgets for depth in prefetches]
    rows = []
    for number, (policy, budget, depth) in enumerate(cases):
        if progress:
            progress(number, len(cases))
        rows += replay(
            lookups,
            policy,
            budget_bytes=budget.size_bytes,
            slots=budget.slots,
            prefetch=depth,
            cold=cold,
            reads_in_time=reads_in_time,
        ).rows()
    if progress:
        progress(len(cases), len(cases))
    return rows


def default_budgets(lookups: Lookups) -> list[Budget]:
    """DEFAULT_SHARES of all blocks of the model: in bytes where their sizes are known, else in slots."""
    return read_scale(lookups).budgets(DEFAULT_SHARES)
