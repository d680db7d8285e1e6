"""Where each expert lies in memory that the card reads by itself: a table there, sent a layer at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from nemolab.engine.gpu.pinned import PinnedArray


class ExpertTable:
    """Addresses of page-locked blocks by layer and expert, on the card and here; 0 for what is not there.

    .host    int64 [layers, experts]: what the table is to say; `touch` layers before they change
    .device  the same on the card, where a layer's row is as it was when it was last sent
    Rows change only when none is on its way: once a choice has come, which is behind all rows sent, or between tokens.
    After a token that broke off the card is waited for, and `clear` has all sent again.
    """

    def __init__(self, n_layers: int, n_experts: int, device):
        self._device, self._n_experts = device, n_experts
        self.device = torch.zeros(n_layers, n_experts, dtype=torch.int64, device=device.torch_device)
        self._pinned = PinnedArray((n_layers, n_experts), np.int64, device.locker)
        self.host, self._row_bytes = self._pinned.array, 8 * n_experts
        self._here, self._there = self._pinned.address, self.device.data_ptr()
        self._touched = bytearray(n_layers)  # 1 where the card's row may differ

    def set(self, layer: int, experts: np.ndarray | list[int] | int, addresses: np.ndarray | int) -> None:
        """Experts of a layer lie at these addresses (0: nowhere); sent at once, and the card is waited for."""
        self._touched[layer] = 1
        self.host[layer, experts] = addresses
        self.send(layer)
        self._device.main_stream().synchronize()

    def touch(self, block: int) -> None:
        """A block (layer * n_experts + expert) is about to change."""
        self._touched[block // self._n_experts] = 1

    def send(self, layer: int) -> None:
        """Queue a layer's row, if it was touched, on torch's current stream."""
        if self._touched[layer]:
            at = layer * self._row_bytes
            self._device.copy(self._there + at, self._here + at, self._row_bytes)
            self._touched[layer] = 0  # not before: should an interrupt come first, it is sent again

    def clear(self) -> None:
        """Nothing is anywhere, once the card is done with all that was queued."""
        self._touched = bytearray([1]) * len(self._touched)
        self.host[:] = 0

    def close(self) -> None:
        """Once the card is done. Closing twice is fine."""
        self.host = None
        self._pinned.close()


class TableKeeper:
    """Keeps a table true to a cache that tells it what comes and goes (`ExpertCache.watcher`).

    The card may still have a block that left until its layer is sent again. That is soon enough: the layer under way
    uses no block that leaves while it is the cache's running batch, and the one before it is done once a choice is
    known.
    """

    def __init__(self, table: ExpertTable, memory):
        self.table, self._memory = table, memory
        self._entries, self._addresses = table.host.reshape(-1), memory.addresses.tolist()

    # A few blocks a layer: one by one they take less than numpy takes to begin. A layer is touched before its row
    # changes, so that what an interrupt leaves half-way is sent again as it was.

    def came(self, blocks: Sequence[int], rows: Sequence[int]) -> None:
        """These blocks are whole, in these rows of the cache. Rows that the card does not see stay out of the table."""
        memory, entries, touch, seen_rows = self._memory, self._entries, self.table.touch, self._memory.seen_rows
        for block, row in zip(blocks, rows, strict=True):
            touch(block)
            entries[block] = self._addresses[row] if row < seen_rows or memory.lock_row(row) else 0

    def left(self, blocks: Sequence[int]) -> None:
        """The memory of these blocks is about to be used for others."""
        for block in blocks:
            self.table.touch(block)
            self._entries[block] = 0

    def find(self, block: int) -> int:
        """Where a block lies whole in memory that the card reaches; 0: nowhere."""
        return int(self._entries[block])
