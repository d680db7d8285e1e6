"""How a model routes: how concentrated, how repetitive, how predictable."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from nemolab.plots.style import BLUE, COLOURS, QUIET


def plot_routing(
    counts: np.ndarray,
    repeats: Mapping[str, Sequence[float | None]],
    reuse: tuple[Sequence[int], Sequence[int], int],
    right: Mapping[str, Sequence[float]],
    *,
    floor_blocks: int,
) -> Figure:
    """Three panels, and a fourth where there are guesses.

    counts        how often each expert was chosen (layers, experts)
    repeats       by name, the share of lookups (0..1) that repeat the token before, one a layer, None where undefined;
                  the first is measured, the others are what it is held against
    reuse         edges (blocks), lookups in each bin, lookups of experts never seen before
    right         by who guessed, the share of the first 1..n guesses that were right; may be empty
    floor_blocks  up to here nothing hits in steady decode
    """
    columns = 2 if right else 3
    figure, axes = plt.subplots(2 if right else 1, columns, figsize=(7.6, 5.4) if right else (9.6, 3.0))
    axes = axes.ravel()
    _draw_concentration(axes[0], counts)
    _draw_repeats(axes[1], repeats)
    edges, lookups, never = reuse
    _draw_reuse(axes[2], np.asarray(edges), np.asarray(lookups), never, floor_blocks)
    if right:
        _draw_guesses(axes[3], right)
    return figure


def _draw_concentration(ax, counts: np.ndarray) -> None:
    counts = np.sort(counts.reshape(-1))[::-1]
    experts = np.arange(len(counts) + 1) / len(counts)
    ax.plot(100 * experts, 100 * np.append(0, np.cumsum(counts)) / counts.sum(), color=BLUE, label="this trace")
    ax.plot([0, 100], [0, 100], color=COLOURS["even routing"], ls="--", lw=1, label="even routing")
    quarter = 100 * counts[: round(len(counts) / 4)].sum() / counts.sum()
    ax.plot([25], [quarter], "o", color=BLUE)
    ax.annotate(f"{quarter:.0f} %", (25, quarter), xytext=(8, -8), textcoords="offset points", color=BLUE)
    ax.set(
        title="Concentrated?", xlabel="hottest experts (% of all)", ylabel="lookups (%)", xlim=(0, 100), ylim=(0, 102)
    )
    ax.legend(loc="lower right")


def _draw_repeats(ax, repeats: Mapping[str, Sequence[float | None]]) -> None:
    first = next(iter(repeats))
    percents = {name: 100 * np.asarray(by_layer, np.float64) for name, by_layer in repeats.items()}
    for name, values in percents.items():
        layers = np.arange(len(values))
        if name == first:
            ax.bar(layers, values, color=BLUE, width=0.8, label=name)
        else:
            ax.plot(layers, values, color=COLOURS.get(name, QUIET), ls="--", lw=1, marker=".", label=name)
    ax.set(title="Repetitive?", xlabel="MoE layer (ordinal)", ylabel="repeat the token before (%)")
    highest = max(np.max(values, initial=0, where=np.isfinite(values)) for values in percents.values())
    ax.set_ylim(0, 1.7 * highest or 1)  # room for the legend above the bars
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.legend(loc="upper left", fontsize=8)


def _draw_reuse(ax, edges: np.ndarray, lookups: np.ndarray, never: int, floor_blocks: int) -> None:
    """One bar a doubling of the distance, from the first that holds anything, and one for first uses."""
    total = max(lookups.sum() + never, 1)
    begin = int(np.argmax(lookups > 0))
    places = np.arange(begin, len(lookups) + 1)
    ax.bar(places[:-1], 100 * lookups[begin:] / total, color=COLOURS["decode"], width=0.9)
    ax.bar(places[-1:], [100 * never / total], color=QUIET, width=0.9)
    ax.set_xticks(places, [*(f"{edge:,}" for edge in edges[begin : len(lookups)]), "first\nuse"], fontsize=8)
    if floor_blocks:
        ax.axvline(np.log2(floor_blocks) - 0.5, ls="--", lw=1, color=QUIET)
    ax.set(title="Back how soon?", xlabel="hits in a cache from (blocks)", ylabel="lookups (%)", ylim=(0, None))
    ax.grid(axis="x", visible=False)


def _draw_guesses(ax, right: Mapping[str, Sequence[float]]) -> None:
    for name, shares in right.items():
        numbers, percent = np.arange(1, len(shares) + 1), 100 * np.asarray(shares)
        if name.endswith("guesses"):  # a control
            ax.plot(numbers, percent, color=COLOURS[name], ls="--", lw=1)
            ax.annotate(
                name, (numbers[-1], percent[-1]), xytext=(0, -11), textcoords="offset points", ha="right", fontsize=8,
                color=COLOURS[name],
            )  # fmt: skip
        else:
            ax.plot(numbers, percent, "o-", ms=4, color=COLOURS[name], label=name)
    ax.set(title="Predictable?", xlabel="first guesses (number)", ylabel="of them right (%)", ylim=(0, 105))
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.legend(fontsize=8, loc=(0.02, 0.18))
