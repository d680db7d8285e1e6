"""Tables of what was measured on cards: every figure comes from a row, the newest whole run wins, none are mixed."""

from datetime import UTC, datetime

import pytest

from nemolab import paths
from nemolab.commands.compare import RECORDED, RECORDED_OF_CARDS, record_comparison
from nemolab.engine.transfers import TRANSFERS
from nemolab.measure import one_line, record_run
from nemolab.readme import cards, measured

MODEL = {"model": "some-model", "layers": 18, "moe_layers": 8, "experts": 512}


@pytest.fixture(autouse=True)
def rows(tmp_path, monkeypatch):
    """A folder of measurements of its own."""
    monkeypatch.setattr(paths, "measurements_folder", lambda: tmp_path)
    return tmp_path


def record_as_run(second: int, *rows: tuple) -> None:
    """Rows (name, values, unit, settings) of one run, which began at that second."""
    fields = ("name", "values", "unit", "settings")
    record_run([dict(zip(fields, row, strict=True)) for row in rows], datetime(2026, 11, 30, 9, 0, second, tzinfo=UTC))


def decode_row(case: str, cached: float, ms: float, **more) -> tuple:
    floors = {"bus_ms": 2.5, "disk_ms": 10.0, "dense_ms": 0.5, "floor_ms": 10.0, "bus_and_dense_ms": 3.0}
    rates = {"copy_gb_s": 55.25, "in_place_gb_s": 51.5, "disk_gb_s": 2.0, "read_gb_s": 4500.0, "driver_cpu_ms": 7.25}
    counted = {"hit_rate": 0.825, "reads": 9.125, "bytes_copied": 5e6, "bytes_in_place": 2e6, "active": 0.075}
    chosen = {"cached": cached, "routing": "synthetic: sticky", "prefetch": 4, "trials": {}, "in_turns": True}
    chosen["transfer"] = case.partition("_")[0]
    said = MODEL | floors | rates | counted | chosen | more
    return (f"card_decode.{case}", [ms, ms + 1, ms + 2], "ms/token", said)


def test_decode_by_strategy_and_share_with_its_floors():
    ways = list(enumerate(TRANSFERS))
    record_as_run(0, *(decode_row(way, 0.2402, 11 + number, needed_reads=8.0) for number, way in ways))
    record_as_run(1, *(decode_row(way, 1.0, 99.0) for way in TRANSFERS))
    record_as_run(2, *(decode_row(way, 1.0, 3 + number) for number, way in ways))
    record_as_run(3, *(decode_row(way, 1.0, 77.0) for way in TRANSFERS[1:]))
    table = cards.decode_table()
    (pull,) = [line for line in table.splitlines() if line.startswith("| `pull` | 24 |")]
    cells = [cell.strip() for cell in pull.split("|")[3:-1]]
    assert cells == ["82.5", "9.1", "8.0", "7", "15 (14 to 16)", "2.50", "10.00", "0.50", "1.50", "5.00", "7.2", "3"]
    assert "| `whole` | 100 | 82.5 | 9.1 |  | 7 | 4 (3 to 5) |" in table, "the newest run that has all; none of its own"
    assert "77" not in table and "99" not in table
    assert "18 layers of the shape of some-model, 8 of them with 512 experts; routing synthetic: sticky" in table
    assert "copied 55.2, read in place 51.5, from disk 2.0, the card's own 4,500" in table
    assert "; 2 runs. 18 layers" in table and "a run for each share cached, all strategies in turns in it" in table
    assert "`whole` with 100 % cached 4 to 100 (2 runs), `grouped` with" in table and "24 % cached 1" not in table


def test_trials_stand_beside_none_of_their_own_run():
    kept, speculated = {"trials": {"kept_gib": 0.5}}, {"trials": {"speculate": 4, "shared_first": True}}
    tried = [decode_row("rows_kept_gib_0_5", 1.0, 7, **kept), decode_row("rows_speculate_4_s", 1.0, 9, **speculated)]
    record_as_run(0, decode_row("rows", 1.0, 8), decode_row("rows_kept_gib_2", 1.0, 33, trials={"kept_gib": 2}))
    record_as_run(1, decode_row("rows", 1.0, 7), *tried)
    record_as_run(2, decode_row("pull", 0.24, 19), decode_row("pull_prefetch_0", 0.24, 39, prefetch=0))
    record_as_run(3, decode_row("rows", 1.0, 99), decode_row("pull", 1.0, 99))
    rows, pull = cards.trials_table().split(f"\n\n{one_line()}")
    assert "all in RAM; `rows`; in turns in one run." in rows and "2 runs" not in rows
    assert rows.splitlines()[-3:] == [
        "| none | 7 | 8 (7 to 9) | 1.00 | 3 |",
        "| recent experts kept, GiB: 0.5 | 7 | 8 (7 to 9) | 1.00 | 3 |",
        "| guesses copied early: 4, shared expert first | 7 | 10 (9 to 11) | 1.25 | 3 |",
    ]
    assert "24 % in RAM; 4 guesses read ahead; `pull`; in turns in one run." in pull
    assert pull.splitlines()[-2:] == [
        "| none | 7 | 9.1 | 20 (19 to 21) | 1.00 | 3 |",
        "| guesses read ahead: 0 | 7 | 9.1 | 40 (39 to 41) | 2.00 | 3 |",
    ]


def moe_rows(whole_us: float, floor_us: float, active: float = 0.075, **more) -> list[tuple]:
    sizes = {"inter": 2688, "width": 1024, "experts": 22, "active": active, "bytes_copied": 5e6, "bytes_in_place": 2e6}
    said = sizes | {"floor_us": floor_us} | more
    ways = [*TRANSFERS, "pull_graph"]
    return [(f"moe_step.{way}", [whole_us / 2**place] * 3, "us", said) for place, way in enumerate(ways)]


def test_moe_steps_beside_whole_and_all_recorded_runs():
    for second, us in enumerate((1500, 1200, 1300)):
        record_as_run(second, *moe_rows(us, 1000.0))
    record_as_run(4, *moe_rows(2000, 1000.0, active=1.0))
    record_as_run(5, *moe_rows(9000, 1000.0, width=2688))
    record_as_run(6, *moe_rows(9999, 1000.0)[:4])
    table = cards.moe_step_table()
    assert "| `grouped` | 7.5 | 5.0 | 2.0 | 1,000 | 650 (650 to 650) | 0.650 | 0.50 | 3 |" in table
    assert "; 2 runs. 22 experts" in table and "a run for each share of active neurons" in table
    assert "7.5 % active, 3 runs of" in table and ": `whole` 1.200 to 1.500, `grouped` 0.600 to 0.750" in table
    assert "100 % active, " not in table and "| `whole` | 100 |" in table, "a single run has no range"


def test_runs_of_other_machines_are_not_counted(monkeypatch):
    record_as_run(0, *moe_rows(1500, 1000.0), *moe_rows(1500, 1000.0, active=1.0))
    monkeypatch.setattr(
        "nemolab.measure.rows.machine", lambda: {"cpu": "other", "cores": 4, "memory_gib": 8, "gpu": "x"}
    )
    record_as_run(1, *moe_rows(1200, 1000.0), *moe_rows(1200, 1000.0, active=1.0))
    assert " runs of " not in cards.moe_step_table()


def prefill_rows(ms: float, copy_ms: float) -> list[tuple]:
    said = MODEL | {"tokens": 2048, "needed": 4000, "copy_gb_s": 55.25, "copy_ms": copy_ms, "torch_ms": 16.0}
    return [
        ("card_prefill.cached", [ms - 2, ms, ms + 8], "ms", said | {"crossed": 4003.0}),
        ("card_prefill.disk", [1430], "ms", said | {"crossed": 4000.0, "disk_read_ms": 1300.0}),
    ]


def test_prompts_with_experts_in_ram_and_on_disk_are_of_one_run():
    record_as_run(0, *prefill_rows(82, 57))
    record_as_run(1, prefill_rows(999, 57)[0])
    lines = cards.prefill_table().splitlines()
    assert lines[-2] == "| RAM | 2,048 | 4,000 | 4,003 | 82 (80 to 90) | 57 | 16 | 1.44 |  |  | 3 |"
    assert lines[-1] == "| disk | 2,048 | 4,000 | 4,000 | 1,430 (1,430 to 1,430) | 57 | 16 |  | 1,300 | 1.10 | 1 |"
    record_as_run(2, *prefill_rows(86, 43))
    assert cards.prefill_table().endswith("the medians' least to most: experts in RAM 1.44 to 2.00 (2 runs).")


def test_memory_as_allowed_planned_and_found():
    planned = {"pass_tokens": 8192, "dense_bytes": 6 * 2**30, "kept_bytes": 0, "total_bytes": 7 * 2**30}
    said = MODEL | {"prompt_tokens": 8192, "tokens": 16, "transfer": "pull", "budget_gib": 8.0, "planned": planned}
    found = {"load": 6.5, "prompt": 7.25, "decode": 7.125}
    record_as_run(0, *((f"card_memory.{phase}", [gib], "GiB", said) for phase, gib in found.items()))
    table = cards.memory_table()
    assert "One run: the most of each phase, a single sample." in table
    assert "Planned, GiB: dense 6.00." in table
    wanted = ["| loaded | 6.50 |", "| a prompt of 8,192 tokens | 7.25 |", "| 16 tokens behind it | 7.12 |"]
    assert table.splitlines()[-5:] == [*wanted, "| planned | 7.00 |", "| allowed | 8.00 |"]


def record_compared(device: str, kl: float, hashes: str) -> None:
    text = dict.fromkeys(RECORDED | RECORDED_OF_CARDS, kl) | {"name": "short", "tokens": 9, "greedy_of": 64}
    control = {"name": "swapped nibbles", "ppl": 1234.0, "kl_mean_least": 3.0}
    runs = {f"run {number}": logits for number, logits in enumerate(hashes)}
    repeats = {"prompt_tokens": 8, "steps": 2, "logits_sha256": runs}
    shared = {"model": "tiny", "threads": 2, "device": device, "vram_gib": 4.0, "store_layout": "neuron"}
    record_comparison(shared | {"texts": [text], "controls": [control], "determinism": repeats}, datetime.now(UTC))


def test_comparisons_on_a_card_and_on_the_cpu_keep_apart():
    record_compared("cpu", 0.25, "aa")
    record_compared("cuda", 0.125, "aaa")
    card, cpu = cards.card_correctness_table(), measured.correctness_table()
    assert "| short | 9 | 1.2e-01 | 1.2e-01 | 1.2e-01 | 1.2e-01 | 0/64 |" in card
    assert "3 runs (run 0; run 1; run 2) gave the same bits." in card and "swapped nibbles 1,234" in card
    assert "2.5e-01" in cpu and "1.2e-01" not in cpu
    record_compared("cuda", 0.125, "aab")
    assert "gave 2 DIFFERENT RESULTS" in cards.card_correctness_table()
