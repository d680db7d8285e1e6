"""Figures carry units, bars start at zero, and what is drawn is what came in."""

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt  # noqa: E402
import pandas as pd  # noqa: E402
import pytest  # noqa: E402

from nemolab import plots  # noqa: E402
from nemolab.store import BlockLayout  # noqa: E402

SUMS = pd.DataFrame(
    {"part": ["routed", "mamba", "mamba"], "format": ["nvfp4", "fp8", "bf16"], "bytes": [3 << 20, 1 << 20, 1 << 19]}
)
MODELS = pd.DataFrame(
    {
        "model": ["tiny", "big", "other"],
        "gb_per_token": [0.001, 2.7, 1.3],
        "how": ["counted", "counted", "published, recomputed"],
    }
)
POINTS = pd.DataFrame(
    {
        "name": ["engine", "engine", "swapped nibbles"],
        "text": ["a", "b", "a"],
        "kl_mean": [0.0, 1e-9, 3.0],
        "kind": ["engine", "engine", "control"],
    }
)
CACHE = pd.DataFrame({"share": [0.1, 1.0], "hit_rate": [0.2, 0.9], "mb_per_token": [3.0, 0.1]})
FIGURES = {
    "parts": lambda: plots.plot_parts(SUMS),
    "bytes_per_token": lambda: plots.plot_bytes_per_token(MODELS),
    "blocks": lambda: plots.plot_blocks([BlockLayout("source", 48, 32), BlockLayout("neuron", 48, 32)]),
    "agreement": lambda: plots.plot_agreement(POINTS, 1e-6, 0.1),
    "cache": lambda: plots.plot_cache(CACHE),
}


@pytest.fixture(autouse=True)
def _style():
    with plt.rc_context():
        plots.use_style()
        yield
    plt.close("all")


@pytest.mark.parametrize("name", FIGURES)
def test_every_axis_says_quantity_and_unit(name, tmp_path):
    figure = FIGURES[name]()
    for ax in figure.axes:
        assert "(" in ax.get_xlabel() or "%" in ax.get_xlabel(), ax.get_xlabel()
        assert not ax.spines["top"].get_visible() and not ax.spines["right"].get_visible()
    figure.savefig(tmp_path / "figure.png")


@pytest.mark.parametrize("name", ["parts", "bytes_per_token", "blocks"])
def test_bars_start_at_zero(name):
    assert FIGURES[name]().axes[0].get_xlim()[0] == 0


def test_bars_are_as_long_as_the_numbers():
    (ax,) = plots.plot_parts(SUMS).axes
    assert sorted(patch.get_width() for patch in ax.patches if patch.get_width()) == [0.5, 1.0, 3.0]
    (ax,) = plots.plot_bytes_per_token(MODELS).axes
    assert sorted(patch.get_width() for patch in ax.patches) == [0.001, 1.3, 2.7]


def test_legends_show_the_colours_that_are_drawn():
    for name in ("parts", "bytes_per_token", "blocks"):
        (ax,) = FIGURES[name]().axes
        drawn = {patch.get_facecolor() for patch in ax.patches}
        swatches = [patch.get_facecolor() for patch in ax.get_legend().get_patches()]
        assert len(set(swatches)) == len(swatches) and set(swatches) <= drawn


def test_a_block_is_filled_by_its_planes_and_padding():
    layout = BlockLayout("neuron", 48, 32)
    (ax,) = plots.plot_blocks([layout]).axes
    widths = [patch.get_width() * 1024 for patch in ax.patches]
    assert sum(widths) == layout.block_bytes and len(widths) == 5


def test_an_exact_agreement_still_has_a_dot():
    (ax,) = plots.plot_agreement(POINTS, 1e-6, 0.1).axes
    assert sum(len(dots.get_offsets()) for dots in ax.collections) == len(POINTS)


def test_every_colour_is_a_colour():
    from matplotlib.colors import is_color_like

    assert all(is_color_like(colour) for colour in plots.COLOURS.values())
