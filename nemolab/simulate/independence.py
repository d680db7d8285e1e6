"""Whether a routing repeats itself more than chance: if not, recency is worth nothing on it, and it is no real one.

If tokens are drawn independently, their order means nothing: dealt anew within their conversation they repeat as often.
A real routing loses most of its repetition by that, since neighbouring tokens are about the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from nemolab.simulate.measures import repeat_rate

if TYPE_CHECKING:
    from nemolab.trace import Trace

SHUFFLES = 99  # so that chance alone puts the true order on top one time in a hundred
LEAST_PAIRS = 20  # of neighbouring tokens; below that the test would call most traces independent
MOST_LOOKUPS = 50_000  # of the first tokens of decode: enough to tell a point of repetition from chance


class Independence(NamedTuple):
    """Repeat rate in the true order, in the median shuffled order, and whether the true one is above all shuffled."""

    repeat_rate: float
    by_chance: float
    repeats_more: bool


def measure_independence(trace: Trace, *, seed: int = 0) -> Independence | None:
    """Hold the repeat rate of decode against that of the same tokens in shuffled order. None: too few to tell."""
    decode = np.flatnonzero(trace.phase == 1)
    decode = decode[: max(2 * LEAST_PAIRS, MOST_LOOKUPS // (trace.n_layers * trace.top_k))]
    experts, conversation = trace.experts[decode], trace.conversation[decode]
    if np.count_nonzero(np.diff(conversation) == 0) < LEAST_PAIRS:
        return None
    rng = np.random.default_rng(seed)
    found = repeat_rate(experts, conversation)
    # Sorting by conversation with random ties deals tokens anew within each, and keeps the conversations apart.
    order = np.argsort(conversation, kind="stable")
    together = conversation[order]
    shuffled = [
        repeat_rate(experts[np.lexsort((rng.random(len(decode)), conversation))], together) for _ in range(SHUFFLES)
    ]
    return Independence(found, float(np.median(shuffled)), found > max(shuffled))


def looks_independent(trace: Trace, *, seed: int = 0) -> str | None:
    """What to tell whoever replays a trace that repeats no more than chance; None for any other."""
    found = measure_independence(trace, seed=seed)
    if found is None or found.repeats_more:
        return None
    return (
        f"{found.repeat_rate:.1%} of the experts repeat from token to token, no more than in shuffled order"
        f" ({found.by_chance:.1%}): this routing looks like independent draws: what was used last does"
        " not tell what comes next, so recency is worth nothing here"
    )
