"""What a user wants to know of a curve: where the cliff is, where the knee, what a better policy could still gain.

Everything is of one phase, without prefetch, in the unit of the curve.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nemolab.simulate.curve import Curve, lru_curve
from nemolab.simulate.floor import lru_floor, token_cycle
from nemolab.simulate.lookups import Lookups
from nemolab.simulate.replay import BOTH
from nemolab.trace import DECODE, PHASES

LEAST_BULGE = 0.1  # a curve this near to its chord, as a share of its height, has no knee worth a name
OPTIMA = ("belady", "belady-bypass")


@dataclass(frozen=True)
class Point:
    """A size of the cache, and what an LRU hits there. Bytes or slots are None where the other does not tell them."""

    budget_bytes: int | None
    slots: int | None
    hit_rate: float | None

    def to_dict(self) -> dict:
        return {"budget_bytes": self.budget_bytes, "slots": self.slots, "hit_rate": self.hit_rate}


@dataclass(frozen=True)
class Advice:
    """Places on an LRU curve.

    floor    the largest size at which nothing hits in steady decode; None where there is no steady decode
    cycle    one token's cycle: what two tokens in a row share hits from here on, so the cliff lies between the two
    knee     beyond it more memory buys less: the size farthest above the chord from the cycle to the end; None where
             the curve has none
    end      the smallest size at which nothing but first lookups misses
    """

    floor: Point | None
    cycle: Point | None
    knee: Point | None
    end: Point | None

    def to_dict(self) -> dict:
        return {name: point and point.to_dict() for name, point in vars(self).items()}


def main_curve(lookups: Lookups, *, cold: bool = False) -> tuple[str, Curve]:
    """The curve most people want: of decode (of all lookups where there is no decode), in bytes where sizes are known.

    Returns the name of the phase, and the curve.
    """
    phase = DECODE if (lookups.phase == DECODE).any() else None
    curve = lru_curve(lookups, phase=phase, in_slots=lookups.size_bytes is None, cold=cold)
    return (BOTH if phase is None else PHASES[phase]), curve


def advise(lookups: Lookups, curve: Curve) -> Advice:
    """curve  as of `lru_curve(lookups, ...)`."""
    floor, cycle = (pair[0 if curve.in_slots else 1] for pair in (lru_floor(lookups), token_cycle(lookups)))
    if not len(curve.sizes):
        return Advice(None, None, None, None)
    knee = _find_knee(curve, cycle)
    return Advice(
        floor=point_at(lookups, curve, floor) if floor else None,
        cycle=point_at(lookups, curve, cycle) if cycle else None,
        knee=None if knee is None else point_at(lookups, curve, knee),
        end=point_at(lookups, curve, int(curve.sizes[-1])),
    )


def point_at(lookups: Lookups, curve: Curve, size: int) -> Point:
    """What the curve says of a size in its unit."""
    rate = curve.hits_at(size) / curve.lookups if curve.lookups else None
    return Point(*_in_both_units(lookups, curve.in_slots, size), rate)


def list_points(lookups: Lookups, curve: Curve) -> list[dict]:
    """Every size where the curve changes: {budget_bytes, slots, hit_rate}."""
    rates = curve.hit_rates.tolist()
    return [
        Point(*_in_both_units(lookups, curve.in_slots, size), rate).to_dict()
        for size, rate in zip(curve.sizes.tolist(), rates, strict=True)
    ]


def find_gaps(rows: Sequence[dict], phase: str) -> list[dict]:
    """What Belady's optimum hits beyond an LRU, at each budget and prefetch depth that both were asked for.

    Of the misses of an LRU, `compulsory_share` are first lookups, `policy_share` those that the optimum avoids,
    `size_share` the rest: only a larger cache avoids them. Shares of all lookups.
    """
    found = {}
    for row in rows:
        if row["phase"] == phase and row["lookups"]:
            found[row["policy"], row["budget_bytes"], row["slots"], row["prefetch"]] = row
    gaps = []
    for (policy, *case), lru in found.items():
        best = next((found[name, *case] for name in OPTIMA if (name, *case) in found), None)
        if policy != "lru" or best is None:
            continue
        budget_bytes, slots, depth = case
        gaps.append(
            {
                "budget_bytes": budget_bytes,
                "slots": slots,
                "prefetch": depth,
                "lru_hit_rate": lru["hit_rate"],
                "optimum": best["policy"],
                "optimum_hit_rate": best["hit_rate"],
                "compulsory_share": best["compulsory"] / best["lookups"],
                "policy_share": best["hit_rate"] - lru["hit_rate"],
                "size_share": best["capacity"] / best["lookups"],
            }
        )
    return gaps


def _in_both_units(lookups: Lookups, in_slots: bool, size: int) -> tuple[int | None, int | None]:
    block_bytes = lookups.block_bytes
    if in_slots:
        return (None if block_bytes is None else size * block_bytes), size
    return size, (None if block_bytes is None else size // block_bytes)


def _find_knee(curve: Curve, begin: int | None) -> int | None:
    begin = begin or 0
    last, top, bottom = int(curve.sizes[-1]), int(curve.hits[-1]), curve.hits_at(begin)
    if last <= begin or top <= bottom:
        return None
    beyond = curve.sizes > begin
    along = (curve.sizes[beyond] - begin) / (last - begin)
    above = (curve.hits[beyond] - bottom) / (top - bottom) - along
    best = int(np.argmax(above))
    return int(curve.sizes[beyond][best]) if above[best] >= LEAST_BULGE else None
