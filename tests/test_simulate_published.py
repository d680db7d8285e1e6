"""A real trace, and the curve that its publishers computed from it: equal to all printed decimals at every budget.

The trace is third-party data that does not ship with the project; without it these tests skip.
"""

import csv
import os
from pathlib import Path

import numpy as np
import pytest

from nemolab.simulate import floor, measures
from nemolab.simulate.curve import lru_curve
from nemolab.simulate.lookups import DECODE, PREFILL, from_routing
from nemolab.simulate.replay import replay

FOLDER = Path(os.environ.get("NEMOLAB_SHARED_TRACES", Path(__file__).resolve().parents[2] / "shared" / "traces"))
TRACE, CURVE = FOLDER / "bmoe_qwen3-30b-a3b_top6.route.csv", FOLDER / "bmoe_qwen.expected-curve.csv"
if not TRACE.is_file():
    pytest.skip(f"no published trace at {TRACE}", allow_module_level=True)

LAYERS, EXPERTS, TOP_K = 48, 128, 6


def read_published():
    with CURVE.open() as file:
        return {(row["policy"], int(row["budget_mib"])): row for row in csv.DictReader(file)}


PUBLISHED = read_published()
BUDGETS = sorted({budget for _, budget in PUBLISHED})


@pytest.fixture(scope="module")
def routing():
    """Experts (tokens, layers, top_k), phase of each token, bytes of a block by layer."""
    layer_bytes, rows = np.zeros(LAYERS, np.int64), []
    for line in TRACE.read_text().splitlines():
        if line.startswith("# layer="):
            fields = dict(word.split("=") for word in line[2:].split())
            layer_bytes[int(fields["layer"])] = int(fields["expert_bytes"])
        elif line[0].isdigit():
            rows.append([int(text) for text in line.split(",")[1:6]])
    phase, step, layer, slot, expert = np.array(rows).T
    # Steps count from 0 in each phase. The last layer saw one token of the prompt only, so it stays -1 for the others.
    n_prompt = step[phase == PREFILL].max() + 1
    token = np.where(phase == PREFILL, step, step - step[phase == DECODE].min() + n_prompt)
    last = (phase == PREFILL) & (layer == LAYERS - 1)
    token[last] = n_prompt - 1
    experts = np.full((token.max() + 1, LAYERS, TOP_K), -1, np.int16)
    experts[token, layer, slot] = expert
    return experts, (np.arange(len(experts)) >= n_prompt).astype(np.uint8), layer_bytes


@pytest.fixture(scope="module")
def lookups(routing):
    experts, phase, layer_bytes = routing
    return from_routing(experts, n_experts=EXPERTS, phase=phase, layer_bytes=layer_bytes, prefill_warms=True)


def test_the_trace_is_the_one_described(lookups):
    assert lookups.count_tokens(PREFILL) == 28 and lookups.count_tokens(DECODE) == 128
    assert np.count_nonzero(lookups.phase == DECODE) == 128 * LAYERS
    assert lookups.n_batches == 129 * LAYERS and len(lookups.keys) == 2662 + 128 * LAYERS * TOP_K


@pytest.mark.parametrize("policy", ["lru", "lfu", "belady"])
@pytest.mark.parametrize("budget", BUDGETS)
def test_hit_rates_and_bytes_are_those_published(lookups, policy, budget):
    result = replay(lookups, policy, budget_bytes=budget * 2**20)
    total, decode = result.row("all"), result.row("decode")
    assert {
        "hit_pct_cum": f"{100 * total['hit_rate']:.3f}",
        "hit_pct_decode": f"{100 * decode['hit_rate']:.3f}",
        "read_mib": f"{total['read_bytes'] / 2**20:.1f}",
    }.items() <= PUBLISHED[policy, budget].items()


def test_the_whole_lru_curve_passes_through_the_published_points(lookups):
    total, decode = lru_curve(lookups), lru_curve(lookups, phase=DECODE)
    for budget in BUDGETS:
        row = PUBLISHED["lru", budget]
        assert f"{100 * total.hits_at(budget * 2**20) / total.lookups:.3f}" == row["hit_pct_cum"]
        assert f"{100 * decode.hits_at(budget * 2**20) / decode.lookups:.3f}" == row["hit_pct_decode"]


def test_the_engine_s_own_rules_give_another_curve(lookups, routing):
    """The comparison can fail: with prompt passes that leave no trace, decode starts cold."""
    experts, phase, layer_bytes = routing
    ours = from_routing(experts, n_experts=EXPERTS, phase=phase, layer_bytes=layer_bytes)
    rate = 100 * replay(ours, "lru", budget_bytes=4000 * 2**20).row("decode")["hit_rate"]
    assert f"{rate:.3f}" != PUBLISHED["lru", 4000]["hit_pct_decode"]


def test_repeat_rate_and_compulsory_share_are_those_published(lookups, routing):
    experts, phase, layer_bytes = routing
    assert round(100 * measures.repeat_rate(experts[phase == DECODE]), 1) == 38.0
    decode = from_routing(experts[phase == DECODE], n_experts=EXPERTS, layer_bytes=layer_bytes)
    row = replay(decode, "lru", budget_bytes=1 << 40).row("all")
    assert row["misses"] == row["compulsory"] == 3059
    assert round(100 * row["misses"] / row["lookups"], 1) == 8.3


def test_nothing_hits_up_to_the_floor(lookups):
    _, floor_bytes = floor.lru_floor(lookups)
    curve = lru_curve(lookups, phase=DECODE)
    assert curve.hits_at(floor_bytes) == 0 < curve.hits_at(int(floor_bytes * 1.1))
    assert 500 * 2**20 < floor_bytes < 785 * 2**20, "one token's cycle is 785 MiB"
