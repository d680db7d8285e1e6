"""One unit for the sizes of a trace's caches, and places on the curve as rows."""

import numpy as np
import pytest

from nemolab.simulate import from_routing, main_curve, replay
from nemolab.simulate.sizes import list_places, read_scale
from nemolab.units import Budget

TOKENS, LAYERS, EXPERTS, TOP_K = 40, 3, 8, 2


@pytest.fixture
def experts():
    return np.argsort(np.random.default_rng(0).random((TOKENS, LAYERS, EXPERTS)) ** 3)[:, :, :TOP_K]


def test_sizes_are_in_bytes_where_blocks_have_one_and_in_slots_where_not(experts):
    in_bytes, in_slots = (
        read_scale(from_routing(experts, n_experts=EXPERTS, layer_bytes=size)) for size in ([2048, 4096, 4096], None)
    )
    assert (in_bytes.unit, in_bytes.whole, in_bytes.cycle) == ("budget_bytes", 8 * 10240, 2 * 10240)
    assert (in_slots.unit, in_slots.whole, in_slots.cycle) == ("slots", 24, 6)
    assert in_bytes.budget(np.int64(5)) == Budget(size_bytes=5) and in_slots.budget(5) == Budget(slots=5)
    assert (in_bytes.show(10240), in_slots.show(1024)) == ("10.00 KiB", "1,024 slots")
    assert in_slots.budgets([0.001, 0.01, 0.5, 1]) == [Budget(slots=slots) for slots in (1, 12, 24)]


@pytest.mark.parametrize("layer_bytes", [None, 4096, [2048, 4096, 4096]])
def test_places_say_what_a_replay_of_their_size_hits(experts, layer_bytes):
    lookups = from_routing(experts, n_experts=EXPERTS, layer_bytes=layer_bytes)
    scale, (_, curve) = read_scale(lookups), main_curve(lookups)
    rows = list_places(lookups, curve, shares=[0.5], hit_rates=[0.3, 1.0])
    assert {"floor", "one token's cycle", "end", "50% of all", "30% hit"} <= {row["place"] for row in rows}
    assert "100% hit" not in [row["place"] for row in rows], "first uses miss at any size"
    assert [row["size"] for row in rows] == sorted(row["size"] for row in rows)
    for row in rows:
        found = replay(lookups, **{scale.unit: row["size"]}).row("decode")
        assert row["hit_rate"] == found["hit_rate"], row["place"]
        assert row["reads_per_token"] == pytest.approx(found["reads_per_token"])
        assert row["size"] == row[scale.unit] == round(row["share"] * scale.whole) == round(row["cycles"] * scale.cycle)
    (enough,) = [row["size"] for row in rows if row["place"] == "30% hit"]
    assert replay(lookups, **{scale.unit: enough - 1}).row("decode")["hit_rate"] < 0.3, "the smallest that does"


def test_without_decode_a_place_has_no_cycles(experts):
    prompt = from_routing(experts, n_experts=EXPERTS, phase=[0] * TOKENS, step=range(TOKENS), prefill_warms=True)
    rows = list_places(prompt, main_curve(prompt)[1], shares=[0.5])
    assert {row["cycles"] for row in rows} == {None}
