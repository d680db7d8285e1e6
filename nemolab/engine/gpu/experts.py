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

from itertools import pairwise

import numpy as np
import torch

from nemolab.checkpoint.formats import GROUP
from nemolab.errors import EngineError
from nemolab.progress import say
from nemolab.store import ExpertCache
from nemolab.store.direct_io import address
from nemolab.store.page_lock import PageLock

WHOLE, GROUPED, ROWS = 0, 1, 2  # how much of down a kernel reads: see kernels.gpu.expert_step
_AMOUNTS = {"whole": WHOLE, "grouped": GROUPED, "rows": ROWS, "pull": ROWS}
TRANSFERS = tuple(_AMOUNTS)


class CacheMemory:
    """The memory of an ExpertCache as the card sees it: page-locked as its rows come into use."""

    def __init__(self, cache: ExpertCache, device):
        rows, self.block_bytes = cache.arena.shape
        self.address = address(cache.arena)
        # Cached blocks fill from the front, a prompt's ring lies behind them: two ranges that grow.
        borders = (0, cache.slots, rows)
        self._ranges = [
            (first, PageLock(self.address + first * self.block_bytes, (last - first) * self.block_bytes,
                             self.block_bytes, device.locker))
            for first, last in pairwise(borders)
        ]  # fmt: skip
        self._refused = False

    @property
    def locked_bytes(self) -> int:
        return sum(lock.locked_bytes for _, lock in self._ranges)

    def address_of(self, row: int) -> int:
        return self.address + row * self.block_bytes

    def is_seen(self, row: int) -> bool:
        """Can the card read this row by itself? Its memory is locked now, if the driver lets it."""
        first, lock = self._ranges[-1] if row >= self._ranges[-1][0] else self._ranges[0]
        end = (row - first + 1) * self.block_bytes
        if end > lock.locked_bytes and not self._refused:
            problem = lock.grow(end)
            if problem is not None:
                self._refused = True
                say(f"cache: {problem}; experts beyond that are copied to the card whole")
        return end <= lock.locked_bytes

    def close(self) -> None:
        """Nothing on the card may be reading it any more."""
        for _, lock in self._ranges:
            lock.close()


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


class PromptExperts:
    """The experts of a prompt pass, in batches through a ring on the card."""

    def __init__(self, shape: tuple[int, int], ring: int, cache: ExpertCache, memory: CacheMemory, device, operators):
        self._shape, self._cache, self._memory, self._device = shape, cache, memory, device
        self._expert_prompt = operators.expert_prompt
        self._ring = torch.empty(ring, memory.block_bytes, dtype=torch.uint8, device=device.torch_device)
        places = torch.arange(ring, dtype=torch.int64) * memory.block_bytes + self._ring.data_ptr()
        self._places = places.to(device.torch_device)

    def run(self, layer: int, x, experts, weights, scales_2, most_pairs: int, active: np.ndarray | None):
        """The weighted sum of each token's experts, float32 [tokens, X]; each needed expert crosses the bus once.

        layer    MoE ordinal; x bfloat16 [tokens, X]; experts int64, weights float32 [tokens, top_k]
        most_pairs  (token, rank) pairs worked on at once, no fewer than tokens; bounds the scratch memory
        active   uint16 [tokens, top_k, I/16] on the host or None: receives which neurons are active
        """
        (tokens, top_k), (inter, width), there = experts.shape, self._shape, x.device
        results = torch.empty(tokens * top_k, width, device=there)
        flat = experts.flatten()
        pairs = flat.argsort(stable=True).int()  # all pairs of an expert side by side, tokens ascending
        counts = flat.bincount(minlength=scales_2.shape[0]).cpu().numpy()
        ends = counts.cumsum()
        needed = np.flatnonzero(counts).tolist()
        heights = torch.empty(min(most_pairs, tokens * top_k), inter, dtype=torch.bfloat16, device=there)
        for ids, rows in self._cache.stream_rows(layer, needed, "prefill"):
            for place, row in enumerate(rows):
                self._memory.is_seen(row)
                self._device.copy(
                    self._ring.data_ptr() + place * self._memory.block_bytes,
                    self._memory.address_of(row),
                    inter * width * 9 // 8,
                )
            batch_scales = scales_2[torch.tensor(ids, device=there)]
            for first, last in _stretches(counts[ids], heights.shape[0]):
                begin = ends[ids[first]] - counts[ids[first]]
                starts = torch.from_numpy(np.concatenate([[begin], ends[ids[first:last]]])).int().to(there)
                self._expert_prompt(
                    self._places[first:last], inter, batch_scales[first:last], starts, pairs,
                    int(counts[ids[first:last]].max()), top_k, x, heights, results,
                )  # fmt: skip
                if active is not None:
                    end = ends[ids[last - 1]]
                    active.reshape(tokens * top_k, -1)[pairs[begin:end].cpu().numpy()] = _bits(heights[: end - begin])
            # Their memory in the cache, and this ring, is filled anew as soon as the next batch is asked for.
            self._device.wait()
        results = results.view(tokens, top_k, width)
        out = results[:, 0] * weights[:, :1]
        for rank in range(1, top_k):
            out.addcmul_(results[:, rank], weights[:, rank : rank + 1])
        return out


def _stretches(counts: np.ndarray, most: int):
    """(first, last) of stretches of experts whose pairs together are no more than `most`."""
    first, held = 0, 0
    for place, count in enumerate(counts):
        if count > most:
            raise EngineError(f"an expert with {count} tokens does not fit the scratch memory for {most}")
        if held + count > most:
            yield first, place
            first, held = place, 0
        held += count
    yield first, len(counts)


def _bits(heights: torch.Tensor) -> np.ndarray:
    """Which neurons are not zero, [pairs, I] -> uint16 [pairs, I/16], the lowest neuron in the lowest bit."""
    places = 1 << torch.arange(GROUP, dtype=torch.int32, device=heights.device)
    bits = ((heights != 0).unflatten(1, (-1, GROUP)) * places).sum(-1, dtype=torch.int32)
    return bits.cpu().numpy().astype(np.uint16)
