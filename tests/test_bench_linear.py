"""`nemolab bench linear`: its arithmetic, and on a card its rows."""

import pytest

from nemolab.measure import make_row
from nemolab.measure.bench_linear import LAPTOP, bench_linear, weight_times


def test_a_laptop_is_bound_by_memory_in_every_format():
    """448 GB/s: 9/16 byte of a 4-bit weight take 1.26 ps; 3.52 instructions on 9.6e12 slots a second 0.37 ps."""
    assert weight_times("nvfp4", **LAPTOP) == {"memory_ps": 1.26, "instructions_ps": 0.37, "bound": "memory"}
    assert all(weight_times(format, **LAPTOP)["bound"] == "memory" for format in ("nvfp4", "fp8", "bf16"))


def test_on_a_card_of_ten_times_the_bandwidth_decoding_four_bits_is_the_larger_floor():
    """132 multiprocessors at 1.98 GHz issue 33.5e12 a second: 4.96 of them take longer than 9/16 byte at 4480 GB/s."""
    big = {"gb_s": 4480, "slots": 132 * 128 * 1.98e9, "card": 90}
    assert weight_times("nvfp4", **big)["bound"] == "instructions"
    assert weight_times("fp8", **big)["bound"] == "memory"


@pytest.mark.gpu
def test_rows_carry_every_side():
    data = bench_linear(tokens=64, repeats=3)
    rows = {row["name"]: make_row(**row) for row in data["rows"]}
    assert set(rows) == {"linear.read_bandwidth"} | {
        f"linear.{name}"
        for name in (
            "fp8", "nvfp4", "bf16", "fp8_of_read", "nvfp4_of_read", "bf16_of_read",
            "prompt_torch", "prompt_torch_bf16", "prompt_fp8", "prompt_nvfp4",
        )
    }  # fmt: skip
    assert all(len(row["values"]) == 3 for row in rows.values())
    assert rows["linear.nvfp4"]["settings"]["bytes"] >= 64e6
