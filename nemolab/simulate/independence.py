"""Whether a routing repeats itself more than chance: if not, recency tells little on it beyond what is popular.

If tokens are drawn independently, their order means nothing: dealt anew within their conversation they repeat as often.
A real routing loses most of its repetition by that, since neighbouring tokens are about the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from nemolab.simulate.measures import number_runs, repeat_rate, shuffle_tokens
from nemolab.trace import DECODE

if TYPE_CHECKING:
    from nemolab.trace import Trace

SHUFFLES = 99  # so that chance alone puts the true order on top one time in a hundred
LEAST_PAIRS = 20  # of neighbouring tokens; below that the test would call most traces independent
MOST_LOOKUPS = 50_000  # of the first tokens of decode: enough to tell a point of repetition from chance


class Independence(NamedTuple):
    """Repeat rate in the true order; its median and its most with the tokens of each conversation shuffled."""

    repeat_rate: float
    shuffled: float
    shuffled_most: float

    @property
    def repeats_more(self) -> bool:
        """Whether the true order is above all the shuffled ones."""
        return self.repeat_rate > self.shuffled_most


def measure_independence(trace: Trace, *, seed: int = 0) -> Independence | None:
    """Hold the repeat rate of decode against that of the same tokens shuffled within their conversations.

    None: too few to tell.
    """
    decode = np.flatnonzero(trace.phase == DECODE)
    decode = decode[: max(2 * LEAST_PAIRS, MOST_LOOKUPS // (trace.n_layers * trace.top_k))]
    experts, conversation = trace.experts[decode], trace.conversation[decode]
    runs = number_runs(conversation, trace.position[decode])
    if np.count_nonzero(np.diff(runs) == 0) < LEAST_PAIRS:
        return None
    rng = np.random.default_rng(seed)
    found = repeat_rate(experts, runs)
    shuffled = [repeat_rate(experts[shuffle_tokens(conversation, seed=rng)], runs) for _ in range(SHUFFLES)]
    return Independence(found, float(np.median(shuffled)), max(shuffled))


def looks_independent(trace: Trace, *, seed: int = 0) -> str | None:
    """What to tell whoever replays a trace that repeats no more than chance; None for any other."""
    found = measure_independence(trace, seed=seed)
    if found is None or found.repeats_more:
        return None
    return (
        f"{found.repeat_rate:.1%} of the experts repeat from token to token, no more than in the best of {SHUFFLES}"
        f" orders shuffled within their conversation ({found.shuffled_most:.1%}): in its order this routing looks like"
        " independent draws, so what was used last tells little beyond what is popular"
    )
