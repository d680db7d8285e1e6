"""Figures carry units, bars start at zero, and what is drawn is what came in."""

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
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
READS = pd.DataFrame(
    {
        "guesser": ["router's guesses"] * 3 + ["perfect guesses"] * 2,
        "prefetch": [0, 1, 2, 0, 1],
        "on_demand": [20.0, 17.0, 15.0, 20.0, 15.0],
        "used": [0.0, 3.0, 5.0, 0.0, 5.0],
        "unused": [0.0, 1.0, 4.0, 0.0, 0.0],
    }
)
CURVE = pd.DataFrame({"size": [4, 6, 9], "hit_rate": [0.2, 0.5, 0.8]})
POLICIES = pd.DataFrame(
    {
        "policy": ["lfu", "lfu", "belady", "belady"],
        "prefetch": 0,
        "size": [3, 8, 3, 8],
        "hit_rate": [0.1, 0.6, 0.4, 0.9],
    }
)
COUNTS = np.array([[40, 10, 0, 0], [30, 10, 10, 0]])
REPEATS = {"this trace": [0.5, None], "shuffled across all": [0.2, 0.1], "even routing": [0.1, 0.1]}
REUSE = ([1, 2, 4, 8], [0, 10, 30], 5)
RIGHT = {"1 layer ahead": [0.9, 0.7], "shuffled guesses": [0.2, 0.2]}
CACHE = pd.DataFrame({"share": [0.1, 1.0], "hit_rate": [0.2, 0.9], "mb_per_token": [3.0, 0.1]})
FAMILIES = pd.DataFrame(
    {
        "model": ["small", "large"],
        "gb_per_token": [1.3, 2.7],
        "gb_per_token_nvfp4": [0.7, 2.7],
        "expert_format": ["fp8_128x128", "nvfp4"],
        "share_read": [0.02, 0.04],
        "routed_gib": [61.0, 59.1],
    }
)
ACTIVE = pd.DataFrame(
    {"phase": ["prefill"] * 3 + ["decode"] * 4, "neurons": [0, 1, 2, 2, 2, 3, 4], "groups": [0, 1, 1, 1, 2, 2, 3]}
)
EXPECTED = pd.DataFrame({"neurons": [0, 2, 4], "groups": [0, 1.8, 3.1]})
MOVED = pd.DataFrame(
    {
        "strategy": ["whole", "rows", "pull"],
        "copied": [100.0, 50.0, 0.0],
        "in_place": [0.0, 7.0, 57.0],
        "low": [98.0, 59.0, 57.0],
        "middle": [100.0, 60.0, 58.0],
        "high": [103.0, 62.0, 60.0],
    }
)
FIGURES = {
    "parts": lambda: plots.plot_parts(SUMS),
    "bytes_per_token": lambda: plots.plot_bytes_per_token(MODELS),
    "families": lambda: plots.plot_families(FAMILIES),
    "blocks": lambda: plots.plot_blocks([BlockLayout("source", 48, 32), BlockLayout("neuron", 48, 32)]),
    "agreement": lambda: plots.plot_agreement(POINTS, 1e-6, 0.1),
    "cache": lambda: plots.plot_cache(CACHE),
    "curve": lambda: plots.plot_curve(CURVE, POLICIES, in_slots=True, floor=3, marks={"knee": 6}, whole=10),
    "routing": lambda: plots.plot_routing(COUNTS, REPEATS, REUSE, RIGHT, floor_blocks=4),
    "routing without guesses": lambda: plots.plot_routing(COUNTS, REPEATS, REUSE, {}, floor_blocks=4),
    "prefetch": lambda: plots.plot_prefetch(READS),
    "skipping": lambda: plots.plot_skipping(ACTIVE, EXPECTED, MOVED),
    "skipping without counts": lambda: plots.plot_skipping(None, None, MOVED),
}


@pytest.fixture(autouse=True)
def _style():
    with plt.rc_context():
        plots.use_style()
        yield
    plt.close("all")


def check_axes(figure) -> None:
    """Every axis of numbers says its quantity and unit; one of names needs no label, one shared has its sibling's."""
    for ax in figure.axes:
        for axis, siblings in ((ax.xaxis, ax.get_shared_x_axes()), (ax.yaxis, ax.get_shared_y_axes())):
            labels = [getattr(shared, axis.axis_name + "axis").label.get_text() for shared in siblings.get_siblings(ax)]
            names = all(label.get_text()[:1].isalpha() for label in axis.get_ticklabels())
            assert names or any("(" in label for label in labels), (ax.get_title(), labels)
        assert not ax.spines["top"].get_visible() and not ax.spines["right"].get_visible()


@pytest.mark.parametrize("name", FIGURES)
def test_every_axis_says_quantity_and_unit(name, tmp_path):
    figure = FIGURES[name]()
    check_axes(figure)
    figure.savefig(tmp_path / "figure.png")


@pytest.mark.parametrize("spoil", [lambda ax: ax.set_ylabel("share"), lambda ax: ax.set_xlabel("")])
def test_the_axis_check_can_fail(spoil):
    figure = FIGURES["cache"]()
    spoil(figure.axes[0])
    with pytest.raises(AssertionError):
        check_axes(figure)


def test_every_figure_of_the_room_is_drawn_here():
    import inspect

    drawn = "".join(inspect.getsource(draw) for draw in FIGURES.values())
    assert [name for name in plots.__all__ if name.startswith("plot_") and f"plots.{name}(" not in drawn] == []


@pytest.mark.parametrize("name", ["parts", "bytes_per_token", "families", "blocks"])
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


def test_reads_are_stacked_to_all_that_is_read():
    left, right = plots.plot_prefetch(READS).axes
    tops = {}
    for bar in left.patches:
        middle = bar.get_x() + bar.get_width() / 2
        tops[round(middle)] = max(tops.get(round(middle), 0), bar.get_y() + bar.get_height())
    assert tops == {0: 20.0, 1: 21.0, 2: 24.0}, "the first guesser's rows"
    solid = [line.get_ydata().tolist() for line in right.lines if line.get_linestyle() == "-"]
    assert solid == [[20.0, 17.0, 15.0], [20.0, 15.0]]
    assert left.get_ylim()[0] == 0 and left.get_ylim()[1] >= 24


def test_bytes_of_a_strategy_are_stacked_and_time_stands_on_the_same_scale():
    for name, panels in (("skipping", 3), ("skipping without counts", 1)):
        figure = FIGURES[name]()
        assert len(figure.axes) == panels and figure.axes[-1].get_ylim()[0] == 0
        tops = [bar.get_y() + bar.get_height() for bar in figure.axes[-1].patches]
        assert tops == [100, 50, 0, 100, 57, 57]
        assert figure.axes[-1].lines[0].get_ydata().tolist() == [100, 60, 58]


def test_shares_of_lookups_by_active_neurons_add_up_in_each_phase():
    left, middle, _ = FIGURES["skipping"]().axes
    heights = [area.get_xy()[:, 1].max() for area in left.patches]
    assert sorted(heights) == pytest.approx([100 / 3, 50])
    decode = next(line for line in middle.lines if line.get_label() == "decode")
    assert decode.get_xydata().tolist() == [[2, 1.5], [3, 2], [4, 3]], "the mean of those with as many neurons"


def test_a_trace_without_guesses_has_no_empty_panel():
    with_guesses, without = (plots.plot_routing(COUNTS, REPEATS, REUSE, right, floor_blocks=4) for right in (RIGHT, {}))
    assert [len(figure.axes) for figure in (with_guesses, without)] == [4, 3]
    assert all(ax.lines or ax.patches for figure in (with_guesses, without) for ax in figure.axes)


def test_a_repeat_rate_that_is_undefined_is_not_drawn_as_zero():
    ax = plots.plot_routing(COUNTS, REPEATS, REUSE, {}, floor_blocks=4).axes[1]
    first, second = (bar.get_height() for bar in ax.patches)
    assert first == 50 and np.isnan(second) and ax.get_ylim()[1] == pytest.approx(85)


def test_the_hottest_quarter_is_read_off_the_curve():
    ax = plots.plot_routing(COUNTS, REPEATS, REUSE, {}, floor_blocks=0).axes[0]
    (curve, even, dot) = ax.lines
    assert curve.get_ydata().tolist() == [0, 40, 70, 80, 90, 100, 100, 100, 100]
    assert dot.get_xydata().tolist() == [[25.0, 70.0]] and even.get_ydata().tolist() == [0, 100]


def test_reuse_bars_are_shares_of_all_lookups():
    ax = plots.plot_routing(COUNTS, REPEATS, REUSE, {}, floor_blocks=4).axes[2]
    assert sum(bar.get_height() for bar in ax.patches) == pytest.approx(100)
    assert len(ax.get_xticklabels()) == 3 and ax.get_xticklabels()[-1].get_text() == "first\nuse"


def test_the_gap_reaches_from_the_steps_of_the_curve_to_the_optimum():
    (ax,) = FIGURES["curve"]().axes
    (gap,) = [area for area in ax.collections if area.get_label() == "Belady's gap"]
    edge = {tuple(point) for point in gap.get_paths()[0].vertices.round(6).tolist()}
    assert {(3, 0), (3, 40), (8, 50), (8, 90), (6, 50), (4, 20)} <= edge, "lower edge: what an LRU hits at that size"
    (bare,) = plots.plot_curve(CURVE, POLICIES[:2], in_slots=True).axes
    assert not bare.collections, "no optimum, no gap"
