"""Hit rate against the size of a cache: the whole LRU curve, other policies as points, Belady's gap, the floor."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from nemolab.plots.style import BLACK, COLOURS, QUIET, SIZE_INCHES, binary_unit, ceiling

if TYPE_CHECKING:
    import pandas as pd

# Thirteen policies are more than there are colours to tell apart: relatives share one and differ in shape.
MARKERS = {
    "lru": "o", "lru-per-layer": "s", "lfu": "o", "lfu-incache": "s", "lfu-ageing": "^", "slru": "D", "s3fifo": "o",
    "sieve": "s", "arc": "^", "random": "x", "static": "P", "belady": "o", "belady-bypass": "s",
}  # fmt: skip
MOST_INSIDE, MOST_ROWS = 8, 26  # entries of a legend


def plot_curve(
    curve: "pd.DataFrame",
    points: "pd.DataFrame | None" = None,
    *,
    in_slots: bool = False,
    phase: str = "decode",
    cold: bool = False,
    floor: float | None = None,
    marks: Mapping[str, float] | None = None,
    whole: float | None = None,
    note: str = "",
) -> Figure:
    """The LRU curve of one phase as steps, and what policies reach at single sizes.

    curve     columns size (bytes, or blocks if in_slots) and hit_rate (0..1): every size where it changes, rising
    points    columns policy, prefetch, size, hit_rate; rows without a hit rate are left out
    cold      whether the cache was emptied at each conversation
    floor     size up to which an LRU without prefetch hits nothing in steady decode
    marks     label -> size: places on the axis worth a name, such as a knee
    whole     size of all blocks together, where the axis ends; default: where curve and points end
    note      a word under the axis that must not be lost, such as that the trace is synthetic
    """
    points = points.dropna(subset=["hit_rate"]) if points is not None else None
    sizes = [*curve["size"], *(points["size"] if points is not None else ()), *([whole] if whole else ())]
    end = max(sizes, default=1)
    step, unit = (1, "blocks") if in_slots else binary_unit(end)
    figure, ax = plt.subplots()
    if floor:
        ax.axvspan(0, floor / step, color=QUIET, alpha=0.13, lw=0, label="within one token's cycle: LRU hits nothing")
    along = np.concatenate([[0], curve["size"], [end]]) / step
    rates = np.concatenate([[0], curve["hit_rate"], curve["hit_rate"].tail(1)]) * 100
    if len(curve):
        ax.step(along, rates, where="post", color=COLOURS["lru"], label="lru, every size")
    if points is not None and len(curve):
        _shade_gap(ax, along, rates, points, step)
    for (policy, depth), found in points.groupby(["policy", "prefetch"], sort=False) if points is not None else ():
        found = found.sort_values("size")
        colour, ahead = COLOURS.get(policy, BLACK), f", prefetch {depth}" if depth else ""
        line = ":" if depth else "none" if policy == "lru" else "--"  # an LRU's steps are drawn already
        ax.plot(
            found["size"] / step, found["hit_rate"] * 100, MARKERS.get(policy, "o"), ls=line, lw=0.8,
            ms=5, color=colour, mfc="white" if depth else colour, label=policy + ahead,
        )  # fmt: skip
    for label, size in (marks or {}).items():
        ceiling(ax, size / step, label, axis="x")
    ax.set(
        xlabel=f"cache ({unit})" + (f"; {note}" if note else ""),
        ylabel=f"{phase} lookups that hit (%), {'cold' if cold else 'carried'}",
        xlim=(0, 1.02 * end / step),
        ylim=(0, 102),
    )
    _place_legend(figure, ax)
    return figure


def _place_legend(figure: Figure, ax) -> None:
    """Inside while it is short; beside the axes where it would cover them, and the figure grows with it."""
    count = len(ax.get_legend_handles_labels()[1])
    if 0 < count <= MOST_INSIDE:
        ax.legend(loc="lower right", fontsize=8, frameon=True, framealpha=0.9, edgecolor="none")
    elif count:
        columns = -(-count // MOST_ROWS)
        width, height = SIZE_INCHES
        figure.set_size_inches(width + 1.9 * columns, max(height, 0.5 + 0.18 * -(-count // columns)))
        figure.legend(loc="outside right upper", fontsize=8, ncols=columns)


def _shade_gap(ax, along: np.ndarray, rates: np.ndarray, points: "pd.DataFrame", step: float) -> None:
    """Between the LRU curve and the optimum without prefetch: what a better policy could gain at most."""
    best = points[(points["policy"] == "belady") & (points["prefetch"] == 0)].sort_values("size")
    if len(best) > 1:
        sizes = best["size"].to_numpy() / step
        grid = np.unique([*sizes, *along[(along > sizes[0]) & (along < sizes[-1])]])
        lru = rates[np.searchsorted(along, grid, side="right") - 1]
        optimum = np.interp(grid, sizes, 100 * best["hit_rate"])
        ax.fill_between(grid, lru, optimum, color="#E3F0FA", lw=0, zorder=0, label="Belady's gap")
