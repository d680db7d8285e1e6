"""Routed experts between the cache's memory and a card: page-locked rows, slots, a ring; a token's step by strategy.

    whole     blocks are copied into slots on the card
    grouped   up is copied; down is read in place, groups of 16 neurons with an active one
    rows      up is copied; down is read in place, a group's scales once and only its active neurons' rows
    pull      nothing is copied: the card reads both in place

In place means: in page-locked memory of the host. Rows that the driver did not lock are copied whole in every strategy.
All strategies run the same kernel on the same partition of the sums, so they agree to the bit.

A block may be read over once the card is done with it. The choice of the next layer comes later on the same stream, so
whoever has been told it knows.
"""

from __future__ import annotations

import torch

from nemolab.checkpoint.formats import GROUP
from nemolab.engine.gpu.cache_memory import CacheMemory

WHOLE, GROUPED, ROWS = 0, 1, 2  # how much of down a kernel reads: see kernels.gpu.expert_step
_AMOUNTS = {"whole": WHOLE, "grouped": GROUPED, "rows": ROWS, "pull": ROWS}
TRANSFERS = tuple(_AMOUNTS)


class TokenExperts:
    """One token's experts, by one strategy."""

    def __init__(self, transfer: str, shape: tuple[int, int], top_k: int, memory: CacheMemory, device, operators):
        inter, width = shape
        self._copied = {"whole": "both", "grouped": "up", "rows": "up", "pull": "none"}[transfer]
        self._amount, self._memory, self._device, self._combine = _AMOUNTS[transfer], memory, device, operators.combine
        self.step = operators.ExpertStep(inter, width, top_k, device.torch_device)
        self._up_bytes = inter * width // 2 + inter * width // GROUP
        self._slots = torch.empty(top_k, memory.block_bytes, dtype=torch.uint8, device=device.torch_device)
        self._tables = torch.zeros(2, top_k, dtype=torch.int64, device=device.torch_device)
        self._told = device.host_tensor(2, top_k, dtype=torch.int64)

    def run(self, rows: list[int], ids, weights, scales_2, x, out) -> None:
        """out = the weighted sum of the experts in these rows of the cache, by rank.

        ids int32 [top_k], weights float32 [top_k], scales_2 float32 [experts, 2], x and out float32 [X], on the card
        """
        told = self._told.numpy()
        for rank, row in enumerate(rows):
            up = down = self._memory.address_of(row)
            seen = self._memory.is_seen(row)  # asked for all: a copy from memory that is not locked waits, too
            if self._copied == "both" or not seen:
                up = down = self._fill_slot(rank, up, 2 * self._up_bytes)
            elif self._copied == "up":
                up = self._fill_slot(rank, up, self._up_bytes)
            told[:, rank] = up, down
        self._tables.copy_(self._told, non_blocking=True)
        ranks, step = self.step.all_ranks, self.step
        step.launch((self._tables[0], ranks), (self._tables[1], ranks), ids, scales_2, x, amount=self._amount)
        self._combine(step.partial, weights, ids, scales_2, out)

    def _fill_slot(self, rank: int, source: int, nbytes: int) -> int:
        slot = self._slots.data_ptr() + rank * self._memory.block_bytes
        self._device.copy(slot, source, nbytes)
        return slot
