"""A real trace, and the curve that its publishers computed from it: equal to all printed decimals at every budget.

The trace is third-party data that does not ship with the project; without it these tests skip.
"""

import csv
import os
from pathlib import Path

import numpy as np
import pytest

from nemolab.simulate import DECODE, PREFILL, floor, from_trace, measures
from nemolab.simulate.curve import lru_curve
from nemolab.simulate.replay import replay
from nemolab.trace import open_trace

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
def trace():
    return open_trace(TRACE)


@pytest.fixture(scope="module")
def lookups(trace):
    return from_trace(trace)


def test_the_trace_is_the_one_described(trace, lookups):
    assert trace.experts.shape == (28 + 128, LAYERS, TOP_K) and trace.meta.n_experts == EXPERTS
    assert trace.meta.source == "route_trace v1" and trace.meta.model == "Qwen3-30B-A3B-Q4_K_M"
    assert trace.meta.ranked and trace.meta.prefill_warms
    assert set(trace.meta.block_bytes) == {3059712, 2654208} and trace.meta.block_bytes[5:7] == (3059712, 2654208)
    assert trace.experts[0, 0].tolist() == [49, 19, 58, 29, 16, 70]
    assert (
        trace.weights[0, 0].tolist()
        == np.float32([0.221297, 0.191844, 0.190793, 0.147117, 0.136741, 0.112209]).tolist()
    )
    assert np.all(trace.experts[:27, -1] == -1) and np.all(trace.experts[27:] >= 0)
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
        "read_mib": f"{total['bytes_read'] / 2**20:.1f}",
    }.items() <= PUBLISHED[policy, budget].items()


def test_the_whole_lru_curve_passes_through_the_published_points(lookups):
    total, decode = lru_curve(lookups), lru_curve(lookups, phase=DECODE)
    for budget in BUDGETS:
        row = PUBLISHED["lru", budget]
        assert f"{100 * total.hits_at(budget * 2**20) / total.lookups:.3f}" == row["hit_pct_cum"]
        assert f"{100 * decode.hits_at(budget * 2**20) / decode.lookups:.3f}" == row["hit_pct_decode"]


def test_replay_reads_what_the_phone_read_batch_by_batch(trace, lookups):
    """The phone had 4000 MiB; the trace tells what it read. 1 MiB more or less and the two part."""
    live = trace.live_misses[(trace.live_misses >= 0).all(axis=1)].reshape(-1)
    misses = {mib: replay(lookups, "lru", budget_bytes=mib * 2**20).misses_by_batch() for mib in (3999, 4000, 4001)}
    assert live.sum() == 9929 and np.array_equal(misses[4000], live)
    assert not np.array_equal(misses[3999], live) and not np.array_equal(misses[4001], live)


def test_the_engine_s_own_rules_give_another_curve(trace):
    """The comparison can fail: with prompt passes that leave no trace, decode starts cold."""
    rate = (
        100 * replay(from_trace(trace, prefill_warms=False), "lru", budget_bytes=4000 * 2**20).row("decode")["hit_rate"]
    )
    assert f"{rate:.3f}" != PUBLISHED["lru", 4000]["hit_pct_decode"]


def test_repeat_rate_and_compulsory_share_are_those_published(trace):
    decode = trace.select(phase="decode")
    assert round(100 * measures.repeat_rate(decode.experts), 1) == 38.0
    row = replay(from_trace(decode), "lru", budget_bytes=1 << 40).row("all")
    assert row["misses"] == row["compulsory"] == 3059
    assert round(100 * row["misses"] / row["lookups"], 1) == 8.3


def test_nothing_hits_up_to_the_floor(lookups):
    _, floor_bytes = floor.lru_floor(lookups)
    curve = lru_curve(lookups, phase=DECODE)
    assert curve.hits_at(floor_bytes) == 0 < curve.hits_at(int(floor_bytes * 1.1))
    assert 500 * 2**20 < floor_bytes < 785 * 2**20, "one token's cycle is 785 MiB"
