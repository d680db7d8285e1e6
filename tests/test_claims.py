"""The claims ledger: complete, honest in form, and its arithmetic recomputed, one test for each claim that has any."""

import json
from dataclasses import replace

import numpy as np
import pytest

from nemolab.errors import NemolabError
from nemolab.measure import latest
from nemolab.measure.transfer import groups_if_independent, read_timed
from nemolab.paths import configs_folder, tiny_folder
from nemolab.plan import check_claims, claims_table, compare_models, plan, read_claims
from nemolab.plan.claims import CLAIM_IDS, COLUMNS, VERDICTS, Claim
from nemolab.sample_trace import find_trace
from nemolab.simulate import check_live, from_trace, measure_trace, measures, replay
from nemolab.trace import read_trace
from nemolab.trace.trace import GUESSES

GIB = 2**30


@pytest.fixture(scope="module")
def large():
    """Nemotron-3-Super, whose routed experts are those of 3.5-Super."""
    return plan(configs_folder() / "nemotron-3-super.json")


@pytest.fixture(scope="module")
def published():
    return compare_models().set_index("model")


@pytest.fixture(scope="module")
def routing():
    """What was measured of the shipped model's experts when it was made, by kind of text."""
    return json.loads((tiny_folder() / "making" / "measurements.json").read_text())["routing"]


@pytest.fixture(scope="module")
def conversations():
    """What the shipped model routed in five conversations."""
    return read_trace(find_trace(model=tiny_folder()))


@pytest.fixture(scope="module")
def decode(conversations):
    """Counts of decode under an LRU: decode(slots, prefetch) -> a row of the replay."""
    lookups = from_trace(conversations)
    return lambda slots, prefetch=0: replay(lookups, "lru", slots=slots, prefetch=prefetch).row("decode")


def a_token(row, prefetch=True) -> str:
    """Reads a token as the ledger writes them: those to wait for, or with those ahead."""
    return f"{row['reads_per_token' if prefetch else 'misses'] / (1 if prefetch else row['tokens']):.2f}"


def percentages(routing, figure) -> list[str]:
    """A figure on mixed text, and the least and the most of the kinds of text, as the ledger writes them."""
    means = {domain: 100 * found["mean"][figure] for domain, found in routing.items()}
    mixed = means.pop("mixed")
    return [f"{mean:.1f}" for mean in (mixed, min(means.values()), max(means.values()))]


def ledger(claim_id, verdict, theirs=""):
    """Our figure as the ledger states it; `theirs` is in the claim where several have the verdict."""
    (found,) = [
        claim
        for claim in read_claims()
        if claim.claim == claim_id and claim.verdict == verdict and theirs in claim.theirs
    ]
    return found.ours


# The ledger's form.


def test_the_ledger_is_complete_and_points_at_things_that_exist(root_path):
    assert check_claims(read_claims(), root_path) == []


def test_every_claim_of_the_articles_is_there():
    assert {claim.claim for claim in read_claims()} == set(CLAIM_IDS)
    assert len(CLAIM_IDS) == 20 + 10


GOOD = Claim("A1", "theirs", "ours", "reproduced", "tests/test_claims.py::test_a1_layers_and_experts")


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"claim": "A21"}, "no such claim"),
        ({"verdict": "confirmed"}, "verdict 'confirmed' is none of"),
        ({"theirs": " "}, "what they claim is not said"),
        ({"ours": ""}, "no figure of ours"),
        ({"where": "tests/test_claims.py::test_nothing"}, "has no 'test_nothing'"),
        ({"where": "tests/test_nothing.py"}, "no file"),
        ({"where": "somewhere"}, "no file"),
        ({"where": "notebooks/99_nothing.ipynb"}, "no file"),
        ({"where": "nemolab plan data/configs/nothing.json"}, "no data/configs/nothing.json"),
        ({"where": "nemolab.plan.nothing"}, "no function"),
        ({"verdict": "open", "where": "later"}, "instead of what it"),
    ],
    ids=str,
)
def test_the_check_can_fail(change, fault, root_path):
    others = [replace(GOOD, claim=claim_id) for claim_id in CLAIM_IDS]
    assert check_claims(others, root_path) == []
    (found,) = check_claims([*others, replace(GOOD, **change)], root_path)
    assert fault in found


def test_a_missing_or_doubled_claim_is_found(root_path):
    assert check_claims([GOOD], root_path)[0] == "A2 is missing"
    assert any("2 times" in fault for fault in check_claims([GOOD, GOOD], root_path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "first line"),
        ("claim,theirs\n", "first line"),
        (",".join(COLUMNS) + "\nA1,one, unquoted,comma,open,needs x\n", "row 2: 6 columns"),
    ],
)
def test_a_broken_file_is_refused(text, message, tmp_path):
    (tmp_path / "claims.csv").write_text(text)
    with pytest.raises(NemolabError, match=message):
        read_claims(tmp_path / "claims.csv")


def test_the_table_shows_every_row_and_counts_the_verdicts():
    claims = [*read_claims(), replace(GOOD, theirs="a|b")]
    lines = claims_table(claims).splitlines()
    for verdict, line in zip(VERDICTS, lines, strict=False):
        assert line.startswith(f"- {sum(claim.verdict == verdict for claim in claims)} **{verdict}**: ")
    head = lines.index("| claim | theirs | ours | verdict | where |")
    assert head == len(VERDICTS) + 1 and len(lines) == head + 2 + len(claims)
    assert r"a\|b" in lines[-1]


# The arithmetic, one test a claim; `where` in the ledger names them.


def test_a1_layers_and_experts(large):
    assert large.layers == {"mamba": 40, "moe": 40, "attention": 8, "mlp": 0}
    assert (large.experts, large.top_k) == (512, 22)
    assert large.expert_params == 2 * 2688 * 1024, "two matrices, so no gate; 1024 wide in a model of 4096"


def test_a2_block_of_756_pages(large):
    assert large.expert_bytes == 3_096_576 == 756 * 4096
    assert round(large.expert_bytes / 1e6, 2) == 3.10
    assert "3,096,576" in ledger("A2", "reproduced")


def test_a3_bytes_per_token(large, published):
    assert large.bytes_per_token == 22 * 40 * 3_096_576
    assert round(large.bytes_per_token / 1e9, 1) == 2.7
    assert round(published.loc["Qwen3.8-Flash-Next", "gb_per_token"], 1) == 1.3
    assert f"{large.bytes_per_token:,}" in ledger("A3", "reproduced")


def test_a3_deepseek_is_gib_not_gb(published):
    row = published.loc["DeepSeek-V4.1-Flash"]
    assert round(row["gib_per_token"], 1) == 4.2
    assert round(row["gb_per_token"], 1) == 4.5
    assert f"{row['bytes_per_token']:,}" in ledger("A3", "contradicted")


def test_a4_routed_total(large):
    assert large.routed_bytes == 59.0625 * GIB
    assert f"{large.routed_bytes:,}" in ledger("A4", "reproduced")


def test_a4_dense_part(large):
    newer = plan(configs_folder() / "nemotron-3.5-super.json")
    for counted, stated in ((newer, ("6.56", "7.56")), (large, ("9.24", "10.24"))):
        without = counted.dense_bytes - counted.parts["embeddings"]
        assert (f"{without / GIB:.2f}", f"{counted.dense_bytes / GIB:.2f}") == stated
        assert all(figure in ledger("A4", "in kind") for figure in stated)
    assert newer.routed_bytes == large.routed_bytes


def test_a6_lru_at_their_share_and_at_their_cycles(conversations, decode, large):
    found = ledger("A6", "in kind")
    blocks, cycle = conversations.n_layers * conversations.meta.n_experts, conversations.n_layers * conversations.top_k
    slots = round(0.24 * blocks)
    assert f"24 % ({slots} blocks) hit {100 * decode(slots)['hit_rate']:.1f} %" in found
    cycles = (14 * GIB // large.expert_bytes) / (large.bytes_per_token / large.expert_bytes)
    assert f"{slots / cycle:.1f} times what a token uses" in found and f"the 120B model {cycles:.1f} times" in found
    slots = int(cycles * cycle)
    assert f"{cycles:.1f} times ({slots} blocks) hit {100 * decode(slots)['hit_rate']:.1f} %" in found


def test_a7_guesses(routing):
    found = ledger("A7", "in kind")
    assert all(figure in found for figure in percentages(routing, "guess_next_layer"))


def test_a7_guesses_while_answering(conversations):
    found = ledger("A7", "in kind")
    told = conversations.select(phase="decode")
    ahead = {name: measures.guess_accuracy(told.experts, getattr(told, name)).right for name in GUESSES.values()}
    control = measures.guess_accuracy(told.experts, measures.shuffle_guesses(told.guesses)).right
    one, two, three = (100 * right[told.top_k - 1] for right in ahead.values())
    assert f"{one:.1f} % while it answers" in found and f"{100 * ahead['guesses'][0]:.1f} % of first guesses" in found
    assert f"two layers ahead {two:.1f} %, three {three:.1f} %" in found
    assert f"of other tokens {100 * control[told.top_k - 1]:.1f} %" in found


def test_a7_reads_by_guesses(decode):
    found = ledger("A7", "open")
    none, four, seven, eight = (decode(92, depth) for depth in (0, 4, 7, 8))
    assert f"of {a_token(none)} reads a token to wait for, 4 guesses leave {a_token(four, False)}" in found
    assert (
        f"read {a_token(four)} in all; 8 leave {a_token(eight, False)}" in found and f"read {a_token(eight)}" in found
    )
    assert eight["misses"] >= seven["misses"], "no fewer than 7 do"


def test_a8_zeros(routing):
    found = ledger("A8", "in kind", "exactly zero")
    assert all(figure in found for figure in percentages(routing, "zeros"))


def test_a8_up_and_groups_of_down(large):
    up_bytes = 2688 * 1024 * 9 // 16
    group_bytes = 16 * 1024 // 2 + 1024  # 16 neurons of 1024 four-bit values, and their scales
    assert up_bytes == (2688 // 16) * group_bytes == large.expert_bytes // 2 == 1_548_288
    assert f"{up_bytes:,}" in ledger("A8", "reproduced")


@pytest.fixture(scope="module")
def step():
    """Recorded MoE steps of the 120B model's shape at the published share of active neurons, by strategy."""
    return read_timed(0.075).set_index("strategy")


def test_a8_groups_against_whole_blocks(step):
    found = ledger("A8", "in kind", "+12 %")
    moved_mb = (step["bytes_copied"] + step["bytes_in_place"]) / 1e6
    assert f"{moved_mb['grouped']:.1f} instead of {moved_mb['whole']:.1f} MB" in found
    assert f"{step['us']['whole'] / step['us']['grouped']:.2f} times faster" in found
    assert all("H200" in row["machine"]["gpu"] for row in step["row"])


def test_a8_groups_in_a_token():
    whole, grouped = (latest(f"card_decode.{name}", cached=1.0, trials={}) for name in ("whole", "grouped"))
    assert whole["settings"]["read_gb_s"] == grouped["settings"]["read_gb_s"], "measured once a run: it is one run"
    said = whole["settings"]
    assert (said["moe_layers"], said["top_k"], said["experts"]) == (8, 22, 512) and "H200" in said["device"]
    found = ledger("A8", "in kind", "+12 %")
    assert f"{100 * said['active']:.1f} % active: {whole['median'] / grouped['median']:.2f} times faster" in found


def test_a7_guesses_on_a_disk_that_never_idles():
    found = ledger("A7", "open")
    for prefetch, words in ((0, "{:.0f} ms a token without guesses"), (4, "{:.0f} ms with 4")):
        row = latest("card_decode.pull", moe_layers=40, prefetch=prefetch, cached=lambda share: share < 1, trials={})
        assert words.format(row["median"]) in found and row["settings"]["layers"] == 88


def test_a10_bookkeeping():
    row = latest("bookkeeping.fetch")
    assert (row["settings"]["lookups"], row["machine"]["gpu"]) == (880, "NVIDIA H200")
    found, card = ledger("A10", "open"), latest("bookkeeping.card")
    assert f"lookups: {row['median']:.2f} ms of CPU a token" in found and card["run"] == row["run"]
    assert f"{card['median']:.2f} ms with the table on the card" in found


def test_a11_live_equals_replay(conversations):
    check = check_live(conversations)
    assert check.equal
    assert f"each of {check.compared:,} batches of five conversations ({int(check.live.sum()):,} misses)" in ledger(
        "A11", "in kind"
    )
    assert check.compared == check.lookups.n_batches and len(np.unique(conversations.conversation)) == 5
    spoiled = conversations.live_misses.copy()
    spoiled[-1, 0] += 1
    assert not check_live(replace(conversations, live_misses=spoiled)).equal, "one miss more is seen"


def test_a12_snapshot(large):
    assert round(large.mamba_state_bytes / 1e6, 1) == 171.0
    assert large.kv_bytes_per_token == 8_192
    assert "171.0 MB" in ledger("A12", "reproduced")


TEXTS, KINDS = ("english", "russian", "tcp_udp"), ("kl_mean", "kl_mean_decode")


def test_a15_texts():
    found, on_the_cpu = ledger("A15", "in kind"), {"model": "tiny", "device": None}
    for text in TEXTS:
        ours, theirs = (latest(f"compare.ppl_{whose}", text=text, **on_the_cpu) for whose in ("engine", "reference"))
        assert f"{ours['median']:.2f}" in found and ours["median"] == pytest.approx(theirs["median"], rel=1e-6)
        for kind in KINDS:
            assert latest(f"compare.{kind}", text=text, **on_the_cpu)["median"] <= 1e-6
    matches = [latest("compare.greedy_match", text=text, **on_the_cpu) for text in TEXTS]
    assert f"{sum(row['median'] for row in matches):.0f}/{3 * matches[0]['settings']['greedy_of']}" in found
    kls = [latest(f"compare.{kind}", text=text, device="cuda")["median"] for kind in KINDS for text in TEXTS]
    greedy = sum(latest("compare.greedy_match", text=text, device="cuda")["median"] for text in TEXTS)
    assert f"on an H200 mean KL at most {max(kls):.1e} nats" in found and f"greedy {greedy:.0f}/192" in found


def test_a16_swapped_nibbles():
    broken = latest("compare.control_ppl", model="tiny", device=None, control="swapped nibbles")
    assert f"{broken['median']:,.0f}" in ledger("A16", "in kind")


def test_a19_prompt_experts_in_the_cache(conversations):
    found = ledger("A19", "in kind", "prompt's experts")
    aside, warm = (replay(from_trace(conversations, prefill_warms=warms), "lru", slots=92) for warms in (False, True))
    prompts = [result.row("prefill")["misses"] for result in (warm, aside)]
    assert "prompts miss {:,} instead of {:,} times".format(*prompts) in found
    reads = [a_token(result.row("decode")) for result in (warm, aside)]
    assert "decode reads {} instead of {} blocks".format(*reads) in found
    for words, name in (
        ("a prompt takes {:.2f} times the time", "prompt"),
        ("a token behind it {:.2f} times", "token"),
    ):
        row = latest(f"card_turns.{name}_of_passes")
        assert f"{words.format(row['median'])} ({row['low']:.2f} to {row['high']:.2f})" in found


SHUFFLED = ("_shuffled_within_conversations", "_shuffled_across_conversations")


def test_a19_repeats(conversations):
    found = measure_trace(conversations)
    ours = ledger("A19", "in kind", "40 %")
    shares = [found[f"repeat_rate{name}"] for name in ("", *SHUFFLED, "_by_chance")]
    assert all(f"{100 * share:.1f} %" in ours for share in shares) and shares == sorted(shares, reverse=True)


def test_a19_single_neurons(step, large):
    found = ledger("A19", "contradicted")
    us, width = step["us"], large.expert_width
    assert f"{us['whole'] / us['rows']:.2f} times faster than whole blocks" in found
    assert f"{us['grouped'] / us['rows']:.2f} times faster than groups" in found
    inter = large.expert_params // (2 * width)
    neurons, groups = 0.075 * inter, inter / 16 * groups_if_independent(0.075)
    again, once, in_groups = neurons * (width / 2 + width), neurons * width / 2 + groups * width, groups * 9 * width
    assert f"{again / once:.2f} times those bytes of down, still {100 * again / in_groups:.0f} % of those of" in found
    if "neurons" in us:  # not in runs of older commits
        assert f"{us['neurons'] / us['whole']:.2f} times the time of whole blocks" in found
        all_active = read_timed(1.0).set_index("strategy")["of_whole"]
        assert f"{all_active['neurons']:.2f} times once all neurons are active" in found


def test_a18_bits_on_a_card():
    row = latest("compare.distinct_repeats", device="cuda")
    assert row["median"] == 1 and "H200" in row["machine"]["gpu"]
    runs = row["settings"]["runs"]
    ways = [run for run in runs if run.startswith("transfer ")]
    assert f"on an H200 {len(runs)} runs by all four strategies" in ledger("A18", "in kind") and len(ways) == 4
    assert "another process" in runs


def test_a19_trials_on_a_card():
    def of_none(trial, value):
        row = latest("card_decode.rows_*", trials={trial: value})
        plain = latest("card_decode.rows", trials={}, read_gb_s=row["settings"]["read_gb_s"])
        assert row["settings"]["cached"] == 1 and "H200" in row["settings"]["device"]
        return f"{row['median'] / plain['median']:.2f} times"

    found = ledger("A19", "in kind", "early copies")
    assert f"{of_none('shared_first', True)} the time with the shared expert first" in found
    assert f"{of_none('speculate', 4)} with 4 guesses copied a layer early" in found
    assert f"kept in 0.54 GiB: {of_none('kept_gib', 0.54)} the time" in ledger("A19", "in kind", "Keeping recent")


def test_a19_six_guesses(decode):
    found = ledger("A19", "open", "6 guesses")
    six, four = decode(92, 6), decode(92, 4)
    assert f"6 leave {a_token(six, False)} reads a token to wait for instead of {a_token(four, False)}" in found
    assert f"read {a_token(six)} instead of {a_token(four)} in all" in found


def test_b1_qwen_block(published):
    row = published.loc["Qwen3.8-Flash-Next"]
    assert row["expert_bytes"] == 3 * 2560 * 640 * 9 // 16 == 675 * 4096
    assert (row["moe_layers"], row["experts"], row["top_k"]) == (48, 512, 10)
    assert f"{row['bytes_per_token']:,}" in ledger("B1", "reproduced")


def test_b4_matrix_times_vector():
    fp8, nvfp4 = (100 * latest(f"linear.{name}_of_read")["median"] for name in ("fp8", "nvfp4"))
    found = ledger("B4", "in kind")
    assert f"at {fp8:.0f} % of an H200's read bandwidth, NVFP4 at {nvfp4:.0f} %" in found
