"""The benchmark of the replay runs on a small trace, names what it measured, and feeds its rival the same requests."""

import importlib.util
import json

import numpy as np
import pytest

from nemolab.cli import main
from nemolab.errors import NemolabError, UsageError
from nemolab.measure import bench_replay as module
from nemolab.measure import record
from nemolab.simulate import POLICY_NAMES, from_routing, lru_curve, replay

installed = pytest.mark.skipif(importlib.util.find_spec("libcachesim") is None, reason="libcachesim is not installed")


@pytest.fixture
def small(monkeypatch):
    """A small synthetic trace in place of one of 40 layers of 512 experts."""
    draw = module.sticky_trace
    monkeypatch.setattr(module, "sticky_trace", lambda tokens: draw(tokens, n_layers=3, n_experts=16, top_k=4))


def test_every_policy_and_the_curve_have_rows_that_can_be_recorded(small, tmp_path):
    found = module.bench_replay(tokens=20, repeats=3, rival=False)
    names = {row["name"] for row in found["rows"]}
    assert names == {f"replay.{name.replace('-', '_')}" for name in (*POLICY_NAMES, "curve")}
    assert "not run: not asked for" in found["libcachesim"]
    for row in found["rows"]:
        assert record(**row, folder=tmp_path)["values"] == row["values"] and len(row["values"]) == 3
        assert row["settings"]["lookups"] == 20 * 3 * 4 and row["settings"]["trace"] == "sticky"


def test_a_machine_without_the_rival_is_told_so(small, monkeypatch):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    assert "pip install libcachesim" in module.bench_replay(tokens=5, repeats=3)["libcachesim"]


@installed
def test_the_rival_runs_the_same_requests(small):
    found = module.bench_replay(tokens=20, repeats=3)
    rows = {row["name"]: row for row in found["rows"]}
    assert {"replay.of_libcachesim", "replay.curve_of_libcachesim", "replay.libcachesim"} <= set(rows)
    settings = rows["replay.of_libcachesim"]["settings"]
    assert (settings["sizes"], settings["batches"]) == (32, settings["lookups"]) and found["of_libcachesim"] > 0


@installed
def test_a_rival_that_counts_otherwise_stops_the_comparison(small, monkeypatch):
    write = module.write_requests
    monkeypatch.setattr(module, "write_requests", lambda path, keys: write(path, keys[::-1] // 2))
    with pytest.raises(NemolabError, match="libCacheSim misses"):
        module.bench_replay(tokens=20, repeats=3)


def test_lookups_one_by_one_are_the_same_keys_in_batches_of_one():
    experts = np.random.default_rng(0).permuted(np.tile(np.arange(8), (30, 2, 1)), axis=2)[:, :, :3]
    lookups = from_routing(experts, n_experts=8)
    single = module.one_by_one(lookups)
    assert single.n_batches == len(lookups.keys) == single.count_tokens() and np.all(np.diff(single.starts) == 1)
    assert np.array_equal(single.keys, lookups.keys) and single.layer.max() == 1
    assert lru_curve(single, in_slots=True).hits_at(9) == replay(single, slots=9).row("decode")["hits"]


def test_too_few_rounds_are_refused():
    with pytest.raises(UsageError, match="at least 3"):
        module.bench_replay(repeats=2)


def test_the_verb_answers_in_json(small, capsys):
    assert main(["bench", "replay", "--tokens", "5", "--repeats", "3", "--alone", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["million_per_s"]) == set(POLICY_NAMES) and found["curve_s"] > 0
