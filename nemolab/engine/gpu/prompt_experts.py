"""Routed experts of a prompt pass on a card: in batches through a ring there."""

from __future__ import annotations

import numpy as np
import torch

from nemolab.checkpoint.formats import GROUP
from nemolab.engine.gpu.cache_memory import CacheMemory
from nemolab.errors import EngineError
from nemolab.store import ExpertCache


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
