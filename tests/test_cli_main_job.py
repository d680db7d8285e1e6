"""The main job by command on the shipped model: repack, verify, chat, compare, with the keys that scripts rely on."""

import json
import math
import shutil
from datetime import UTC, datetime

import pytest
from faults import run_cli

from nemolab.commands.compare import RECORDED, RECORDED_OF_CARDS, record_comparison


@pytest.fixture
def call(tmp_path, monkeypatch):
    """Run a command line from an unrelated folder: (exit code, the JSON on stdout or None, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*words):
        code, out, err = run_cli(*words, "--json")
        return code, json.loads(out) if out else None, err

    return run


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A store of the shipped model, made by command."""
    folder = tmp_path_factory.mktemp("job") / "store"
    assert run_cli("repack", "--to", folder)[0] == 0
    return folder


@pytest.mark.parametrize("layout", ["neuron", "source"])
def test_repack_and_verify_against_the_source(call, tmp_path, tiny_path, layout):
    code, done, _ = call("repack", tiny_path, "--to", tmp_path / "store", "--layout", layout)
    assert code == 0
    assert {"blocks", "block_bytes", "bytes_written", "seconds", "direct_io"} <= set(done)
    plan = call("plan")[1]
    assert done["blocks"] == plan["moe_layers"] * plan["experts"]
    assert done["block_bytes"] % 4096 == 0 and 0 <= done["block_bytes"] - plan["expert_bytes"] < 4096
    assert (tmp_path / "store" / "experts.bin").stat().st_size == done["blocks"] * done["block_bytes"]
    code, found, err = call("verify", tmp_path / "store", "--source", tiny_path, "--all")
    assert code == 0 and not err and found["checked"] == done["blocks"] and found["mismatches"] == 0


def test_verify_without_a_source_uses_the_checksums(call, store):
    code, found, _ = call("verify", store)
    assert code == 0 and found["checked"] > 0 and found["mismatches"] == 0


def test_a_flipped_bit_is_code_1_and_said(call, store, tmp_path, tiny_path):
    damaged = tmp_path / "damaged"
    shutil.copytree(store, damaged)
    with open(damaged / "experts.bin", "r+b") as file:
        file.seek(5)
        byte = file.read(1)[0]
        file.seek(5)
        file.write(bytes([byte ^ 16]))
    for words in ([], ["--source", tiny_path, "--all"]):
        code, found, err = call("verify", damaged, *words)
        assert code == 1 and found["mismatches"] == 1
        assert err.startswith("nemolab: ") and err.count("\n") == 1 and "1 difference" in err


def test_chat_answers_the_same_with_little_room(call, store, tiny_path):
    ask = ["chat", tiny_path, "--prompt", "What is TCP?", "--max-tokens", "12", "--store", store]
    code, roomy, _ = call(*ask)
    assert code == 0
    assert {"text", "reasoning", "prompt_tokens", "completion_tokens", "stats"} <= set(roomy)
    assert roomy["text"] and "<|" not in roomy["text"] and roomy["completion_tokens"] <= 12
    config = call("plan")[1]
    cramped = call(*ask, "--ram-cache", f"{config['top_k']}slots")[1]
    assert cramped["text"] == roomy["text"]
    assert cramped["stats"]["decode"]["hits"] < roomy["stats"]["decode"]["hits"]
    for counts in cramped["stats"].values():
        assert counts["hits"] + counts["misses"] == counts["lookups"]


def test_chat_refuses_a_cache_smaller_than_one_layer_of_a_token(call, store):
    code, out, err = call("chat", "--prompt", "x", "--store", store, "--ram-cache", "1slots")
    assert code == 1 and out is None and err.startswith("nemolab: ") and err.count("\n") == 1


def test_compare_gives_the_figures_that_scripts_rely_on(call, store, tmp_path):
    (tmp_path / "short.txt").write_text("TCP delivers every byte in order, and UDP sends each packet on its own.")
    code, found, err = call("compare", "--store", store, "--texts", tmp_path / "short.txt")
    assert code == 0 and not err
    (text,) = found["texts"]
    assert set(
        "name tokens ppl_engine ppl_reference kl_mean kl_max kl_mean_decode greedy_match greedy_of".split()
    ) <= set(text)
    assert text["name"] == "short" and text["kl_mean"] <= 1e-6 and text["kl_mean_decode"] <= 1e-6
    assert len(found["controls"]) >= 3 and found["deterministic"] is True
    for control in found["controls"]:
        assert {"name", "ppl", "failed_as_it_must"} <= set(control) and control["failed_as_it_must"] is True


def record_one(monkeypatch, device: str, figures) -> list[tuple]:
    """The rows of a comparison of one text, whose control has an infinite perplexity."""
    rows = []
    monkeypatch.setattr(
        "nemolab.measure.record_run", lambda found, began: rows.extend(tuple(row.values()) for row in found)
    )
    text = dict.fromkeys(figures, 0.5) | {"name": "short", "tokens": 9, "greedy_of": 64}
    control = {"name": "swapped nibbles", "ppl": math.inf, "kl_mean_least": 3.0}
    repeats = {"prompt_tokens": 8, "steps": 2, "logits_sha256": {"first": "a", "again": "a", "another process": "b"}}
    shared = {"model": "m", "threads": 2, "device": device, "store_layout": "neuron"}
    shared["vram_gib"] = None if device == "cpu" else 8.0
    record_comparison(shared | {"texts": [text], "controls": [control], "determinism": repeats}, datetime.now(UTC))
    return rows


def test_recorded_comparisons_keep_what_is_finite(monkeypatch, capsys):
    """A broken model may have an infinite perplexity: that costs its own row, not those of the others."""
    *texts, control, repeats = record_one(monkeypatch, "cpu", RECORDED)
    shared = {"model": "m", "threads": 2, "layout": "neuron"}
    least = shared | {"control": "swapped nibbles"}
    assert control == ("compare.control_kl_mean_least", [3.0], "nats", least)
    assert [row[0] for row in texts] == [f"compare.{name}" for name in RECORDED]
    assert "compare.control_ppl is inf" in capsys.readouterr().err
    runs = {"runs": ["first", "again", "another process"], "prompt_tokens": 8, "steps": 2}
    assert repeats == ("compare.distinct_repeats", [2], "hashes of logits", shared | runs)


def test_recorded_comparisons_of_cards_say_so_and_hold_the_cpu_beside(monkeypatch):
    rows = record_one(monkeypatch, "cuda", RECORDED | RECORDED_OF_CARDS)
    assert all((row[3]["device"], row[3]["vram_gib"]) == ("cuda", 8.0) for row in rows)
    assert [row[0] for row in rows[:-2]] == [f"compare.{name}" for name in RECORDED | RECORDED_OF_CARDS]


def test_twins_leave_no_rows(call):
    for command in (["compare", "--device", "twin"], ["bench", "prefill", "--device", "twin"]):
        code, _, err = call(*command, "--record")
        assert code == 2 and "are no card" in err
