"""Bytes that cross the bus, by transfer strategy: the arithmetic, and that recorded runs moved as many."""

import pytest

from nemolab.engine.transfers import TRANSFERS
from nemolab.errors import NemolabError
from nemolab.measure import read_rows, transfer
from nemolab.measure.transfer import (
    count_crossing,
    count_neurons,
    groups_if_independent,
    percent_of_whole,
    read_of_floor,
    read_timed,
    tabulate_crossing,
)
from nemolab.store.layout import BlockLayout


def test_an_expert_of_super_by_hand():
    found = count_crossing(2688, 1024, neurons=200, groups=120)
    assert found["whole"] == (3_096_576, 0)
    assert found["grouped"] == (1_548_288, 120 * 9_216)
    assert found["rows"] == (1_548_288, 120 * 1_024 + 200 * 512)
    assert found["pull"] == (0, 1_548_288 + 120 * 1_024 + 200 * 512)


def test_scales_read_again_for_each_neuron_by_hand():
    assert count_neurons(2688, 1024, neurons=200) == (1_548_288, 200 * (512 + 1_024))
    alone = count_crossing(2688, 1024, neurons=120, groups=120)["rows"]
    assert count_neurons(2688, 1024, neurons=120) == alone, "one neuron a group: nothing to share"


@pytest.mark.parametrize("shape", [(2688, 1024), (1856, 2688), (192, 64)])
def test_with_every_neuron_active_all_move_the_whole_payload(shape):
    inter, width = shape
    payload_bytes = BlockLayout("neuron", inter, width).payload_bytes
    assert {crossing.total for crossing in count_crossing(inter, width, inter, inter // 16).values()} == {payload_bytes}


def test_no_strategy_moves_more_than_the_one_before():
    totals = [crossing.total for crossing in count_crossing(192, 64, 30, 9).values()]
    assert totals == sorted(totals, reverse=True) and totals[2] == totals[3], "pull moves what rows moves"


def test_recorded_runs_moved_what_is_counted():
    rows = [row for row in read_rows("moe_step.*").itertuples() if "bytes_copied" in row.settings]
    assert len(rows) >= 5
    for row in rows:
        settings, name = row.settings, row.name.partition(".")[2].removesuffix("_graph")
        inter, experts = settings["inter"], settings["experts"]
        neurons, groups = settings["active"] * inter, settings["active_groups"] * (inter // 16)
        counted = count_crossing(inter, settings["width"], neurons, groups)
        counted |= {"neurons": count_neurons(inter, settings["width"], neurons)}
        moved = settings["bytes_copied"] / experts, settings["bytes_in_place"] / experts
        assert moved == pytest.approx(counted[name], rel=1e-9), row.name


def test_independent_neurons_fill_groups():
    assert groups_if_independent(0.075) == pytest.approx(0.7127, abs=1e-4), "1 - 0.925^16"
    assert (groups_if_independent(0), groups_if_independent(1)) == (0, 1)


def test_recorded_times_are_found_by_share_and_shape():
    timed = read_timed(0.075)
    assert timed["strategy"].tolist()[:5] == [*TRANSFERS, "pull_graph"]
    assert ((timed["low_us"] <= timed["us"]) & (timed["us"] <= timed["high_us"])).all()
    assert ((timed["active"] - 0.075).abs() < 0.005).all() and (timed["us"] > timed["floor_us"]).all()
    ratios = read_of_floor(0.075)
    assert len(ratios) >= 4 and ratios.iloc[-1][[*TRANSFERS]].tolist() == timed["of_floor"].tolist()[:4]
    with pytest.raises(NemolabError, match="no run with all of moe_step.whole"):
        read_timed(0.9)


def test_neurons_stand_last_in_runs_that_measured_them(monkeypatch):
    """Two recorded runs, the newer one made to have such a row; one of a run without strategies counts for nothing."""
    older, newer = transfer.runs_with(transfer._STEPS, inter=2688, width=1024)[-2:]
    assert older["moe_step.pull"]["run"] != newer["moe_step.pull"]["run"]
    row = newer["moe_step.rows"].copy()
    row["median"] = 3 * newer["moe_step.whole"]["median"]
    stray = row.copy()
    stray["run"] = "of another one"
    found = {tuple(transfer._STEPS): [older, newer], ("moe_step.neurons",): [{"moe_step.neurons": row}]}
    found["moe_step.neurons",].append({"moe_step.neurons": stray})
    monkeypatch.setattr(transfer, "runs_with", lambda names, **_: found[tuple(names)])
    timed = read_timed(0.075).set_index("strategy")
    assert timed.index.tolist() == [*TRANSFERS, "pull_graph", "neurons"] and timed["of_whole"]["neurons"] == 3
    counted = count_crossing(2688, 1024, neurons=200, groups=120) | {"neurons": count_neurons(2688, 1024, neurons=200)}
    assert percent_of_whole(counted, timed.reset_index()).set_index("strategy")["middle"]["neurons"] == 300
    assert read_of_floor(0.075)["neurons"].isna().tolist() == [True, False]
    found[tuple(transfer._STEPS)].pop()
    assert "neurons" not in read_timed(0.075)["strategy"].tolist()


def test_bytes_and_times_stand_on_one_scale():
    counted = count_crossing(2688, 1024, neurons=200, groups=120)
    timed = read_timed(0.075)
    percent = percent_of_whole(counted, timed).set_index("strategy")
    assert percent.loc["whole"].round(9)[["copied", "in_place", "middle"]].tolist() == [100, 0, 100]
    assert percent.loc["pull", "in_place"] == pytest.approx(100 * counted["pull"].total / 3_096_576)
    us = timed.set_index("strategy")["us"]
    assert percent.loc["rows", "middle"] == pytest.approx(100 * us["rows"] / us["whole"])
    table = tabulate_crossing({"large": counted})
    assert table["bytes"].tolist() == [crossing.total for crossing in counted.values()]
    assert table["of_whole"].tolist()[:2] == [1, (1_548_288 + 120 * 9_216) / 3_096_576]
