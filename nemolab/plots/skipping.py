"""How little of an expert works for a token, and what each way to leave the rest out has to move."""

from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from nemolab.plots.style import BLACK, COLOURS, QUIET

if TYPE_CHECKING:
    import pandas as pd


def plot_skipping(lookups: "pd.DataFrame | None", expected: "pd.DataFrame | None", moved: "pd.DataFrame") -> Figure:
    """Active neurons, the groups they lie in, and bytes and time by strategy.

    lookups   columns phase, neurons, groups (active in one expert for one token); None: unknown, no panel of it
    expected  columns neurons, groups: what independence would give; None with lookups
    moved     columns strategy, copied, in_place, low, middle, high: bytes, and measured time, in % of the first row's
    """
    if lookups is None:
        figure, bars = plt.subplots()
    else:
        figure, (left, middle, bars) = plt.subplots(1, 3, figsize=(10.5, 3.4), width_ratios=(1, 1, 1.2))
        edges = np.arange(lookups["neurons"].max() + 2) - 0.5
        for phase, own in lookups.groupby("phase", sort=False):
            weights = np.full(len(own), 100 / len(own))
            left.hist(own["neurons"], edges, weights=weights, histtype="step", color=COLOURS[phase], label=phase)
            left.axvline(own["neurons"].mean(), ls="--", lw=1, color=COLOURS[phase])
        left.set(title="Neurons at work", xlabel="active in an expert for a token (number)")
        left.set(ylabel="lookups of the phase (%)", xlim=(-1, lookups["neurons"].quantile(0.995)))
        left.legend(fontsize=8)
        for phase, own in lookups.groupby("phase", sort=False):
            mean = own.groupby("neurons")["groups"].mean()
            middle.plot(mean.index, mean, color=COLOURS[phase], label=phase)
        middle.plot(expected["neurons"], expected["groups"], ls="--", lw=1.2, color=BLACK, label="if independent")
        middle.set(title="Groups they touch", xlabel="active neurons (number)", ylabel="active groups, mean (number)")
        middle.set_ylim(0, None)
        middle.legend(fontsize=8, loc="lower right")
    bars.bar(moved["strategy"], moved["copied"], color=COLOURS["copied"], label="bytes copied")
    bars.bar(
        moved["strategy"], moved["in_place"], bottom=moved["copied"], color=COLOURS["in place"], label="read in place"
    )
    spread = [moved["middle"] - moved["low"], moved["high"] - moved["middle"]]
    bars.errorbar(moved["strategy"], moved["middle"], spread, fmt="o", ms=5, color=BLACK, label="time measured")
    bars.axhline(100, ls="--", lw=1, color=QUIET)
    highest = max(100, moved["high"].max(), (moved["copied"] + moved["in_place"]).max())
    bars.set(title="What it saves", ylabel=f"of {moved['strategy'].iloc[0]} (%)", ylim=(0, 1.3 * highest))
    bars.set_xlabel("strategy (name)")
    bars.legend(fontsize=7.5, ncols=3, loc="upper center", columnspacing=0.8, handletextpad=0.4, handlelength=1.2)
    return figure
