"""`nemolab bench decode` and `prefill` on a card: what they count and how, shown on twins. No timing is judged here."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from faults import run_cli
from synthetic import write_checkpoint

from nemolab.engine import Engine
from nemolab.engine.transfers import TRANSFERS
from nemolab.errors import EngineError, NemolabError, TraceError, UsageError
from nemolab.measure import bench_card_decode, disk_floor, forced_routing, gpu_floors, record
from nemolab.measure.bench_card_decode import bench_card_decode as run_decode
from nemolab.measure.bench_card_prefill import bench_card_prefill, rewind
from nemolab.measure.torch_products import dense_shapes, time_experts
from nemolab.measure.transfer import count_crossing
from nemolab.store import Store, ensure_store

LAYERS, EXPERTS, TOP_K, WIDTH = 3, 8, 2, 32


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Store:
    path = tmp_path_factory.mktemp("bench") / "model"
    write_checkpoint(path, pattern="ME*EE", hidden=32, latent=WIDTH, inter=WIDTH, experts=EXPERTS, top_k=TOP_K)
    return Store.open(ensure_store(path))


@pytest.fixture(autouse=True)
def small_samples(monkeypatch):
    monkeypatch.setattr(disk_floor, "SAMPLE_BYTES", 2**16)
    monkeypatch.setattr(gpu_floors, "STAND_IN_BYTES", 2**16)
    monkeypatch.setattr(bench_card_decode, "LONGEST_WARM_UP", 12)
    monkeypatch.setattr(bench_card_decode, "COUNTED_TOKENS", 2)


def decode(store, **settings):
    return run_decode(store.path, device="twin", **{"tokens": 2, "repeats": 3, "prefetch": 2} | settings)


def test_decode_counts_what_each_strategy_moves(store, tmp_path):
    found = decode(store, transfers=TRANSFERS, cached=0.5)
    rows = {row["name"].partition(".")[2]: row for row in found["rows"]}
    for name in TRANSFERS:
        said = rows[name]["settings"]
        each = count_crossing(WIDTH, WIDTH, said["active"] * WIDTH, said["active_groups"] * WIDTH / 16)[name]
        assert said["bytes_copied"] == pytest.approx(LAYERS * TOP_K * each.copied)
        assert said["bytes_in_place"] == pytest.approx(LAYERS * TOP_K * each.in_place)
        bus_ms = 1e-6 * (said["bytes_copied"] / said["copy_gb_s"] + said["bytes_in_place"] / said["in_place_gb_s"])
        assert said["bus_ms"] == pytest.approx(bus_ms)
        assert said["disk_ms"] == pytest.approx(1e-6 * said["needed_reads"] * store.block_bytes / said["disk_gb_s"])
        assert said["needed_copied"] == said["bytes_copied"], "nothing is copied on a guess"
        longest = max("bus", "disk", "dense", key=lambda of: said[f"{of}_ms"])
        assert said["floor_is"] == longest and said["floor_ms"] == said[f"{longest}_ms"]
        assert found[f"{name}_of_floor"] == pytest.approx(found[f"{name}_ms"] / said["floor_ms"])
        assert len(record(**rows[name], folder=tmp_path)["values"]) == 3
    assert found["same_bits"] and rows["pull"]["settings"]["in_turns"]
    assert found["compared_tokens"] == rows["pull"]["settings"]["compared_tokens"] == 2
    assert [rows[f"{of}_bandwidth"]["unit"] for of in ("read", "disk", "copy", "in_place")] == ["GB/s"] * 4


def test_decode_hits_what_a_replay_of_its_trace_hits(store):
    """The cache of the engine and that of the replay see the same tokens: prompt passes leave no trace in either."""
    from nemolab.simulate import from_trace, replay
    from nemolab.trace.synthetic import sticky_trace

    found = decode(store, cached=0.5, prefetch=0, own=False)
    said = found["rows"][0]["settings"]
    begun, measured = said["warm_up_tokens"], 2 * 3
    trace = sticky_trace(begun + measured, LAYERS, EXPERTS, TOP_K)
    missed = replay(from_trace(trace), "lru", slots=said["slots"]).missed[-measured * LAYERS * TOP_K :]
    assert said["hit_rate"] == pytest.approx(1 - missed.mean()) and 0 < said["hit_rate"] < 1
    assert said["misses"] == pytest.approx(missed.sum() / measured)


def test_decode_with_all_cached_reads_nothing(store):
    found = decode(store, cached=1.0)
    assert found["pull_hit_rate"] == 1 and found["pull_reads"] == 0
    assert found["rows"][0]["settings"]["disk_ms"] == 0


def test_decode_of_one_case_compares_no_bits(store):
    found = decode(store, own=True)
    assert found["same_bits"] is None and found["compared_tokens"] == 0


@pytest.mark.parametrize(
    ("rates", "steady"), [((0.1, 0.9, 0.1, 0.9, 0.1, 0.5), False), ((0.1, 0.9, 0.2, 0.5, 0.5, 0.4), True)]
)
def test_a_warm_up_that_settles_in_its_last_segment_is_steady(store, monkeypatch, rates, steady):
    told = iter(rates)
    monkeypatch.setattr(bench_card_decode, "_hit_rate", lambda before, after: next(told, 0.5))
    said = decode(store, own=True)["rows"][0]["settings"]
    assert said["warm_up_tokens"] == bench_card_decode.LONGEST_WARM_UP == 12 and said["steady"] is steady


def test_decode_follows_the_models_own_routers(store):
    found = decode(store, own=True)
    assert found["routing"] == "the model's own" and found["rows"][0]["settings"]["routing"] == "the model's own"


def test_a_trial_is_measured_beside_none(store):
    found = decode(store, cached=0.5, transfers=("rows",), trials=[{"shared_first": True}, {"kept_gib": 0.0001}])
    names = [row["name"] for row in found["rows"][:3]]
    assert names == ["twin_decode.rows", "twin_decode.rows_shared_first", "twin_decode.rows_kept_gib_0_0001"]
    assert found["rows"][1]["settings"]["trials"] == {"shared_first": True} and found["same_bits"]
    assert found["rows_is_faster_than_rows_shared_first"] > 0


def test_a_trial_without_reads_ahead_reads_what_it_misses_and_nothing_else(store):
    trials = [{"prefetch": 0}, {"prefetch": 2, "no_graphs": True}]
    found = decode(store, tokens=8, cached=0.4, prefetch=1, trials=trials)
    rows = {row["name"]: row["settings"] for row in found["rows"] if row["unit"] == "ms/token"}
    ahead, behind, more = (rows[f"twin_decode.pull{of}"] for of in ("", "_prefetch_0", "_prefetch_2_no_graphs"))
    assert [said["prefetch"] for said in (ahead, behind, more)] == [1, 0, 2]
    assert [said["trials"] for said in (ahead, behind, more)] == [{}, {}, {"no_graphs": True}]
    assert behind["needed_reads"] == behind["reads"] == behind["misses"] and behind["wasted"] == 0
    for few, many in (("misses", "needed_reads"), ("needed_reads", "reads")):
        assert 24 * (ahead[many] - ahead[few]) > 0.5, "one block in 24 tokens at least"
    assert ahead["reads"] > ahead["misses"]
    for said in (ahead, behind, more):
        assert said["disk_ms"] == pytest.approx(1e-6 * said["needed_reads"] * store.block_bytes / said["disk_gb_s"])
    assert found["same_bits"] and found["pull_is_faster_than_pull_prefetch_0"] > 0


def test_copies_on_a_guess_that_nobody_asked_for_raise_no_floor(store):
    found = decode(store, tokens=8, cached=0.5, transfers=("rows",), trials=[{"speculate": 2}])
    plain, said = (found["rows"][place]["settings"] for place in (0, 1))
    each = count_crossing(WIDTH, WIDTH, said["active"] * WIDTH, said["active_groups"] * WIDTH / 16)["rows"]
    assert said["needed_copied"] <= LAYERS * TOP_K * each.copied == plain["needed_copied"]
    assert 0 < said["needed_copied"] < said["bytes_copied"]
    bus_ms = 1e-6 * (said["needed_copied"] / said["copy_gb_s"] + said["bytes_in_place"] / said["in_place_gb_s"])
    assert said["bus_ms"] == pytest.approx(bus_ms)


def test_each_case_is_told_as_many_guesses_as_it_makes(store, monkeypatch):
    told, force = {}, Engine.force_routing

    def watch(engine, chosen, guesses=None):
        told.setdefault((engine.prefetch, engine._model._parts.segments.wanted), []).append(guesses)
        return force(engine, chosen, guesses)

    monkeypatch.setattr(Engine, "force_routing", watch)
    decode(store, cached=0.5, prefetch=1, trials=[{"prefetch": 0}, {"prefetch": 2, "no_graphs": True}])
    assert sorted(told) == [(0, True), (1, True), (2, False)]
    assert all(guesses is None for guesses in told[0, True])
    for few, many in zip(told[1, True], told[2, False], strict=False):
        assert few.shape == (LAYERS, 1) and many.shape == (LAYERS, 2)
        assert np.array_equal(few, many[:, :1]), "the same guesses, as far as both make them"


def test_a_trial_that_cannot_be_is_refused_before_anything_is_measured(store, monkeypatch):
    monkeypatch.setattr(bench_card_decode, "open_bus", lambda card: pytest.fail("measured"))
    for trial, words in (({"kept_gib": 1.0}, "kept_gib is for transfers"), ({"prefetch": 9}, "prefetch is 9")):
        with pytest.raises(EngineError, match=words):
            decode(store, trials=[trial])


def test_trials_are_read_from_words():
    from nemolab.commands.bench_card import parse_trial

    assert parse_trial("shared_first=1,kept_gib=0.5") == {"shared_first": True, "kept_gib": 0.5}
    assert parse_trial("speculate=4") == {"speculate": 4} and parse_trial("prompt_enters=0") == {"prompt_enters": False}
    assert parse_trial("prefetch=0,no_graphs=1") == {"prefetch": 0, "no_graphs": True}
    for word in ("speed=9", "speculate=many", "speculate", "no_graphs=yes"):
        with pytest.raises(
            UsageError, match=f"--trial {word}: one of shared_first, prompt_enters, kept_gib, speculate"
        ):
            parse_trial(word)


def test_rows_of_twins_are_never_called_a_cards(store):
    for found in (decode(store, own=True), bench_card_prefill(store.path, device="twin", tokens=5, repeats=3)):
        assert all(row["name"].startswith("twin_") for row in found["rows"])
        assert all("twins" in row["settings"]["device"] for row in found["rows"])


def test_strategies_with_other_logits_are_refused(store, monkeypatch):
    warm_up = bench_card_decode._Run.warm_up

    def differ(run):
        warm_up(run)
        run.bits += run.name

    monkeypatch.setattr(bench_card_decode._Run, "warm_up", differ)
    with pytest.raises(NemolabError, match="pull, whole: not all give the same logits"):
        decode(store, transfers=("pull", "whole"), own=True)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"transfers": ()}, "transfer nothing"),
        ({"transfers": ("pull", "push")}, "pull, push: one or more of whole, grouped, rows, pull"),
        ({"cached": 0.0}, "0.0 of the experts cached"),
        ({"repeats": 2}, "2 samples"),
        ({"own": True, "trace": "x"}, "not both"),
    ],
)
def test_decode_refuses_what_cannot_be(store, settings, words):
    with pytest.raises(UsageError, match=words):
        decode(store, **settings)


def test_a_trace_is_followed_with_its_guesses_a_layer_early(store, tmp_path):
    from nemolab.trace import write_trace
    from nemolab.trace.synthetic import iid_trace

    trace = iid_trace(6, LAYERS, EXPERTS, TOP_K)
    write_trace(tmp_path / "plain.trace", trace)
    drawn = forced_routing.recorded_routing(tmp_path / "plain.trace", store, 1)
    assert np.array_equal(drawn.experts, trace.experts) and "drawn" in drawn.name
    for guesses in forced_routing.sticky_routing(40, store, 2).guesses.reshape(-1, 2).tolist():
        assert len(set(guesses)) == 2 and 0 <= min(guesses) <= max(guesses) < EXPERTS
    guesses = trace.experts[:, :, ::-1].copy()
    guesses[:, 0] = -1
    write_trace(tmp_path / "guessed.trace", replace(trace, guesses=guesses))
    told = forced_routing.recorded_routing(tmp_path / "guessed.trace", store, 1)
    assert np.array_equal(told.guesses[:, :-1, 0], trace.experts[:, 1:, 1]) and "drawn" not in told.name
    write_trace(tmp_path / "other.trace", iid_trace(6, LAYERS + 1, EXPERTS, TOP_K))
    with pytest.raises(TraceError, match="4 MoE layers, top 2 of 8 experts; this model has 3 layers"):
        forced_routing.recorded_routing(tmp_path / "other.trace", store, 1)


def test_the_walk_past_every_expert_misses_none(store):
    walk = forced_routing.every_expert_once(store, 1)
    assert walk.experts.shape[1:] == (LAYERS, TOP_K) and walk.guesses.shape[1:] == (LAYERS, 1)
    assert all(set(walk.experts[:, layer].ravel()) == set(range(EXPERTS)) for layer in range(LAYERS))
    assert all(len(set(chosen)) == TOP_K for chosen in walk.experts[:, 0].tolist())


def test_prefill_counts_experts_that_cross_and_those_needed(store, tmp_path):
    found = bench_card_prefill(store.path, device="twin", tokens=7, repeats=3)
    rows = {row["name"].partition(".")[2]: row for row in found["rows"]}
    cached, disk = rows["cached"]["settings"], rows["disk"]["settings"]
    assert 0 < found["needed"] <= LAYERS * min(EXPERTS, 7 * TOP_K)
    assert found["cached_crossed_once"] and found["disk_crossed_once"]
    assert cached["bytes_read"] == 0 and "disk_read_ms" not in cached
    assert disk["misses"] == found["needed"] and disk["bytes_read"] == found["needed"] * store.block_bytes
    assert found["cached_crossed"] == found["disk_crossed"] == found["needed"]
    needed_bytes = found["needed"] * WIDTH * WIDTH * 9 // 8
    for name, said in (("cached", cached), ("disk", disk)):
        assert said["needed_bytes"] == said["crossed_bytes"] == needed_bytes
        assert said["copy_ms"] == found["copy_ms"] == pytest.approx(1e-6 * needed_bytes / said["copy_gb_s"])
        assert said["floor_ms"] == max(said["copy_ms"], said["torch_ms"]) == said[f"{said['floor_is']}_ms"]
        assert found[f"{name}_of_floor"] == found[f"{name}_ms"] / said["floor_ms"]
    assert disk["disk_read_ms"] == pytest.approx(1e-6 * disk["bytes_read"] / disk["disk_gb_s"])
    assert disk["disk_of_read"] == found["disk_of_read"] == found["disk_ms"] / disk["disk_read_ms"]
    assert record(**rows["cached"], folder=tmp_path)["unit"] == "ms"
    assert len(bench_card_prefill(store.path, device="twin", tokens=7, repeats=3, from_disk=False)["rows"]) == 3
    with pytest.raises(UsageError, match="no bus to cross"):
        bench_card_prefill(store.path, device="cpu")


def test_a_block_that_is_copied_twice_is_counted_twice_and_raises_no_floor(store, monkeypatch):
    from nemolab.engine.gpu.prompt_experts import PromptExperts

    copy = PromptExperts._copy
    monkeypatch.setattr(PromptExperts, "_copy", lambda prompts, rows: (copy(prompts, rows), copy(prompts, rows))[1])
    found = bench_card_prefill(store.path, device="twin", tokens=7, repeats=3, from_disk=False)
    assert found["cached_crossed"] == 2 * found["needed"] and not found["cached_crossed_once"]
    said, needed_bytes = found["rows"][0]["settings"], found["needed"] * store.payload_bytes
    assert said["crossed_bytes"] == 2 * needed_bytes and said["needed_bytes"] == needed_bytes
    assert found["copy_ms"] == pytest.approx(1e-6 * needed_bytes / found["copy_gb_s"])


def test_a_rewound_conversation_gives_what_a_new_one_gives(store):
    with Engine(None, store=store, device="twin") as engine:
        state, ids = engine.new_state(), list(range(9))
        first = engine.last_logits(ids, state)
        assert not torch.equal(engine.last_logits(ids, state), first)
        rewind(state)
        assert torch.equal(engine.last_logits(ids, state), first) and state.tokens == 9


def test_torch_multiplies_the_matrices_that_the_engine_does(store):
    shapes = dense_shapes(store)
    config, named = store.config, sum(dense_shapes(store).values())
    mamba, attention, moe = 2, 4, 1 + 2 + 2  # in and out; q, k, v, o; router, latent down and up, shared up and down
    assert named == mamba + attention + LAYERS * moe
    assert shapes[EXPERTS, config.hidden_size] == LAYERS, "routers"


def test_every_expert_with_tokens_is_multiplied_twice(store, monkeypatch):
    seen = []
    multiply = torch.mm

    def watched(a, b):
        seen.append((a.shape[0], b.shape[1]))
        return multiply(a, b)

    monkeypatch.setattr(torch, "mm", watched)
    inter, width = store.expert_shape
    assert len(time_experts(store, [[3, 0, 1], [0, 2, 0]], torch.device("cpu"), 3)) == 3
    assert seen[:4] == [(3, inter), (3, width), (1, inter), (1, width)] and len(seen) == 3 * 6


def test_the_command_shows_a_line_for_each_case(store):
    words = ("decode", store.path, "--device", "twin", "--tokens", 2, "--repeats", 3, "--prefetch", 1, "--vram", "4GiB")
    code, out, err = run_cli("bench", *words, "--cached", 0.5, "--transfer", "rows", "--trial", "shared_first=1")
    assert code == 0, err
    headers, plain, tried = out.splitlines()[:3]
    assert headers.split()[:2] == ["case", "ms/token"] and "x floor" in headers
    assert plain.startswith("rows ") and tried.startswith("rows_shared_first ")


def test_the_command_refuses_on_the_cpu_what_is_for_cards():
    code, _, err = run_cli("bench", "decode", "--cached", 0.5, "--own-routing", "--trial", "speculate=4")
    assert code == 2 and "--cached, --own-routing, --trial: for an engine on a card; add --device cuda" in err
