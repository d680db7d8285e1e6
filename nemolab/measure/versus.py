"""Comparing two ways honestly: alternate them in one run, give median and spread, call no winner inside the spread."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Versus:
    """Samples of two ways, taken in turns.

    ratio       median of `first` over median of `second` (how many times `second` is faster)
    ratio_low, ratio_high   the same for the least and the most favourable pair of one round
    """

    first: tuple[float, ...]
    second: tuple[float, ...]

    @property
    def ratio(self) -> float:
        return statistics.median(self.first) / statistics.median(self.second)

    @property
    def ratios(self) -> list[float]:
        """One ratio a round: both samples of a round saw the same machine."""
        return [a / b for a, b in zip(self.first, self.second, strict=True)]

    @property
    def verdict(self) -> str:
        """`second is faster`, `first is faster`, or `no difference` when the rounds disagree."""
        low, high = min(self.ratios), max(self.ratios)
        if low > 1:
            return "second is faster"
        if high < 1:
            return "first is faster"
        return "no difference"


def versus(
    first: Callable[[], object],
    second: Callable[[], object],
    *,
    rounds: int = 5,
    warmups: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> Versus:
    """Time two calls in turns, the order swapped each round (A B, B A, A B, ...), warm-ups not counted.

    rounds   at least 3, so that a median and a spread mean something
    returns  seconds per call, one sample a round for each
    """
    if rounds < 3:
        raise ValueError(f"{rounds} rounds give no median and no spread; take at least 3")
    for _ in range(warmups):
        first()
        second()
    samples: dict[str, list[float]] = {"first": [], "second": []}
    for number in range(rounds):
        order = [("first", first), ("second", second)]
        for name, call in order if number % 2 == 0 else reversed(order):
            started = clock()
            call()
            samples[name].append(clock() - started)
    return Versus(tuple(samples["first"]), tuple(samples["second"]))
