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
        self.device = torch.zeros(n_layers, n_experts, dtype=torch.int64, device=device.torch_device)
        self._write = operators.WriteTable(self.device)
        # Changes lie in a ring until the card has read them; an event a half of it says that it has.
        self._changes = PinnedArray((2 * _HALF, MOST, 2), np.int64, device.locker)
        self._read = (device.new_event(), device.new_event())
        self._turn = 0

    def set(self, layer: int, experts: np.ndarray | list[int], addresses: np.ndarray | list[int] | int) -> None:
        """Experts of a layer lie at these addresses from here on (0: nowhere)."""
        experts = np.atleast_1d(np.asarray(experts, np.int64))
        self.update(layer * self.host.shape[1] + experts, addresses)

    def update(self, blocks: np.ndarray | list[int], addresses: np.ndarray | list[int] | int) -> None:
        """The same for blocks (layer * n_experts + expert) of any layers, each named once: one launch for 128."""
        pairs = np.empty((len(blocks), 2), np.int64)
        pairs[:, 0], pairs[:, 1] = blocks, addresses
        self.host.reshape(-1)[pairs[:, 0]] = pairs[:, 1]
        for first in range(0, len(pairs), MOST):
            piece = pairs[first : first + MOST]
            turn, count = self._turn, len(piece)
            if turn % _HALF == 0:
                self._read[turn // _HALF].synchronize()
            self._changes.array[turn, :count] = piece
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
        self._changes.close()


class TableKeeper:
    """Keeps a table true to a cache: told what comes and goes (`ExpertCache.watcher`), it gathers that until `flush`.

    A block that left may still be named by the table until then. That is soon enough: the layer under way uses no block
    that leaves while it is the cache's running batch, and the one before it is done once a choice is known.
    .behind  it was emptied, so that there may be blocks it does not name: those that are used are to be told again
    """

    def __init__(self, table: ExpertTable, memory):
        self._table, self._memory = table, memory
        self._changes: dict[int, int] = {}  # block -> its address, or 0
        self.behind = False

    def came(self, blocks: list[int], rows: list[int]) -> None:
        """These blocks are whole, in these rows of the cache. Rows that the card does not see stay out of the table."""
        memory = self._memory
        self._changes |= {
            block: memory.address_of(row) for block, row in zip(blocks, rows, strict=True) if memory.is_seen(row)
        }

    def left(self, blocks: list[int]) -> None:
        """The memory of these blocks is about to be used for others."""
        self._changes |= dict.fromkeys(blocks, 0)  # in one step that no interrupt cuts in two

    def find(self, block: int) -> int:
        """Where the card can read a block by itself, what is not flushed yet included; 0: nowhere."""
        return self._changes.get(block, int(self._table.host.flat[block]))

    def flush(self) -> None:
        """Let the card know, in the order of its stream."""
        if self._changes:
            self._table.update(list(self._changes), list(self._changes.values()))
            # Not before: should an interrupt come first, the same changes are told again.
            self._changes = {}

    def start_over(self) -> None:
        """Let the table be empty, whatever was told: after a token that broke off."""
        self.behind = True
        self._table.clear()
        self._changes = {}
