"""How near the engine is to its reference, and how far what was broken on purpose."""

from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from nemolab.plots.style import COLOURS, ceiling

if TYPE_CHECKING:
    import pandas as pd


def plot_agreement(points: "pd.DataFrame", bound: float, must_exceed: float) -> Figure:
    """KL divergence from the reference: the engine below its bound, every control far above the other.

    points       columns name, text, kl_mean (nats), kind ("engine" or "control"); one dot each
    bound        the engine's own bound; must_exceed  what a control has to reach to count as failed
    """
    names = list(dict.fromkeys(points["name"]))[::-1]
    floor = 1e-16  # the logarithm of an exact zero has no place on the axis
    figure, ax = plt.subplots(figsize=(6.4, 1.4 + 0.4 * len(names)))
    for kind, rows in points.groupby("kind", sort=False):
        values = rows["kl_mean"].clip(lower=floor)
        ax.scatter(values, [names.index(name) for name in rows["name"]], color=COLOURS[kind], s=36, alpha=0.6, zorder=3)
    ax.set_xscale("log")
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(-0.6, len(names) - 0.4)
    ax.set_xlabel("mean KL(reference ‖ other) over a text (nats), one dot a text")
    ceiling(ax, bound, f"engine: at most {bound:g}", axis="x")
    ceiling(ax, must_exceed, f"broken: at least {must_exceed:g}", axis="x")
    return figure
