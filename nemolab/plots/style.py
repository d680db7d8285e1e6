"""The house style: colours that mean one thing everywhere, axes, limits, swatches of a legend."""

from collections.abc import Iterable

import matplotlib.pyplot as plt
from matplotlib.patches import Patch

# Okabe and Ito's palette: told apart by all common kinds of colour vision.
BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, RED, PURPLE = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7",
)  # fmt: skip
QUIET = "#7F7F7F"

# One colour for one thing in all notebooks.
COLOURS = {
    "nvfp4": BLUE,
    "mxfp4": GREEN,
    "fp8": SKY,
    "bf16": ORANGE,
    "f16": YELLOW,
    "f32": PURPLE,
    "engine": BLUE,
    "reference": ORANGE,
    "control": RED,
    "prefill": SKY,
    "decode": BLUE,
    "up_values": BLUE,
    "up_scales": SKY,
    "down_values": RED,
    "down_scales": ORANGE,
    "padding": "#DDDDDD",
    "this model": GREEN,
    "counted": BLUE,
    "published, recomputed": QUIET,
    "lru": BLUE,
    "lru-per-layer": SKY,
    "lfu": ORANGE,
    "lfu-incache": ORANGE,
    "lfu-ageing": ORANGE,
    "slru": SKY,
    "s3fifo": GREEN,
    "sieve": GREEN,
    "arc": PURPLE,
    "random": QUIET,
    "static": RED,
    "belady": BLACK,
    "belady-bypass": BLACK,
    "1 layer ahead": BLUE,
    "2 layers ahead": SKY,
    "3 layers ahead": PURPLE,
    "router's guesses": BLUE,
    "the token before": ORANGE,
    "perfect guesses": GREEN,
    "shuffled guesses": RED,
    "shuffled within conversations": ORANGE,
    "shuffled across all": RED,
    "even routing": QUIET,
    "read on demand": BLUE,
    "read ahead, used": GREEN,
    "read ahead, not used": "#DDDDDD",
    "copied": BLUE,
    "in place": SKY,
}
SIZE_INCHES = (6.4, 3.6)


def use_style() -> None:
    """The house style for all figures that follow: no top or right spine, a light grid, legends without a frame."""
    plt.rcParams.update(
        {
            "figure.figsize": SIZE_INCHES,
            "figure.dpi": 110,
            "figure.constrained_layout.use": True,
            "savefig.bbox": "tight",
            "font.size": 10,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.axisbelow": True,
            "axes.titlesize": 11,
            "axes.titleweight": "bold",
            "axes.titlelocation": "left",
            "grid.color": "#E5E5E5",
            "legend.frameon": False,
            "axes.prop_cycle": plt.cycler(color=[BLUE, ORANGE, GREEN, RED, PURPLE, SKY, BLACK]),
        }
    )


def ceiling(ax, value: float, label: str, axis: str = "y") -> None:
    """Mark a limit on an axis: dashed, quiet, named on or above it. Say in the label whether it was measured."""
    place = {"ls": "--", "lw": 1, "color": QUIET, "zorder": 1}
    if axis == "y":
        ax.axhline(value, **place)
        ax.annotate(label, (0.01, value), xycoords=("axes fraction", "data"), va="bottom", color=QUIET, fontsize=8)
    else:
        ax.axvline(value, **place)
        ax.annotate(
            label, (value, 1.0), xytext=(0, 3), xycoords=("data", "axes fraction"), textcoords="offset points",
            ha="center", va="bottom", color=BLACK, fontsize=9,
        )  # fmt: skip


def swatches(names: Iterable[str]) -> list[Patch]:
    """One patch a name, in its colour, for a legend."""
    return [Patch(color=COLOURS[name], label=name.replace("_", " ")) for name in names]


def binary_unit(largest_bytes: float) -> tuple[int, str]:
    """(bytes, name) of the unit in which an axis up to so many bytes is read."""
    return (2**30, "GiB") if largest_bytes >= 2**30 else (2**20, "MiB")
