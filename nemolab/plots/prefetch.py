"""What reading ahead saves and what it costs, guess by guess."""

from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from nemolab.plots.style import COLOURS, QUIET

if TYPE_CHECKING:
    import pandas as pd


def plot_prefetch(rows: "pd.DataFrame") -> Figure:
    """Blocks read per decoded token against the guesses read ahead: what became of them, and who guessed.

    rows  columns guesser, prefetch, on_demand, used, unused (blocks a token); the first guesser fills the left panel
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.4), sharey=True)
    guessers = list(dict.fromkeys(rows["guesser"]))
    own = rows[rows["guesser"] == guessers[0]]
    bottom = 0 * own["prefetch"]
    for column, name in (
        ("on_demand", "read on demand"),
        ("used", "read ahead, used"),
        ("unused", "read ahead, not used"),
    ):
        left.bar(own["prefetch"], own[column], bottom=bottom, color=COLOURS[name], label=name)
        bottom = bottom + own[column]
    left.axhline(own["on_demand"].iloc[0], ls="--", lw=1, color=QUIET)
    left.set(title=f"Reads: {guessers[0]}", xlabel="guesses read ahead for each layer (number)")
    left.set_ylabel("blocks read a token (number)")
    left.set_ylim(0, 1.05 * rows[["on_demand", "used", "unused"]].sum(axis=1).max())
    left.legend(fontsize=8, loc="upper left")
    for guesser in guessers:
        theirs = rows[rows["guesser"] == guesser]
        total = theirs[["on_demand", "used", "unused"]].sum(axis=1)
        right.plot(theirs["prefetch"], theirs["on_demand"], "o-", ms=4, color=COLOURS[guesser], label=guesser)
        right.plot(theirs["prefetch"], total, ls="--", lw=1, color=COLOURS[guesser])
    right.set(title="On demand (solid) and in all (dashed)", xlabel="guesses read ahead for each layer (number)")
    right.legend(fontsize=8, loc="upper left")
    for ax in (left, right):
        ax.set_xticks(range(int(rows["prefetch"].max()) + 1))
    return figure
