"""Tables of what was measured on cards: every figure comes from a row, and the newest row of its kind wins."""

from datetime import UTC, datetime

import pytest

from nemolab import paths
from nemolab.commands.compare import RECORDED, RECORDED_OF_CARDS, record_comparison
from nemolab.engine.transfers import TRANSFERS
from nemolab.measure import record
from nemolab.readme import cards, measured

MODEL = {"model": "some-model", "layers": 18, "moe_layers": 8, "experts": 512}


@pytest.fixture(autouse=True)
def rows(tmp_path, monkeypatch):
    """A folder of measurements of its own."""
    monkeypatch.setattr(paths, "measurements_folder", lambda: tmp_path)
    return tmp_path


def record_decode(strategy: str, cached: float, ms: float) -> None:
    floors = {"bus_ms": 2.5, "disk_ms": 10.0, "dense_ms": 0.5, "floor_ms": 10.0, "bus_and_dense_ms": 3.0}
    rates = {"copy_gb_s": 55.25, "in_place_gb_s": 51.5, "disk_gb_s": 2.0, "read_gb_s": 4500.0, "driver_cpu_ms": 7.25}
    counted = {"hit_rate": 0.825, "reads": 9.125, "bytes_copied": 5e6, "bytes_in_place": 2e6, "active": 0.075}
    chosen = {"cached": cached, "routing": "synthetic: sticky", "prefetch": 4}
    record(f"card_decode.{strategy}", [ms, ms + 1, ms + 2], "ms/token", MODEL | floors | rates | counted | chosen)


def test_decode_by_strategy_and_share_with_its_floors():
    for number, strategy in enumerate(TRANSFERS):
        record_decode(strategy, 0.2402, 11 + number)
        record_decode(strategy, 1.0, 99.0)
        record_decode(strategy, 1.0, 3 + number)
    table = cards.decode_table()
    (pull,) = [line for line in table.splitlines() if line.startswith("| `pull` | 24 |")]
    cells = [cell.strip() for cell in pull.split("|")[3:-1]]
    assert cells == ["82.5", "9.1", "7", "15 (14 to 16)", "2.50", "10.00", "0.50", "1.50", "5.00", "7.2", "3"]
    assert "| `whole` | 100 | 82.5 | 9.1 | 7 | 4 (3 to 5) |" in table and "99" not in table, "the newest row"
    assert "18 layers of the shape of some-model, 8 of them with 512 experts; routing synthetic: sticky" in table
    assert "copied 55.2, read in place 51.5, from disk 2.0, the card's own 4,500" in table


def test_prompts_with_experts_in_ram_and_on_disk():
    said = MODEL | {"tokens": 2048, "needed": 4000, "copy_gb_s": 55.25, "copy_ms": 57.0, "torch_ms": 16.0}
    record("card_prefill.cached", [80, 82, 90], "ms", said | {"floor_ms": 57.0, "crossed": 4003.0})
    record("card_prefill.disk", [1400], "ms", said | {"floor_ms": 1300.0, "crossed": 4000.0, "disk_read_ms": 1300.0})
    ram, disk = cards.prefill_table().splitlines()[-2:]
    assert ram == "| RAM | 2,048 | 4,000 | 4,003 | 82 (80 to 90) | 57 | 16 |  | 1.44 | 3 |"
    assert disk.startswith("| disk | 2,048 | 4,000 | 4,000 |") and disk.endswith("| 57 | 16 | 1,300 |  | 1 |")


def test_memory_as_allowed_planned_and_found():
    planned = {"pass_tokens": 8192, "dense_bytes": 6 * 2**30, "kept_bytes": 0, "total_bytes": 7 * 2**30}
    said = MODEL | {"prompt_tokens": 8192, "tokens": 16, "transfer": "pull", "budget_gib": 8.0, "planned": planned}
    for phase, gib in (("load", 6.5), ("prompt", 7.25), ("decode", 7.125)):
        record(f"card_memory.{phase}", [gib], "GiB", said)
    table = cards.memory_table()
    assert "Planned, GiB: dense 6.00." in table
    wanted = ["| loaded | 6.50 |", "| a prompt of 8,192 tokens | 7.25 |", "| 16 tokens behind it | 7.12 |"]
    assert table.splitlines()[-5:] == [*wanted, "| planned | 7.00 |", "| allowed | 8.00 |"]


def record_compared(device: str, kl: float, hashes: str) -> None:
    text = dict.fromkeys(RECORDED | RECORDED_OF_CARDS, kl) | {"name": "short", "tokens": 9, "greedy_of": 64}
    control = {"name": "swapped nibbles", "ppl": 1234.0, "kl_mean_least": 3.0}
    runs = {f"run {number}": logits for number, logits in enumerate(hashes)}
    repeats = {"prompt_tokens": 8, "steps": 2, "logits_sha256": runs}
    shared = {"model": "tiny", "threads": 2, "device": device, "store_layout": "neuron"}
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
