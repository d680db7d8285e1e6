"""`nemolab bench moe-step`: what it refuses, and on a card its rows."""

import pytest

from nemolab.errors import UsageError
from nemolab.measure import record
from nemolab.measure.bench_moe_step import bench_moe_step


def test_the_bench_needs_sizes_that_can_be():
    with pytest.raises(UsageError, match="known are super, nano, tiny"):
        bench_moe_step("huge")
    with pytest.raises(UsageError, match="22 of 5 experts"):
        bench_moe_step("tiny", cached=5)


@pytest.mark.gpu
def test_the_bench_runs_and_its_rows_can_be_kept(tmp_path):
    found = bench_moe_step("tiny", top_k=6, cached=32, steps=2, repeats=3)
    assert found["same_bits"] and found["relative_error"] < 1e-5
    settings = found["rows"][0]["settings"]
    assert settings["bytes_copied"] == 6 * 36_864 and settings["bytes_in_place"] == 0
    for row in found["rows"]:
        assert len(record(**row, folder=tmp_path)["values"]) == 3
