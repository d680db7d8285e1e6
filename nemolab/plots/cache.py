"""What a cache of experts does, size by size."""

from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from nemolab.plots.style import COLOURS

if TYPE_CHECKING:
    import pandas as pd


def plot_cache(sizes: "pd.DataFrame") -> Figure:
    """Hit rate and bytes read per token against the share of all experts that fit in RAM, decode phase.

    sizes  columns share (0..1), hit_rate (0..1), mb_per_token (10^6 bytes); one row a cache size
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.2, 3.0))
    for ax, column, label in (
        (left, "hit_rate", "decode lookups that hit (%)"),
        (right, "mb_per_token", "read per decoded token (MB)"),
    ):
        scale = 100 if column == "hit_rate" else 1
        ax.plot(sizes["share"] * 100, sizes[column] * scale, "o-", color=COLOURS["decode"])
        ax.set(xlabel="experts that fit in RAM (% of all)", ylabel=label, xlim=(0, 105), ylim=(0, None))
    left.set_ylim(0, 105)
    return figure
