"""Where each expert lies in memory that the card reads by itself: a table there, changed in the order of the stream."""

from __future__ import annotations

import numpy as np
import torch

from nemolab.engine.gpu.pinned import PinnedArray
from nemolab.kernels.gpu.write_table import MOST

_HALF = 32  # launches that change the table in half a ring of changes


class ExpertTable:
    """Addresses of page-locked blocks by layer and expert, on the card and here; 0 for what is not there.

    .device  int64 [layers, experts], changed in the order of torch's current stream
    .host    int64 [layers, experts], what the card will have once it has done everything queued
    """

    def __init__(self, n_layers: int, n_experts: int, device, operators):
        self.host = np.zeros((n_layers, n_experts), np.int64)
        self._entries = self.host.reshape(-1)  # by block
        self.device = torch.zeros(n_layers, n_experts, dtype=torch.int64, device=device.torch_device)
        self._write = operators.WriteTable(self.device)
        # Changes lie in a ring until the card has read them; an event a half of it says that it has.
        self._changes = PinnedArray((2 * _HALF, MOST, 2), np.int64, device.locker)
        self._pairs = [(pairs[:, 0], pairs[:, 1]) for pairs in self._changes.array]
        self._read = (device.new_event(), device.new_event())
        self._turn = 0

    def set(self, layer: int, experts: np.ndarray | list[int] | int, addresses: np.ndarray | int) -> None:
        """Experts of a layer, each named once, lie at these addresses from here on (0: nowhere)."""
        experts = np.atleast_1d(np.asarray(experts, np.int64))
        self.update(layer * self.host.shape[1] + experts, np.broadcast_to(addresses, experts.shape))

    def update(self, blocks: np.ndarray, addresses: np.ndarray) -> None:
        """The same for blocks (layer * n_experts + expert) of any layers: one launch for 128.

        A block named more than once must have the same address each time: the card writes them in no order.
        """
        self._entries[blocks] = addresses
        for first in range(0, len(blocks), MOST):
            turn, count = self._turn, min(MOST, len(blocks) - first)
            if turn % _HALF == 0:
                self._read[turn // _HALF].synchronize()
            places, values = self._pairs[turn]
            places[:count], values[:count] = blocks[first : first + count], addresses[first : first + count]
            self._write.launch(self._changes.address + 16 * MOST * turn, count)
            if turn % _HALF == _HALF - 1:
                self._read[turn // _HALF].record()
            self._turn = (turn + 1) % (2 * _HALF)

    def clear(self) -> None:
        """Nothing is anywhere, once the card is done with all that was queued."""
        self.host[:] = 0
        self.device.zero_()

    def close(self) -> None:
        """Once the card is done. Closing twice is fine."""
        self._pairs = []
        self._changes.close()


class TableKeeper:
    """Keeps a table true to a cache: told what comes and goes (`ExpertCache.watcher`), it gathers that until `flush`.

    A block that left may still be named by the table until then. That is soon enough: the layer under way uses no block
    that leaves while it is the cache's running batch, and the one before it is done once a choice is known.
    """

    def __init__(self, table: ExpertTable, memory):
        self._table, self._memory = table, memory
        self._wanted = table.host.reshape(-1).copy()  # what the table is to say of each block
        # Blocks of which it may say something else, some of them more than once: the first `_count`.
        self._changed, self._count = np.zeros(2 * self._wanted.size, np.int64), 0

    def came(self, blocks: np.ndarray, rows: np.ndarray) -> None:
        """These blocks are whole, in these rows of the cache. Rows that the card does not see stay out of the table."""
        self._note(blocks)
        self._wanted[blocks] = self._memory.addresses_seen(rows)

    def left(self, blocks: list[int]) -> None:
        """The memory of these blocks is about to be used for others."""
        gone = np.array(blocks)
        self._note(gone)
        self._wanted[gone] = 0

    def _note(self, blocks: np.ndarray) -> None:
        """They change. Before they do: what an interrupt leaves half-way is then told again as it was."""
        if self._count + len(blocks) > len(self._changed):
            known = np.unique(self._changed[: self._count])
            self._changed[: len(known)], self._count = known, len(known)
        self._changed[self._count : self._count + len(blocks)] = blocks
        self._count += len(blocks)

    def find(self, block: int) -> int:
        """Where the card can read a block by itself, what is not flushed yet included; 0: nowhere."""
        return int(self._wanted[block])

    def flush(self) -> None:
        """Let the card know, in the order of its stream."""
        if self._count:
            blocks = self._changed[: self._count]
            self._table.update(blocks, self._wanted[blocks])
            self._count = 0  # not before: should an interrupt come first, the same changes are told again

    def start_over(self) -> None:
        """Let the table be empty, whatever was told: what is there is to be told again (`ExpertCache.retell`)."""
        self._table.clear()
        self._wanted[:] = 0
        self._count = 0
