"""Below one token's cycle an LRU hits nothing: say so before anyone reads a curve there."""

from __future__ import annotations

import numpy as np

from nemolab.simulate.lookups import DECODE, Lookups


def lru_floor(lookups: Lookups) -> tuple[int, int | None]:
    """The most blocks, and the most bytes, at which nothing hits in steady decode: (layers - 1) x top_k blocks.

    Between two tokens every other layer's experts come by. Above the floor the curve is vertical: the experts that a
    token shares with the one before all hit within one layer's experts more. Bytes are None where unknown, and those of
    the cheapest cycle where layers differ. Not covered: what a layer finds of two tokens before, and prompt passes.
    """
    layers = np.unique(lookups.layer[lookups.phase == DECODE])
    if not len(layers):
        return 0, (None if lookups.size_bytes is None else 0)
    slots = (len(layers) - 1) * lookups.top_k
    if lookups.size_bytes is None:
        return slots, None
    by_layer = lookups.size_bytes.reshape(lookups.n_layers, lookups.n_experts)[layers]
    smallest = np.sort(by_layer, axis=1)[:, : lookups.top_k].sum(axis=1)
    return slots, int(smallest.sum() - smallest.max())


def warn_below_floor(lookups: Lookups, *, budget_bytes: int | None = None, slots: int | None = None) -> str | None:
    """What to tell whoever asks for a budget at or below the floor; None above it."""
    floor_slots, floor_bytes = lru_floor(lookups)
    if slots is not None and slots <= floor_slots:
        asked, least = f"{slots} blocks", f"{floor_slots} blocks"
    elif budget_bytes is not None and floor_bytes is not None and budget_bytes <= floor_bytes:
        asked, least = f"{budget_bytes:,} bytes", f"{floor_bytes:,} bytes"
    else:
        return None
    return (
        f"{asked} are less than one token's cycle: an LRU hits nothing in steady decode up to {least} "
        f"((layers - 1) x top {lookups.top_k}); just above, the curve is vertical"
    )
