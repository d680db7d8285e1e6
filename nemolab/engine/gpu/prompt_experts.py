"""Routed experts of a prompt pass on a card: each needed one crosses the bus once, and computing hides behind copying.

Blocks go into a ring on the card, two halves used in turn, by copies on a stream of their own: while one half is
computed on, the other fills. The CPU queues everything ahead; it waits for copies, never for results, and only where
the reader is about to fill the memory that they come from anew.

Pairs (of a token and a rank) lie expert by expert. They are worked on a span at a time, and what a span gives is
added to the sums at once, so that no result of a pair outlives its span. A token's experts are added in ascending
order of their ids, one after the other: no bit depends on halves, on spans or on what was cached.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import NamedTuple

import numpy as np
import torch

from nemolab.checkpoint.formats import GROUP
from nemolab.engine.gpu.cache_memory import CacheMemory
from nemolab.store import ExpertCache
from nemolab.store.layout import BlockLayout
from nemolab.store.page_lock import CopyBatch

HALF_BLOCKS = 8  # blocks of half the ring on the card: copied by one call, computed on by one launch of each kernel
PAIRS_PER_PIECE_TOKEN = 4  # (token, rank) pairs in a span, at most, for each token of a piece
BIT_ROWS = 512  # pairs whose active neurons are counted at once, for a recorder


class Routing(NamedTuple):
    """Which experts a prompt's tokens go to, sorted: pairs lie expert by expert, tokens ascending.

    pairs   int32 [tokens * top_k]: token * top_k + rank, by place
    starts  int32 [experts + 1]: places starts[e] to starts[e + 1] are expert e's; told  the same on the CPU, once
            `known` has come
    ids     int32 [experts]: those that have tokens first, ascending
    places  int32 [tokens, top_k]: a token's places, ascending; shares float32 [tokens * top_k]: weights by place
    """

    pairs: torch.Tensor
    starts: torch.Tensor
    told: torch.Tensor
    known: torch.cuda.Event
    ids: torch.Tensor
    places: torch.Tensor
    shares: torch.Tensor


class PromptExperts:
    """The routed experts of prompt passes, layer by layer, on torch's current stream.

    shape  (I, X) of an expert; pairs  in a span, at most; memory of 2 * HALF_BLOCKS blocks is taken on the device
    .copies  blocks queued for copying so far
    """

    def __init__(self, shape: tuple[int, int], pairs: int, cache: ExpertCache, memory: CacheMemory, device, operators):
        self._shape, self._cache, self._memory, self._device = shape, cache, memory, device
        self._operators, self._pairs = operators, pairs
        self._half, self._block_bytes = min(HALF_BLOCKS, cache.ring), BlockLayout("neuron", *shape).payload_bytes
        there, blocks = device.torch_device, ring_blocks(cache.ring)
        self._ring = torch.empty(blocks, memory.block_bytes, dtype=torch.uint8, device=there)
        places = memory.block_bytes * np.arange(blocks, dtype=np.int64) + self._ring.data_ptr()
        self._to = places.reshape(2, self._half)
        self._addresses = torch.from_numpy(self._to).to(there)
        self._sources = np.zeros_like(self._to)
        self._copies = device.new_stream()
        self._copied, self._done = ([device.new_event() for _ in range(2)] for _ in range(2))
        self._turn = self.copies = 0
        self._told = None
        self._batches = None
        if getattr(device.locker, "copy_batch", None) is not None:
            self._batches = [
                CopyBatch(device.locker, to, sources, self._block_bytes, self._copies.cuda_stream)
                for to, sources in zip(self._to, self._sources, strict=True)
            ]

    def sort(self, experts: torch.Tensor, weights: torch.Tensor, n_experts: int) -> Routing:
        """experts int64, weights float32 [tokens, top_k] of a layer, on the device. Queued, not waited for."""
        flat, there = experts.flatten(), experts.device
        ordered, pairs = flat.sort(stable=True)
        bounds = torch.arange(n_experts + 1, device=there)
        starts = torch.searchsorted(ordered, bounds, out_int32=True)
        if self._told is None:
            self._told = self._device.host_tensor(n_experts + 1, dtype=torch.int32), self._device.new_event()
        told, known = self._told
        told.copy_(starts, non_blocking=True)
        known.record(self._device.main_stream())
        ids = (starts.diff() == 0).int().sort(stable=True)[1].int()
        count = torch.arange(flat.numel(), dtype=torch.int32, device=there)
        places = torch.empty_like(count).scatter_(0, pairs, count).view(experts.shape).sort(1)[0]
        return Routing(pairs.int(), starts, told, known, ids, places, weights.flatten()[pairs])

    def run(self, layer: int, x: torch.Tensor, routing: Routing, scales_2, active: np.ndarray | None) -> torch.Tensor:
        """The weighted sum of each token's experts, float32 [tokens, X].

        layer    MoE ordinal; x bfloat16 [tokens, X]; scales_2 float32 [experts, 2]
        active   uint16 [tokens, top_k, I/16] on the host or None: receives which neurons are active
        """
        (tokens, top_k), (inter, width), there = routing.places.shape, self._shape, x.device
        routing.known.synchronize()
        starts = routing.told.numpy().astype(np.int64)
        needed = np.flatnonzero(np.diff(starts))
        out = torch.zeros(tokens, width, device=there)
        held = min(self._pairs, tokens * top_k)
        h = torch.empty(held, inter, dtype=torch.bfloat16, device=there)
        results = torch.empty(held, width, device=there)
        done = 0
        by_last_use = None
        if self._cache.prompt_enters:  # an expert's last pair is its last lookup
            by_last_use = needed[routing.pairs.cpu().numpy()[starts[needed + 1] - 1].argsort()]
        with closing(self._halves(layer, needed.tolist(), by_last_use)) as halves:
            for rows in halves:
                turn, mine = self._copy(rows), slice(done, done + len(rows))
                done += len(rows)
                addresses, ids = self._addresses[turn, : len(rows)], routing.ids[mine]
                for span, most in _cut_spans(starts[needed[mine]], starts[needed[mine] + 1], self._pairs):
                    self._operators.expert_prompt(
                        addresses, ids, inter, scales_2, routing.starts, routing.pairs, span, most, top_k, x, h,
                        results,
                    )  # fmt: skip
                    self._operators.add_experts(results, span, routing.places, routing.shares, out)
                    if active is not None:
                        pairs = routing.pairs[slice(*span)].cpu().numpy()
                        active.reshape(tokens * top_k, -1)[pairs] = _bits(h[: len(pairs)])
                self._done[turn].record(self._device.main_stream())
        return out

    def _halves(self, layer: int, experts: list[int], by_last_use: np.ndarray | None) -> Iterator[list[int]]:
        """Rows of the cache's memory with these experts in their order, so many at once as half the ring holds."""
        # Closed by name, as in `ExpertCache.stream`: an error's traceback would keep the stream open.
        with closing(self._cache.stream_rows(layer, experts, "prefill", by_last_use)) as batches:
            for _, rows in batches:
                for first in range(0, len(rows), self._half):
                    yield rows[first : first + self._half]
                # Where the cache's own ring begins, memory is read into as soon as the next batch is asked for; where
                # a prompt enters, any may be for the next layer.
                if max(rows) >= self._cache.slots or self._cache.prompt_enters:
                    self._copied[1 - self._turn].synchronize()

    def _copy(self, rows: list[int]) -> int:
        """Queue copies of these rows into the half whose turn it is; the current stream waits for them. Which half."""
        turn, self._turn, copies = self._turn, 1 - self._turn, self._copies
        self._sources[turn, : len(rows)] = self._memory.addresses[rows]
        copies.wait_event(self._done[turn])
        if all([self._memory.lock_row(row) for row in rows]) and self._batches:
            self._batches[turn].run(0, len(rows))
        else:
            for to, source in zip(self._to[turn].tolist(), self._sources[turn, : len(rows)].tolist(), strict=False):
                self._device.copy(to, source, self._block_bytes, copies)
        self.copies += len(rows)
        self._copied[turn].record(copies)
        self._device.main_stream().wait_event(self._copied[turn])
        return turn


def ring_blocks(cache_ring: int) -> int:
    """Blocks of the ring on the card, beside a cache whose own ring has two banks of so many."""
    return 2 * min(HALF_BLOCKS, cache_ring)


def _cut_spans(starts: np.ndarray, ends: np.ndarray, pairs: int) -> Iterator[tuple[tuple[int, int], int]]:
    """((begin, end), most) of spans of the pairs of neighbouring experts; most: the pairs of one expert in it."""
    for begin in range(int(starts[0]), int(ends[-1]), pairs):
        end = min(begin + pairs, int(ends[-1]))
        yield (begin, end), int((ends.clip(begin, end) - starts.clip(begin, end)).max())


def _bits(heights: torch.Tensor) -> np.ndarray:
    """Which neurons are not zero, [pairs, I] -> uint16 [pairs, I/16], the lowest neuron in the lowest bit."""
    places = 1 << torch.arange(GROUP, dtype=torch.int32, device=heights.device)
    pieces = [
        ((piece != 0).unflatten(1, (-1, GROUP)) * places).sum(-1, dtype=torch.int32).cpu()
        for piece in heights.split(BIT_ROWS)
    ]
    return torch.cat(pieces).numpy().astype(np.uint16)
