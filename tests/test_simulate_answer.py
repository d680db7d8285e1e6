"""The parts of an answer agree with one another whatever the routing: rows, curve, advice, measures, text, JSON."""

import json

import numpy as np
import pytest
from toy_traces import draw_case, make_trace

from nemolab import simulate
from nemolab.commands import simulate_text
from nemolab.commands.verb import to_json
from nemolab.units import Budget

GAP_PARTS = ("lru_hit_rate", "policy_share", "size_share", "compulsory_share")


def answer(seed):
    """(the document of `nemolab simulate` for a random routing, its curve)."""
    routing, n_experts, sizes, _, asked = draw_case(seed)
    block_bytes = (None, (7,) * len(sizes), tuple(sizes))[seed % 3]
    warms = routing.pop("prefill_warms")
    routing["guesses"] = routing["guesses"].astype(np.int16)
    trace = make_trace(
        routing.pop("experts"), n_experts, meta={"block_bytes": block_bytes, "prefill_warms": warms}, **routing
    )
    lookups = simulate.from_trace(trace)
    budgets = [*simulate.default_budgets(lookups), Budget(slots=seed % 9)]
    policies = list(dict.fromkeys(["lru", "belady", simulate.POLICY_NAMES[seed % len(simulate.POLICY_NAMES)]]))
    depths, cold = sorted({0, asked["prefetch"]}), asked["cold"]
    rows = simulate.sweep(lookups, budgets, policies, depths, cold=cold)
    phase, curve = simulate.main_curve(lookups, cold=cold)
    data = {
        "trace": simulate.list_facts(trace),
        "notes": simulate.list_notes(trace, lookups, budgets, policies, depths, cold=cold, memory_bytes=100),
        "rows": rows,
        "advice": simulate.advise(lookups, curve).to_dict(),
        "gaps": simulate.find_gaps(rows, phase),
        "curve_phase": phase,
        "curve_cold": cold,
        "curve": simulate.list_points(lookups, curve),
        "measures": simulate.measure_trace(trace, cold=cold),
    }
    return data, curve


@pytest.mark.parametrize("first", [0, 10, 20, 30])
def test_an_answer_holds_together(first):
    for seed in range(first, first + 10):
        data, curve = answer(seed)
        assert json.loads(to_json(data))["rows"] and simulate_text.render(data), seed
        unit = "slots" if curve.in_slots else "budget_bytes"
        for row in data["rows"]:
            assert row["hits"] + row["misses"] == row["lookups"], (seed, row)
            assert row["compulsory"] + row["capacity"] == row["misses"] and row["capacity"] >= 0, (seed, row)
            plain = (row["policy"], row["phase"], row["prefetch"]) == ("lru", data["curve_phase"], 0)
            if plain and row[unit] is not None and row["lookups"]:
                reached = [point["hit_rate"] for point in data["curve"] if point[unit] <= row[unit]]
                assert row["hit_rate"] == max(reached, default=0.0), (seed, row)
        for gap in data["gaps"]:
            assert sum(gap[part] for part in GAP_PARTS) == pytest.approx(1), (seed, gap)
        reuse, found = data["measures"]["reuse_distance"], data["measures"]
        assert sum(reuse["counts"]) + reuse["never"] == found["lookups"], seed
