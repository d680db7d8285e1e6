"""`nemolab simulate`: toy traces with known answers, and what it says beside a rate."""

import json

import numpy as np
import pytest
from simulate_cli import ask, call, refuse, rows_of
from toy_traces import KNOWN, draw_trace, make_trace

from nemolab.simulate import POLICY_NAMES, from_trace, replay, sweep
from nemolab.units import Budget

ROW_KEYS = (
    "policy phase budget_bytes slots prefetch lookups hits misses hit_rate reads_per_token bytes_per_token compulsory "
    "prefetch_useful prefetch_wasted prefetch_late"
).split()
GAP_PARTS = ("lru_hit_rate", "policy_share", "size_share", "compulsory_share")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


# --- known answers


def test_the_known_trace_has_its_known_misses():
    data = ask(make_trace(KNOWN), "--budget", "2slots", "--policy", "lru,belady,belady-bypass")
    found = {row["policy"]: (row["misses"], row["compulsory"]) for row in rows_of(data)}
    assert found == {"lru": (9, 4), "belady": (7, 4), "belady-bypass": (5, 4)}
    assert any("insert every miss" in note and "may let a miss pass by" in note for note in data["notes"])


@pytest.mark.parametrize("slots, misses", [(0, 9), (1, 9), (100, 4)])
def test_caches_of_nothing_of_one_and_without_end(slots, misses):
    data = ask(make_trace(KNOWN), "--budget", f"{slots}slots", "--policy", "all")
    assert [row["policy"] for row in rows_of(data)] == list(POLICY_NAMES)
    for row in rows_of(data):
        if slots == 1 and row["policy"] in ("static", "belady-bypass"):  # these two may keep A and let the rest pass
            assert row["misses"] == 1 + 6
            continue
        assert (row["misses"], row["hits"], row["compulsory"]) == (misses, 9 - misses, 4), row["policy"]
        assert row["hit_rate"] == (9 - misses) / 9 and row["reads_per_token"] == misses / 9


def test_a_cycle_one_too_long_never_hits_an_lru():
    data = ask(make_trace([*range(6)] * 20), "--budget", "5slots,6slots", "--curve")
    assert [row["misses"] for row in rows_of(data, policy="lru")] == [120, 6]
    assert data["curve"] == [{"budget_bytes": None, "slots": 6, "hit_rate": 114 / 120}]
    assert data["curve_phase"] == "decode" and data["curve_cold"] is False
    assert [row["misses"] for row in rows_of(data, policy="belady")][0] < 6 + 19 * 2


def test_where_all_are_distinct_nothing_ever_hits():
    data = ask(make_trace(np.arange(40)), "--budget", "1slots,40slots", "--policy", "all", "--curve")
    assert {row["misses"] for row in rows_of(data)} == {40} and data["curve"] == []
    assert "nothing is looked up twice" in call(make_trace(np.arange(40)))[1]


def test_duplicates_in_a_batch_are_one_lookup():
    prompt = make_trace([[[0, 1]], [[1, 2]], [[2, 1]], [[1, 2]]], phase=[0, 0, 0, 1], step=[0, 0, 0, 1])
    data = ask(prompt, "--budget", "4slots")
    assert [row["lookups"] for row in data["rows"] if row["policy"] == "lru"] == [3, 2, 5]
    warm = ask(prompt, "--budget", "4slots", "--prefill-warms")
    assert [rows_of(found, policy="lru")[0]["hits"] for found in (data, warm)] == [0, 2]


def test_two_block_sizes_share_a_budget_of_bytes_but_not_of_slots():
    # Layer 0 has blocks of 3000 bytes, layer 1 of 1000; both alternate between two experts.
    two = make_trace([[[0], [0]], [[1], [1]]] * 8, 2, meta={"block_bytes": (3000, 1000)})
    data = ask(two, "--budget", "7999B,8000B,3slots,4slots", "--policy", "lru", "--curve")
    assert [row["misses"] for row in rows_of(data)] == [32, 4, 32, 4]
    assert [(row["budget_bytes"], row["slots"]) for row in rows_of(data)] == [
        (7999, None), (8000, None), (None, 3), (None, 4),
    ]  # fmt: skip
    assert data["curve"] == [{"budget_bytes": 8000, "slots": None, "hit_rate": 28 / 32}]
    assert rows_of(data)[0]["bytes_per_token"] == 4000 and any("differ in size" in note for note in data["notes"])


def test_a_prompt_alone_hits_nothing_and_says_why():
    prompt = make_trace([[[0, 1]], [[0, 1]]], phase=[0, 0], step=[0, 1])
    data = ask(prompt, "--budget", "4slots", "--curve", "--measures")
    assert [row["hit_rate"] for row in data["rows"] if row["policy"] == "lru"] == [0.0, None, 0.0]
    assert data["curve_phase"] == "all" and data["curve"] == [] and data["measures"]["phase"] == "prefill"
    assert any("nothing ever enters the cache" in note for note in data["notes"])
    assert call(prompt)[0] == 0


# --- rows, curve, measures


def test_rows_have_the_promised_keys_three_phases_and_the_numbers_of_replay():
    trace = draw_trace()
    data = ask(trace, "--budget", "20KiB,9slots", "--policy", "lru,lfu", "--prefetch", "0,3")
    assert len(data["rows"]) == 2 * 2 * 2 * 3
    assert [row["phase"] for row in data["rows"][:3]] == ["prefill", "decode", "all"]
    for row in data["rows"]:
        assert set(ROW_KEYS) <= set(row) and row["hits"] + row["misses"] == row["lookups"]
        assert row["prefetch_late"] == (0 if row["prefetch"] == 0 else None)
    lookups = from_trace(trace)
    expected = replay(lookups, "lfu", slots=9, prefetch=3).rows()
    assert [row for row in data["rows"] if (row["policy"], row["slots"], row["prefetch"]) == ("lfu", 9, 3)] == expected
    assert data["rows"] == sweep(lookups, [Budget(size_bytes=20480), Budget(slots=9)], ["lru", "lfu"], [0, 3])


def test_late_reads_are_counted_where_told_how_many_are_not():
    data = ask(draw_trace(), "--budget", "30slots", "--policy", "lru", "--prefetch", "3", "--reads-in-time", "0")
    (row,) = rows_of(data, "all")
    assert 0 < row["prefetch_late"] < row["prefetch_useful"], "one that is used only later had the time"


def test_cold_and_carried_are_told_apart_in_words_and_numbers():
    carried, cold = (ask(draw_trace(), "--budget", "30slots", *words) for words in ((), ("--cold",)))
    assert rows_of(carried)[0]["misses"] < rows_of(cold)[0]["misses"]
    assert (rows_of(carried)[0]["cold"], rows_of(cold)[0]["cold"]) == (False, True)
    assert any(note.startswith("carried: 2 conversations") for note in carried["notes"])
    assert any(note.startswith("cold: ") for note in cold["notes"]) and cold["curve_cold"] is True


@pytest.mark.parametrize("words", [(), ("--cold",), ("--prefill-warms",)])
def test_the_curve_is_that_of_the_rows_at_every_size(words):
    data = ask(draw_trace(), "--budget", "1slots", "--curve", *words)
    sizes = [point["slots"] for point in data["curve"]]
    budgets = ",".join(f"{size}slots" for size in sizes)
    rows = rows_of(ask(draw_trace(), "--budget", budgets, "--policy", "lru", *words))
    assert len(sizes) > 10
    assert [point["hit_rate"] for point in data["curve"]] == [row["hit_rate"] for row in rows]
    assert all(point["budget_bytes"] == 4096 * point["slots"] for point in data["curve"])


def test_measures_come_with_their_controls():
    data = ask(draw_trace(n_tokens=400, n_layers=4), "--measures")["measures"]
    assert data["tokens"] == 390 and len(data["entropy_bits"]) == 4 and data["entropy_bits_even"] == np.log2(12)
    assert set(data["guesses"]) == {"1", "2", "3"}
    for guesses in data["guesses"].values():
        assert len(guesses["right"]) == 4 and guesses["perfect"] == [1.0, 1.0]
        assert max(abs(right - 2 / 12) for right in guesses["shuffled"]) < 0.08
        assert guesses["right"][1] > guesses["shuffled"][1] + 0.2
    reuse = data["reuse_distance"]
    assert sum(reuse["counts"]) + reuse["never"] == data["lookups"] == 390 * 4 * 2
    assert data["compulsory_share"] == reuse["never"] / data["lookups"]
    assert 0.25 < data["hottest_quarter_share"] < 1 and data["distinct_experts"] == data["experts"] == 48


def test_repetition_is_not_counted_across_a_gap():
    from nemolab.simulate import measure_trace

    joined = make_trace([0, 0, 0, 0])
    gap = make_trace([0, 0, 0, 0], phase=[1, 1, 0, 1])
    assert measure_trace(joined)["repeat_rate"] == 1.0
    assert measure_trace(gap)["repeat_rate"] == 1.0, "one pair: the answer after the prompt does not follow the other"
    assert measure_trace(make_trace([0, 1, 1, 0], phase=[1, 0, 0, 1]))["repeat_rate"] is None


# --- what is said beside a rate


def test_options_that_would_change_the_answer_are_named():
    def options(trace, *words):
        return next((note for note in ask(trace, *words, "--budget", "9slots")["notes"] if note.startswith("--")), None)

    assert options(draw_trace(meta={}), "--prefetch", "2") == (
        "--cold empties the cache at each conversation; --block-bytes N says how large a block is; "
        "--reads-in-time N counts what is late"
    )
    assert options(draw_trace(), "--cold", "--prefetch", "2", "--reads-in-time", "1") is None


def test_notes_come_first_and_say_phase_start_and_sizes():
    code, out, _ = call(draw_trace(meta={}), "--budget", "4slots,5slots,9slots,99slots")
    notes = [line for line in out.splitlines() if line.startswith("note: ")]
    assert code == 0 and out.index("note: ") < out.index("policy  ")
    for word in (
        "carried: 2 conversations",
        "leave nothing behind (prefill aside)",
        "does not say how large its blocks are",
        "4 slots: 4 blocks are less than one token's cycle: an LRU hits nothing in steady decode up to 4 blocks "
        "((layers - 1) x top 2)",
        "5 slots: on the cliff",
        "99 slots: holds all 36 blocks",
    ):
        assert any(word in note for note in notes), word
    assert not any(note.startswith("note: 9 slots") for note in notes)


def test_a_budget_below_a_batch_and_beyond_this_machine_are_replayed_with_a_warning():
    data = ask(draw_trace(), "--budget", "1slots,900TiB", "--policy", "lru")
    assert len(rows_of(data)) == 2
    assert any("an engine refuses such a cache" in note for note in data["notes"])
    assert any("900.00 TiB: more than this machine's memory" in note for note in data["notes"])


def test_synthetic_traces_are_labelled():
    trace = draw_trace(meta={"taken": {"kind": "iid"}})
    data = ask(trace)
    assert data["trace"]["synthetic"] is True
    assert any(note.startswith("synthetic trace (iid)") for note in data["notes"])
    assert "synthetic trace (iid)" in call(trace)[1]
    assert ask(draw_trace())["trace"]["synthetic"] is False


def test_without_a_budget_shares_of_all_blocks_are_taken_and_said():
    data = ask(draw_trace())
    assert data["notes"][0].startswith("no --budget was given: 5%, 10%, 25%, 50%, 100% of all blocks")
    assert [row["slots"] for row in rows_of(data, policy="lru")] == [1, 3, 9, 18, 36]
    assert {row["policy"] for row in data["rows"]} == {"lru", "belady"}
    assert [row["slots"] for row in rows_of(ask(draw_trace(meta={})), policy="lru")] == [2, 4, 9, 18, 36]


def test_advice_names_cliff_knee_and_what_a_better_policy_could_gain():
    data = ask(draw_trace(n_tokens=300), "--budget", "12slots", "--policy", "lru,belady")
    advice, (gap,) = data["advice"], data["gaps"]
    assert (advice["floor"]["slots"], advice["floor"]["hit_rate"], advice["cycle"]["slots"]) == (4, 0.0, 6)
    assert advice["end"]["slots"] <= 36 and advice["cycle"]["hit_rate"] > 0
    lru, belady = (rows_of(data, policy=name)[0] for name in ("lru", "belady"))
    assert gap["policy_share"] == belady["hit_rate"] - lru["hit_rate"] > 0
    assert sum(gap[part] for part in GAP_PARTS) == pytest.approx(1)
    out = call(draw_trace(n_tokens=300), "--budget", "12slots")[1]
    assert "cliff: nothing hits up to 4 blocks" in out and "at 12 blocks" in out


def test_a_file_without_phases_or_sizes_is_all_decode_and_takes_slots_or_a_block_size(tmp_path):
    lines = [json.dumps({"tok": n, "layers": [[key]]}) for n, key in enumerate(KNOWN)]
    (tmp_path / "routes.jsonl").write_text("\n".join(lines) + "\n")
    data = ask("routes.jsonl", "--budget", "2slots", "--experts", "4")
    assert [row["lookups"] for row in data["rows"] if row["policy"] == "lru"] == [0, 9, 9]
    assert rows_of(data, "prefill")[0]["hit_rate"] is None and data["trace"]["n_experts"] == 4
    assert rows_of(data)[0]["bytes_per_token"] is None
    code = refuse(call("routes.jsonl", "--budget", "1MiB,2slots,2GiB"), "1.00 MiB, 2.00 GiB", "budgets in slots")
    assert code == 1
    sized = ask("routes.jsonl", "--budget", "2KiB", "--block-bytes", "1024")
    assert (rows_of(sized)[0]["slots"], rows_of(sized)[0]["misses"], rows_of(sized)[0]["bytes_per_token"]) == (
        2,
        9,
        1024,
    )
