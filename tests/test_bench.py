"""The benchmarks run, name what they measured and hand back rows that can be recorded. No timing is judged here."""

import pytest
from synthetic import write_checkpoint

from nemolab.errors import UsageError
from nemolab.kernels import read_memory
from nemolab.kernels.team import Team
from nemolab.measure import bench, record
from nemolab.measure.bench_bookkeeping import bench_bookkeeping
from nemolab.measure.bench_trace import bench_trace


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch):
    measure = read_memory.measure_read_gb_s
    monkeypatch.setattr(read_memory, "measure_read_gb_s", lambda team: measure(team, buffer_bytes=2**20, repeats=2))


def test_expert_bench_compares_equal_work(tmp_path):
    found = bench.bench_expert("tiny", experts=5, active=1.0, repeats=3, threads=1)
    assert found["relative_error"] < 1e-5
    assert found["bytes_read"] == 5 * 36_864, "all of up and, with every neuron active, all of down"
    for row in found["rows"]:
        assert record(**row, folder=tmp_path)["values"] == row["values"]


def test_expert_bench_plants_the_share_it_says():
    found = bench.bench_expert("tiny", experts=3, active=0.125, repeats=3, threads=1)
    settings = found["rows"][0]["settings"]
    assert settings["active"] == 0.125 and found["relative_error"] < 1e-5
    assert 3 * 18_432 < found["bytes_read"] < 3 * 36_864


def test_expert_bench_refuses_what_it_does_not_know():
    with pytest.raises(UsageError, match="known are super, nano, tiny"):
        bench.bench_expert("huge")
    with pytest.raises(UsageError, match="0 to 1"):
        bench.bench_expert("tiny", active=2.0)


def test_decode_bench_feeds_both_the_same(tmp_path):
    path = write_checkpoint(tmp_path / "model", pattern="M*E", hidden=32, latent=32, inter=32, experts=4)
    found = bench.bench_decode(path, tokens=3, repeats=3, threads=1)
    assert found["misses"] == 0 and found["rows"][0]["settings"]["experts"] == "all cached"
    for row in found["rows"]:
        assert len(record(**row, folder=tmp_path)["values"]) == 3


def test_transformers_of_the_bench_is_the_same_model(tmp_path):
    import torch

    from nemolab.checkpoint import Checkpoint
    from nemolab.compare.reference import Reference

    path = write_checkpoint(tmp_path / "model", pattern="ME*", hidden=32, latent=None, inter=32, experts=4)
    ids = list(range(40, 60))
    with torch.no_grad():
        logits = bench._plain_transformers(path)(torch.tensor([ids])).logits[0]
    # As anyone would run it: with transformers' floor under the time step, which costs no time.
    assert torch.allclose(logits, Reference(Checkpoint.open(path), stock=True).logits(ids), atol=1e-4)


def test_reading_memory_reads_all_of_it():
    import numpy as np

    buffer = np.arange(64 * 33, dtype=np.float32) / 1024
    with Team(2) as team:
        assert read_memory.read_memory(team, buffer) == pytest.approx(float(buffer.sum()), rel=1e-5)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_trace_bench_does_the_same_work_twice(tmp_path, prefetch):
    path = write_checkpoint(tmp_path / "model", pattern="ME*E", hidden=32, latent=32, inter=32, experts=4)
    found = bench_trace(path, tokens=5, repeats=3, threads=1, prefetch=prefetch)
    assert [row["name"] for row in found["rows"]] == ["trace.plain", "trace.recorded", "trace.derive", "trace.slowdown"]
    assert found["slowdowns"] == found["rows"][3]["values"] and found["bytes_per_token"] > 0
    for row in found["rows"]:
        assert len(record(**row, folder=tmp_path)["values"]) == 3
    with pytest.raises(UsageError, match="at least 3"):
        bench_trace(path, repeats=2)


def test_bookkeeping_bench_runs_the_real_cache_without_reads(tmp_path):
    from nemolab.simulate import from_trace, replay
    from nemolab.trace.synthetic import sticky_trace

    found = bench_bookkeeping(tokens=2, repeats=3, warm_up=20, prefetch=2, shape=(4, 32, 3))
    rows = {row["name"].partition(".")[2]: row for row in found["rows"]}
    assert set(rows) == {"decisions", "lookup", "fetch", "lookup_ahead"}
    for name, row in rows.items():
        assert len(record(**row, folder=tmp_path)["values"]) == 3 and found[f"{name}_ms"] > 0
    assert [row["settings"]["prefetch"] for row in rows.values()] == [0, 0, 0, 2]
    slots = rows["lookup"]["settings"]["slots"]
    missed = replay(from_trace(sticky_trace(26, 4, 32, 3)), "lru", slots=slots).missed[-6 * 4 * 3 :]
    assert found["hit_rate"] == pytest.approx(1 - missed.mean()), "as a replay of the same tokens"
    assert rows["lookup_ahead"]["settings"]["hit_rate"] == found["hit_rate_ahead"] != found["hit_rate"]
    with pytest.raises(UsageError, match="at least 3"):
        bench_bookkeeping(repeats=2)


@pytest.mark.parametrize("device", ["twin", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_bookkeeping_of_a_card_is_that_of_its_table_too(device, monkeypatch):
    from nemolab.engine.gpu.table import ExpertTable

    told, touch = [], ExpertTable.touch
    monkeypatch.setattr(ExpertTable, "touch", lambda table, blocks: told.append(table) or touch(table, blocks))
    found = bench_bookkeeping(tokens=2, repeats=3, warm_up=5, prefetch=2, shape=(4, 32, 3), device=device)
    rows = {row["name"]: row["settings"] for row in found["rows"]}
    assert rows["bookkeeping.card"]["hit_rate"] == rows["bookkeeping.fetch"]["hit_rate"]
    assert rows["bookkeeping.card_ahead"]["prefetch"] == 2 and found["card_ms"] > 0 < found["card_ahead_ms"]
    assert len({id(table) for table in told}) == 2, "a table each, and both were told"


def test_guesses_of_the_bookkeeping_bench_are_right_as_often_as_it_says():
    from nemolab.measure.bench_bookkeeping import GUESSES_RIGHT, draw_guesses
    from nemolab.trace.synthetic import sticky_trace

    experts = sticky_trace(200, 4, 64, 6).experts
    guesses = draw_guesses(experts, 64, 4)
    right = (guesses[..., None] == experts[:, :, None, :]).any(-1).mean()
    by_luck = (1 - GUESSES_RIGHT) * 6 / 64
    assert guesses.shape == (200, 4, 4) and right == pytest.approx(GUESSES_RIGHT + by_luck, abs=0.02)
