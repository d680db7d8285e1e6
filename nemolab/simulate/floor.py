"""Below one token's cycle an LRU hits nothing: say so before anyone reads a curve there."""

from __future__ import annotations

import numpy as np

from nemolab.simulate.lookups import Lookups
from nemolab.trace import DECODE


def lru_floor(lookups: Lookups) -> tuple[int, int | None]:
    """The most blocks, and the most bytes, at which nothing hits in steady decode: (layers - 1) x top_k blocks.

    Between two visits of a layer every other layer's experts come by; counted here over the batches of the trace, so
    that it also holds where layers differ in experts or sizes: the shortest way between two visits. Above the floor the
    curve is vertical: the experts that a token shares with the one before all hit within one layer's experts more.
    Bytes are None where unknown. (0, 0) where no layer is visited twice. Not covered: prefetch.
    """
    batches = np.flatnonzero(~lookups.passing)
    before = _visit_before(lookups.layer[batches])
    again = np.flatnonzero(before >= 0)
    slots, size_bytes = _weigh(lookups, batches)
    if not len(again):
        return 0, (None if size_bytes is None else 0)

    def shortest(weights: np.ndarray) -> int:
        ends = np.concatenate([[0], np.cumsum(weights)])
        return int((ends[again] - ends[before[again] + 1]).min())

    return shortest(slots), (None if size_bytes is None else shortest(size_bytes))


def token_cycle(lookups: Lookups) -> tuple[int, int | None]:
    """Blocks, and bytes, that a token of decode looks up on its way through all layers: the median over steps.

    So much holds all that one token shares with the one before. Bytes are None where unknown; (0, 0) without decode.
    """
    batches = np.flatnonzero(lookups.phase == DECODE)
    slots, size_bytes = _weigh(lookups, batches)
    if not len(batches):
        return 0, (None if size_bytes is None else 0)
    firsts = np.flatnonzero(np.diff(lookups.step[batches], prepend=-1) != 0)

    def middle(weights: np.ndarray) -> int:
        return int(np.median(np.add.reduceat(weights, firsts)))

    return middle(slots), (None if size_bytes is None else middle(size_bytes))


def warn_below_floor(lookups: Lookups, *, budget_bytes: int | None = None, slots: int | None = None) -> str | None:
    """What to tell whoever asks for a budget at or below the floor; None above it, and where there is no floor."""
    floor_slots, floor_bytes = lru_floor(lookups)
    if slots is not None and slots <= floor_slots:
        asked, least = f"{slots:,} blocks", f"{floor_slots:,} blocks"
    elif budget_bytes is not None and floor_bytes is not None and budget_bytes <= floor_bytes:
        asked, least = f"{budget_bytes:,} bytes", f"{floor_bytes:,} bytes"
    else:
        return None
    if not floor_slots:
        return f"{asked} hold nothing: every lookup is a read"
    layers = len(np.unique(lookups.layer[lookups.phase == DECODE]))
    plain = floor_slots == (layers - 1) * lookups.top_k
    why = f"(layers - 1) x top {lookups.top_k}" if plain else "what the other layers look up between two of its visits"
    return (
        f"{asked} are less than one token's cycle: an LRU hits nothing in steady decode up to {least} ({why}); just "
        "above, the curve is vertical"
    )


def _visit_before(layer: np.ndarray) -> np.ndarray:
    """int64 [batches]: the batch in which the same layer was visited last, -1 for none."""
    order = np.argsort(layer, kind="stable")
    before = np.full(len(layer), -1)
    same = np.diff(layer[order]) == 0
    before[order[1:][same]] = order[:-1][same]
    return before


def _weigh(lookups: Lookups, batches: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Blocks of each of these batches, and their bytes where known."""
    slots = np.diff(lookups.starts)[batches]
    if lookups.size_bytes is None:
        return slots, None
    ends = np.concatenate([[0], np.cumsum(lookups.size_bytes[lookups.keys])])
    return slots, (ends[lookups.starts[1:]] - ends[lookups.starts[:-1]])[batches]
