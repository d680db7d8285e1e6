"""Single rows of a dense matrix: a token's embedding."""

import subprocess
import sys

import pytest
import torch

from nemolab.checkpoint.formats import encode_fp8, encode_nvfp4
from nemolab.engine.weights import Matrix
from nemolab.kernels.matvec import FORMATS
from nemolab.kernels.team import Team

# Wakes torch's threads, if anything does, and says how many there are more than before.
COUNT_THREADS = """
import os, torch
from nemolab.engine.weights import Matrix
torch.set_num_threads(4)
weight = torch.zeros(3, 8192, dtype=torch.bfloat16)  # too few to share out
matrix = Matrix("m", None, "bf16", 3, 8192, weight)
before = len(os.listdir("/proc/self/task"))
matrix.{work}
print(len(os.listdir("/proc/self/task")) - before)
"""


@pytest.fixture(scope="module")
def team():
    with Team(2) as team:
        yield team


def matrix(format, team, rows=5, columns=48):
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))
    if format == "nvfp4":
        values, scales, scale_2 = encode_nvfp4(weight)
        return Matrix("m", team, format, rows, columns, values, scales.view(torch.uint8), float(scale_2))
    if format == "fp8":
        values, scale = encode_fp8(weight)
        return Matrix("m", team, format, rows, columns, values, None, float(scale))
    stored = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[format]
    return Matrix("m", team, format, rows, columns, weight.to(stored))


@pytest.mark.parametrize("format", FORMATS)
def test_a_row_is_the_one_that_take_gives_and_writing_to_it_leaves_the_matrix_alone(format, team):
    table = matrix(format, team)
    for number in range(table.rows):
        wanted = table.take(torch.tensor([number]))[0]
        row = table.row(number)
        assert row.dtype == torch.float32 and torch.equal(row, wanted) and wanted.any()
        row.fill_(7)
        assert torch.equal(table.take(torch.tensor([number]))[0], wanted)


def started(work):
    code = COUNT_THREADS.format(work=work)
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def test_a_row_wakes_no_thread_of_torch_where_take_does():
    assert started("row(2)") == 0
    assert started("take(torch.tensor([2]))") > 0
