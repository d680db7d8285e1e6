"""`nemolab bench turns`: what both sides are fed, what is counted, and how they are compared. No timing is judged."""

from collections import Counter
from itertools import islice
from types import SimpleNamespace

import pytest
from faults import run_cli
from synthetic import write_checkpoint

from nemolab.engine import Engine
from nemolab.engine.chat import Tokenizer
from nemolab.errors import NemolabError, UsageError
from nemolab.measure import bench_turns as module
from nemolab.measure import record
from nemolab.measure.bench_turns import SIDES, bench_turns, draw_ids, open_ids
from nemolab.store import Store, ensure_store

LAYERS, EXPERTS, TOP_K = 3, 8, 2
PROMPT, TOKENS = 6, 3


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Store:
    path = tmp_path_factory.mktemp("turns") / "model"
    write_checkpoint(path, pattern="ME*EE", hidden=32, latent=32, inter=32, experts=EXPERTS, top_k=TOP_K)
    return Store.open(ensure_store(path))


def bench(store, device="cpu", **settings):
    asked = {"prompt_tokens": PROMPT, "tokens": TOKENS, "cached": 0.5, "prefetch": 0} | settings
    return bench_turns(store.path, device=device, **asked)


@pytest.fixture
def fed(monkeypatch):
    """By whether prompts enter: (tokens before, ids) of each prompt; with "order", who was fed in which order."""
    seen, real = {True: [], False: [], "order": []}, Engine.last_logits

    def watch(engine, ids, state):
        enters = engine._cache.prompt_enters
        seen[enters].append((state.tokens, list(ids)))
        seen["order"].append(enters)
        return real(engine, ids, state)

    monkeypatch.setattr(Engine, "last_logits", watch)
    return seen


@pytest.mark.parametrize("device", ["cpu", "twin"])
def test_both_sides_are_measured_on_the_same_turns(store, fed, tmp_path, device):
    found = bench(store, device, turns=2, repeats=2)
    kind = {"cpu": "turns", "twin": "twin_turns"}[device]
    names = [f"{kind}.{side}_{phase}" for side in SIDES for phase in ("prompt", "token")]
    assert [row["name"] for row in found["rows"]] == [*names, f"{kind}.prompt_of_passes", f"{kind}.token_of_passes"]
    for row in found["rows"]:
        said = row["settings"]
        assert len(row["values"]) == 4 and record(**row, folder=tmp_path)["unit"] == row["unit"]
        assert said["transfer"] == ("pull" if device == "twin" else None) and said["ids"] == found["ids"]
        if row["unit"] != "ratio":
            assert said["bytes_read"] == said["reads"] * store.block_bytes > 0
            assert said["prompt_enters"] == ("enters" in row["name"])
    assert found["same_bits"] and found["rows"][0]["settings"]["in_turns"]
    assert fed[True] == fed[False] and len(fed[True]) == 1 + 4
    assert [tokens for tokens, _ in fed[True]] == [0, 0, PROMPT + TOKENS, 0, PROMPT + TOKENS], "it goes on in a turn"
    assert fed["order"] == [False, True, False, True, True, False, False, True, True, False]


def test_hits_and_reads_are_those_of_the_turns_that_count(store):
    """Against an engine fed by hand, which counts from its second turn on."""
    found = bench(store)
    for side in SIDES:
        stream, _ = open_ids(Tokenizer(store.small_file), store, store.config.vocab_size)
        from nemolab.engine import Trials

        with Engine(None, store=store, ram_cache_slots=12, trials=Trials(prompt_enters=side == "enters")) as engine:
            state, counts = engine.new_state(), []
            for turn in range(4):
                ids = list(islice(stream, PROMPT + TOKENS))
                state = engine.new_state() if turn == 1 else state
                engine.last_logits(ids[:PROMPT], state)
                for token in ids[PROMPT:]:
                    engine.step(token, state)
                if turn in (0, 3):
                    counts.append(engine.stats())
        for name, phase, parts in (("prompt", "prefill", 3), ("token", "decode", 3 * TOKENS)):
            new = {of: counts[1][phase][of] - counts[0][phase][of] for of in ("hits", "lookups", "reads")}
            assert found[f"{side}_{name}_hit_rate"] == pytest.approx(new["hits"] / new["lookups"])
            assert found[f"{side}_{name}_reads"] == pytest.approx(new["reads"] / parts)


def test_where_all_fits_prompts_that_enter_leave_less_to_read(store):
    found = bench(store, cached=1.0, prompt_tokens=30)
    assert found["enters_prompt_hit_rate"] > found["passes_prompt_hit_rate"]
    assert found["enters_token_reads"] <= found["passes_token_reads"]


def test_engines_that_do_not_fit_together_follow_one_another(store, fed, monkeypatch):
    together = bench(store, turns=1, repeats=3)
    fed["order"].clear()
    monkeypatch.setattr(module, "fit_together", lambda *arguments, **settings: False)
    apart = bench(store, turns=1, repeats=3)
    assert not apart["rows"][0]["settings"]["in_turns"] and apart["same_bits"]
    assert fed["order"] == [False, False, True, True, True, True, False, False, False, False, True, True]
    assert len(apart["rows"][0]["values"]) == 3 and apart["ids"] == together["ids"]


def test_a_limit_on_the_cards_memory_is_one_engines(store):
    assert not bench(store, "twin", vram_gib=4)["rows"][0]["settings"]["in_turns"]


def test_sides_with_other_logits_are_refused(store, monkeypatch):
    real = module._Side.take_turn

    def differ(side, *arguments, **settings):
        real(side, *arguments, **settings)
        side.bits[-1] += side.name

    monkeypatch.setattr(module._Side, "take_turn", differ)
    with pytest.raises(NemolabError, match="that enters the cache gives other logits than one that passes it by"):
        bench(store)


def test_ratios_are_of_the_trial_over_the_rule():
    sides = []
    for name, prompt, token in (("passes", [10, 20, 30], [4, 4, 4]), ("enters", [20, 30, 60], [2, 5, 4])):
        side = module._Side(name, PROMPT, {})
        side.samples = {"prompt": prompt, "token": token}
        side.counts = {phase: [{"hits": 1, "lookups": 4, "reads": 6, "bytes_read": 12}] * 3 for phase in side.samples}
        sides.append(side)
    found = module._answer("turns", sides, {"tokens": 2, "ids": "some"})
    assert (found["prompt_of_passes"], found["prompt_verdict"]) == (1.5, "slower")
    assert (found["prompt_of_passes_low"], found["prompt_of_passes_high"]) == (1.5, 2)
    assert (found["token_of_passes"], found["token_verdict"]) == (1, "no difference")
    assert (found["enters_prompt_least"], found["enters_prompt_ms"], found["enters_prompt_most"]) == (20, 30, 60)
    assert (found["enters_prompt_bytes_read"], found["enters_token_bytes_read"]) == (12, 6)
    assert found["enters_token_hit_rate"] == 0.25


def test_ids_are_of_text_where_the_tokenizer_knows_words(tiny_path, store):
    tiny = Store.open(ensure_store(tiny_path))
    tokenizer = Tokenizer(tiny.small_file)
    stream, source = open_ids(tokenizer, tiny, tiny.config.vocab_size)
    assert source.startswith("text: ") and "TCP" in tokenizer.decode(list(islice(stream, 1500)))
    spelt, drawn = open_ids(SimpleNamespace(encode=lambda text: list(text.encode())), tiny, 100)
    assert drawn.startswith("drawn of 100")
    without = SimpleNamespace(small_file=lambda name: None)
    assert list(islice(open_ids(None, without, 100)[0], 50)) == list(islice(spelt, 50))
    assert open_ids(Tokenizer(store.small_file), store, 90)[1].startswith("drawn of 90")


def test_drawn_ids_come_as_often_as_words():
    often = [count for _, count in Counter(islice(draw_ids(1000), 20_000)).most_common()]
    total = sum(1 / (rank + module.FLATTENED) for rank in range(1, 1001))
    for rank in (1, 10, 100):
        assert often[rank - 1] == pytest.approx(20_000 / (rank + module.FLATTENED) / total, rel=0.25)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"cached": 0.0}, "0.0 of the experts cached"),
        ({"turns": 2}, "2 turns of 6 \\+ 3 tokens, 1 times; 1 of each and 3 turns in all at least"),
        ({"tokens": 0}, "3 turns of 6 \\+ 0 tokens"),
        ({"prompt_tokens": 10**6}, "3 turns of 1000003 tokens, but this model was made for"),
    ],
)
def test_what_cannot_be_is_refused(store, settings, words):
    with pytest.raises(UsageError, match=words):
        bench(store, **settings)


def test_the_command_shows_a_line_for_each_side_and_phase(store):
    code, out, err = run_cli("bench", "turns", store.path, "--prompt-tokens", PROMPT, "--tokens", TOKENS)
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0].split()[:3] == ["side", "phase", "ms"] and "prompts that enter the cache" in err
    firsts = [("passes", "prompt"), ("passes", "token"), ("enters", "prompt"), ("enters", "token")]
    assert [tuple(line.split()[:2]) for line in lines[1:5]] == firsts
    code, _, err = run_cli("bench", "turns", store.path, "--device", "twin", "--record")
    assert code == 2 and "--record with --device twin" in err


@pytest.mark.gpu
def test_turns_on_a_card_give_the_same_bits(tiny_path):
    found = bench_turns(tiny_path, device="cuda", transfer="rows", prompt_tokens=300, tokens=4)
    assert found["same_bits"] and found["ids"].startswith("text: ")
    assert all(row["name"].startswith("card_turns.") for row in found["rows"])
    assert found["enters_prompt_hit_rate"] < found["passes_prompt_hit_rate"], "a prompt pushes out its own first layers"
