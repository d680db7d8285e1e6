"""`nemolab bench moe-step`: what it refuses, its arithmetic, and on a card its rows."""

import pytest

from nemolab.engine.transfers import TRANSFERS
from nemolab.errors import NemolabError, UsageError
from nemolab.measure import record
from nemolab.measure.bench_moe_step import bench_moe_step, check_error, make_answer

CASES = (*TRANSFERS, "pull_graph", "neurons")


def test_the_bench_needs_sizes_that_can_be():
    with pytest.raises(UsageError, match="known are super, nano, tiny"):
        bench_moe_step("huge")
    with pytest.raises(UsageError, match="22 of 5 experts"):
        bench_moe_step("tiny", cached=5)


def test_a_floor_is_what_is_copied_and_what_is_read_in_place_each_at_its_rate():
    """2 experts of 160 neurons and 64 inputs: up 5,760 bytes, down as many; 12 groups with 30 active neurons in all."""
    samples = {name: [1.0, 2.0 + place, 90.0] for place, name in enumerate(CASES)}
    samples |= {"copy": [50.0, 10.0, 90.0], "stream": [25.0, 20.0, 99.0]}
    settings = {"inter": 160, "width": 64, "experts": 2, "relative_error": 1e-7}
    copied = {"pieces": 8, "bytes": 48}
    found = make_answer(samples, {"neurons": 30, "groups": 12}, settings, {"rows": (1, 1)}, copied)
    rows = {row["name"].partition(".")[2]: row for row in found["rows"]}
    in_rows = 12 * 64 + 30 * 32
    moved = {
        "whole": (2 * 11_520, 0),
        "grouped": (2 * 5_760, 12 * (16 * 32 + 64)),
        "rows": (2 * 5_760, in_rows),
        "pull": (0, 2 * 5_760 + in_rows),
        "pull_graph": (0, 2 * 5_760 + in_rows),
        "neurons": (2 * 5_760, 30 * (32 + 64)),
    }
    for place, (name, (copied_bytes, in_place_bytes)) in enumerate(moved.items()):
        said, floor_us = rows[name]["settings"], copied_bytes / 50e3 + in_place_bytes / 25e3
        assert (said["bytes_copied"], said["bytes_in_place"]) == pytest.approx((copied_bytes, in_place_bytes))
        assert said["floor_us"] == found[f"{name}_floor_us"] == pytest.approx(floor_us)
        assert found[f"{name}_us"] == 2 + place and found[f"{name}_of_floor"] == pytest.approx((2 + place) / floor_us)
        assert said["waves"] == ((1, 1) if name == "rows" else None) and said["relative_error"] == 1e-7
    assert found["pull_is_faster_than_whole"] == pytest.approx(2 / 5)
    assert (found["copy_gb_s"], found["stream_gb_s"]) == (50, 25)
    assert rows["copy_bandwidth"]["settings"] == copied and rows["stream_bandwidth"]["values"] == [25.0, 20.0, 99.0]


@pytest.mark.parametrize("error", [1.1e-5, float("inf"), float("nan")])
def test_a_step_that_computes_something_else_is_not_timed(error):
    with pytest.raises(NemolabError, match="away from float64 arithmetic, 1e-05 at most was expected"):
        check_error(error)
    assert check_error(9e-6) == 9e-6


@pytest.mark.gpu
def test_the_bench_runs_and_its_rows_can_be_kept(tmp_path):
    found = bench_moe_step("tiny", top_k=6, cached=32, steps=2, repeats=3)
    assert found["same_bits"] and found["relative_error"] < 1e-5
    rows = {row["name"].partition(".")[2]: row for row in found["rows"]}
    settings = rows["whole"]["settings"]
    assert settings["bytes_copied"] == 6 * 36_864 and settings["bytes_in_place"] == 0
    for name in CASES:
        said = rows[name]["settings"]
        floor_us = 1e-3 * (said["bytes_copied"] / found["copy_gb_s"] + said["bytes_in_place"] / found["stream_gb_s"])
        assert found[f"{name}_of_floor"] == pytest.approx(found[f"{name}_us"] / floor_us)
    assert rows["copy_bandwidth"]["settings"] == {"pieces": 8, "bytes": 48 * 2**20}
    for row in found["rows"]:
        assert len(record(**row, folder=tmp_path)["values"]) == 3
