"""Figures in one style: colour-blind safe, units on the axes, bars from zero, ready for a slide.

Every function takes the numbers it draws, returns the Figure and reads nothing from disk.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import Patch

if TYPE_CHECKING:
    import pandas as pd

    from nemolab.store import BlockLayout

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


def plot_parts(sums: "pd.DataFrame") -> Figure:
    """Bytes of each part of a model, stacked by number format.

    sums  columns part, format, bytes (as `Inventory.by_format().reset_index()`)
    """
    step, unit = _binary_unit(sums["bytes"].sum())
    table = sums.pivot_table(index="part", columns="format", values="bytes", aggfunc="sum", fill_value=0) / step
    table = table.loc[table.sum(axis=1).sort_values().index]
    figure, ax = plt.subplots()
    left = table.iloc[:, 0] * 0
    for name in sorted(table.columns, key=lambda column: -table[column].sum()):
        ax.barh(table.index, table[name], left=left, label=name, color=COLOURS.get(name, BLACK))
        left = left + table[name]
    for row, total in enumerate(left):
        ax.annotate(_short(total), (total, row), xytext=(3, 0), textcoords="offset points", va="center", fontsize=8)
    ax.set(xlabel=f"stored size ({unit})", xlim=(0, 1.1 * left.max()))
    ax.grid(axis="y", visible=False)
    ax.legend(title="format", loc="lower right")
    return figure


def plot_bytes_per_token(models: "pd.DataFrame") -> Figure:
    """Bytes of routed experts that one token reads, model by model.

    models  columns model, gb_per_token, how; the first row is the model in use
    """
    models = models.assign(how=[("this model" if row == 0 else how) for row, how in enumerate(models["how"])])
    models = models.sort_values("gb_per_token")
    figure, ax = plt.subplots()
    ax.barh(models["model"], models["gb_per_token"], color=[COLOURS[how] for how in models["how"]])
    for row, gb in enumerate(models["gb_per_token"]):
        ax.annotate(f"{gb:.3g}", (gb, row), xytext=(4, 0), textcoords="offset points", va="center")
        if models["how"].iloc[row] == "this model":  # its bar may be too short to see
            ax.get_yticklabels()[row].set(color=COLOURS["this model"], fontweight="bold")
    ax.margins(x=0.15)
    ax.set(xlabel="routed experts read for one token (GB = 10⁹ bytes)", xlim=(0, None))
    ax.grid(axis="y", visible=False)
    ax.legend(handles=_swatches(dict.fromkeys(models["how"])), loc="lower right")
    return figure


def plot_families(models: "pd.DataFrame") -> Figure:
    """Bytes of routed experts that one token reads, as published and in NVFP4, and the share of all experts it is.

    models  columns model, gb_per_token, gb_per_token_nvfp4, expert_format, share_read (0..1), routed_gib
    """
    models = models.sort_values("gb_per_token", ascending=False)
    formats = models["expert_format"].str.partition("_")[0]  # fp8_128x128 is FP8
    figure, ax = plt.subplots(figsize=(7.2, 1.0 + 0.27 * len(models)))
    ax.barh(models["model"], models["gb_per_token"], color=[COLOURS[format] for format in formats], height=0.7)
    ax.scatter(models["gb_per_token_nvfp4"], models["model"], color=BLACK, s=14, zorder=3, label="in NVFP4")
    for row, model in enumerate(models.itertuples()):
        text = f"{model.gb_per_token:.3g} = {model.share_read * 100:.2g} % of {model.routed_gib:,.0f} GiB"
        end = max(model.gb_per_token, model.gb_per_token_nvfp4)
        ax.annotate(text, (end, row), xytext=(6, 0), textcoords="offset points", va="center", fontsize=8)
    ax.set(
        xlabel="routed experts read for one token (GB = 10⁹ bytes)",
        xlim=(0, 1.35 * models["gb_per_token"].max()),
        ylim=(-0.6, len(models) - 0.4),
    )
    ax.tick_params(axis="y", labelsize=8)
    ax.grid(axis="y", visible=False)
    dot = ax.get_legend_handles_labels()[0]
    ax.legend(handles=[*_swatches(dict.fromkeys(formats[::-1])), *dot], title="published in", loc="upper right")
    return figure


def plot_blocks(layouts: Sequence["BlockLayout"]) -> Figure:
    """How an expert lies in its block: the planes to scale, in each layout, and the padding to whole pages."""
    figure, ax = plt.subplots(figsize=(6.4, 0.9 + 0.75 * len(layouts)))
    names = []
    for row, layout in enumerate(reversed(layouts)):
        names.append(layout.name)
        planes = [(plane.name, plane.offset_bytes, plane.nbytes, plane.shape) for plane in layout.planes]
        padding = layout.block_bytes - layout.payload_bytes
        if padding:
            planes.append(("padding", layout.payload_bytes, padding, None))
        for name, start, size, shape in planes:
            bar = ax.barh(row, size / 1024, left=start / 1024, color=COLOURS[name], edgecolor="white", height=0.7)
            if size > layout.block_bytes * 0.15:
                text = name.replace("_", " ") + (f"\n{shape[0]:,} rows of {shape[1]:,} B" if shape else "")
                ax.bar_label(bar, [text], label_type="center", color="white", fontsize=8)
    padded = any(layout.block_bytes > layout.payload_bytes for layout in layouts)
    ax.set_yticks(range(len(names)), names)
    ax.set(xlabel="offset in the block (KiB)", xlim=(0, layouts[0].block_bytes / 1024))
    ax.grid(axis="y", visible=False)
    swatches = _swatches(["up_scales", "down_scales", *(["padding"] if padded else [])])
    ax.legend(handles=swatches, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
    return figure


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


def _swatches(names: Iterable[str]) -> list[Patch]:
    return [Patch(color=COLOURS[name], label=name.replace("_", " ")) for name in names]


def _binary_unit(total_bytes: float) -> tuple[int, str]:
    return (2**30, "GiB") if total_bytes >= 2**30 else (2**20, "MiB")


def _short(value: Any) -> str:
    return f"{value:.2f}" if value >= 0.995 else f"{value:.2g}"
