"""Changes single entries of a table on the card, in the order of a stream.

table[pairs[i, 0]] = pairs[i, 1] for i < count      table int64 [N]; pairs int64 [most, 2]; places are distinct
Pairs lie in page-locked memory of the host and are read in place: one launch and no copy. Traffic: 16 bytes a pair.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nemolab.errors import EngineError
from nemolab.kernels.gpu.launch import Prepared

MOST = 128  # pairs a launch


def write_table_torch(table: torch.Tensor, pairs: torch.Tensor) -> None:
    """The plain twin."""
    table[pairs[:, 0]] = pairs[:, 1]


@triton.jit(do_not_specialize=["pairs", "count"], do_not_specialize_on_alignment=["table"])
def _write_table_kernel(table, pairs, count, MOST: tl.constexpr):
    pair = tl.arange(0, MOST)
    at = pairs.to(tl.pointer_type(tl.int64)) + 2 * pair
    place = tl.load(at, mask=pair < count, other=0)
    tl.store(table + place, tl.load(at + 1, mask=pair < count, other=0), mask=pair < count)


class WriteTable:
    """Writes into one table, int64 and contiguous. Raises EngineError for another."""

    def __init__(self, table: torch.Tensor):
        if table.dtype != torch.int64 or not table.is_contiguous():
            raise EngineError(f"a table of {table.dtype}, strides {table.stride()}: int64, contiguous is needed")
        self._table, self._kernel = table, Prepared(_write_table_kernel, {"MOST": MOST}, num_warps=4)
        self._address = table.data_ptr()

    def launch(self, pairs: int, count: int) -> None:
        """Write `count` pairs (at most MOST) that lie at an address the card can read."""
        if not 0 < count <= MOST:
            raise EngineError(f"{count} entries of a table at once; 1 to {MOST} can be written")
        if self._kernel.ready:
            self._kernel.launch((1,), [self._address, pairs, count], torch.cuda.current_stream().cuda_stream)
        else:
            self._kernel((1,), [self._table, pairs, count])
