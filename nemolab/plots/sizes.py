"""Bytes: of a model's parts, of one token, of an expert in its block."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from nemolab.plots.style import BLACK, COLOURS, binary_unit, swatches

if TYPE_CHECKING:
    import pandas as pd

    from nemolab.store import BlockLayout


def plot_parts(sums: "pd.DataFrame") -> Figure:
    """Bytes of each part of a model, stacked by number format.

    sums  columns part, format, bytes (as `Inventory.by_format().reset_index()`)
    """
    step, unit = binary_unit(sums["bytes"].sum())
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
    ax.legend(handles=swatches(dict.fromkeys(models["how"])), loc="lower right")
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
    ax.legend(handles=[*swatches(dict.fromkeys(formats[::-1])), *dot], title="published in", loc="upper right")
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
    named = ["up_scales", "down_scales", *(["padding"] if padded else [])]
    ax.legend(handles=swatches(named), loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
    return figure


def _short(value: Any) -> str:
    return f"{value:.2f}" if value >= 0.995 else f"{value:.2g}"
