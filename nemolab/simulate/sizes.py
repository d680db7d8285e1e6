"""Sizes of a cache in the unit that a trace allows, and the places on its LRU curve that are worth a name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from nemolab.simulate.advice import Point, advise, point_at
from nemolab.simulate.asked import show_budget
from nemolab.simulate.curve import Curve
from nemolab.simulate.floor import token_cycle
from nemolab.simulate.lookups import Lookups
from nemolab.trace import DECODE
from nemolab.units import Budget


@dataclass(frozen=True)
class Scale:
    """The unit in which the caches of a trace are sized: bytes where those of its blocks are known, else slots.

    unit    its name, as rows and points have it: "budget_bytes" or "slots"
    whole   all blocks of the model
    cycle   what a token of decode looks up; 0 without decode
    """

    unit: str
    whole: int
    cycle: int

    @property
    def in_slots(self) -> bool:
        return self.unit == "slots"

    def budget(self, size: int) -> Budget:
        return Budget(slots=int(size)) if self.in_slots else Budget(size_bytes=int(size))

    def budgets(self, shares: Iterable[float]) -> list[Budget]:
        """Shares (0 to 1) of all blocks: each size once, none of them zero."""
        return [self.budget(size) for size in dict.fromkeys(max(1, round(share * self.whole)) for share in shares)]

    def show(self, size: int) -> str:
        """As a person would write it: `2.00 GiB`, `4,854 slots`."""
        return show_budget(self.budget(size))


def read_scale(lookups: Lookups) -> Scale:
    """The unit of `main_curve`, and what all blocks and one token take in it."""
    slots, size_bytes = token_cycle(lookups)
    if lookups.size_bytes is None:
        return Scale("slots", lookups.n_keys, slots)
    return Scale("budget_bytes", int(lookups.size_bytes.sum()), size_bytes)


def list_places(
    lookups: Lookups, curve: Curve, *, shares: Iterable[float] = (), hit_rates: Iterable[float] = ()
) -> list[dict]:
    """Places on the curve of `main_curve` as rows, the smallest first; what a trace does not have is left out.

    They are those of `advise` ("floor", "one token's cycle", "knee", "end"), shares (0 to 1) of all blocks ("24% of
    all") and the smallest sizes that reach a hit rate (0 to 1; "80% hit"). Keys of a row: place, size (in the unit of
    the curve), budget_bytes, slots, hit_rate, reads_per_token (blocks), share (of all blocks), cycles (times what a
    token looks up; None without decode).
    """
    scale, advice = read_scale(lookups), advise(lookups, curve)
    found = {"floor": advice.floor, "one token's cycle": advice.cycle, "knee": advice.knee, "end": advice.end}
    for share in shares:
        found[f"{share:.0%} of all"] = point_at(lookups, curve, int(share * scale.whole))
    for rate in hit_rates:
        enough = curve.sizes[curve.hit_rates >= rate]
        found[f"{rate:.0%} hit"] = point_at(lookups, curve, int(enough[0])) if len(enough) else None
    tokens = lookups.count_tokens(DECODE) or lookups.count_tokens()
    rows = [_row(name, point, scale, curve.lookups / tokens) for name, point in found.items() if point is not None]
    return sorted(rows, key=lambda row: row["size"])


def _row(name: str, point: Point, scale: Scale, lookups_per_token: float) -> dict:
    size = getattr(point, scale.unit)
    return {
        "place": name,
        "size": size,
        **point.to_dict(),
        "reads_per_token": None if point.hit_rate is None else (1 - point.hit_rate) * lookups_per_token,
        "share": size / scale.whole,
        "cycles": size / scale.cycle if scale.cycle else None,
    }
