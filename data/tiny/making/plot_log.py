"""Draw the training log: held-out loss of each kind of text, and the training loss, over the tokens seen.

python plot_log.py training_log.jsonl training_log.png
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLOURS = {"own": "#009E73", "literature": "#0072B2", "technical": "#E69F00", "russian": "#D55E00"}
LABELS = {
    "own": "own texts and chats",
    "literature": "literature",
    "technical": "manuals",
    "russian": "Russian manuals",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path)
    parser.add_argument("figure", type=Path)
    arguments = parser.parse_args()
    rows = [json.loads(line) for line in arguments.log.read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "step"]
    validations = [row for row in rows if row["kind"] == "validation"]
    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    million = [row["tokens"] / 1e6 for row in steps]
    axes.plot(million, [row["loss"] for row in steps], color="0.6", linewidth=1, label="training mix, smoothed targets")
    for domain, colour in COLOURS.items():
        if f"loss_{domain}" not in validations[0]:
            continue
        losses = [row[f"loss_{domain}"] for row in validations]
        axes.plot(
            [row["tokens"] / 1e6 for row in validations], losses, "o-", color=colour, markersize=3, label=LABELS[domain]
        )
    rounded = [row["tokens"] / 1e6 for row in steps if row["quantised"]]
    if rounded:
        axes.axvspan(rounded[0], million[-1], color="0.92", zorder=0)
        axes.text(rounded[0], axes.get_ylim()[1], " weights rounded\n as stored", va="top", fontsize=7)
    axes.set_xlabel("tokens seen (million)")
    axes.set_ylabel("loss (nats a token)")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=7)
    figure.savefig(arguments.figure, dpi=150)


if __name__ == "__main__":
    main()
