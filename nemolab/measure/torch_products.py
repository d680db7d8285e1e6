"""How long torch takes for the matrix products of a prompt pass, in BF16, all weights decoded and in place.

No rival that runs a model: nothing but the products, by torch's own library. What has to decode its weights first, and
fetch them, cannot be expected to be faster.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import torch

from nemolab.measure.gpu_floors import time_graph

POOL_BYTES = 256 * 2**20  # of weights of one shape, used in turn: more than any cache holds


def dense_shapes(store) -> Counter[tuple[int, int]]:
    """(rows, columns) -> how many such matrices multiply every token of a prompt; the head is not among them."""
    return Counter(
        module.shape
        for name, module in store.dense.items()
        if len(module.shape) == 2 and module.part not in ("embeddings", "head") and ".layers." in name
    )


def time_dense(store, tokens: int, device, repeats: int) -> list[float]:
    """Seconds for a pass through all dense matrices, a sample a repeat."""
    total = np.zeros(repeats)
    for (rows, columns), count in dense_shapes(store).items():
        weights = _pool(rows, columns, device)
        x = torch.randn(tokens, columns, device=device).bfloat16()
        total += count * _seconds_a_call([lambda w=w, x=x: torch.mm(x, w.T) for w in weights], device, repeats)
    return total.tolist()


def time_experts(store, pairs: Sequence[Sequence[int]], device, repeats: int) -> list[float]:
    """Seconds for both products of all experts, a sample a repeat.

    pairs  by MoE layer: how many tokens each of its experts has
    """
    inter, width = store.expert_shape
    ups, downs = _pool(inter, width, device), _pool(width, inter, device)
    most = max(max(counts) for counts in pairs)
    x, h = (torch.randn(most, size, device=device).bfloat16() for size in (width, inter))
    total = np.zeros(repeats)
    for counts in pairs:
        calls = []
        for number, count in enumerate(filter(None, counts)):
            up, down = ups[number % len(ups)], downs[number % len(downs)]
            calls += [lambda n=count, w=up: torch.mm(x[:n], w.T), lambda n=count, w=down: torch.mm(h[:n], w.T)]
        total += len(calls) * _seconds_a_call(calls, device, repeats)
    return total.tolist()


def _pool(rows: int, columns: int, device) -> list[torch.Tensor]:
    count = max(2, min(64, POOL_BYTES // (2 * rows * columns))) if device.type == "cuda" else 2
    return [torch.randn(rows, columns, device=device).bfloat16() for _ in range(count)]


def _seconds_a_call(calls: list[Callable[[], object]], device, repeats: int) -> np.ndarray:
    if device.type == "cuda":
        return np.array(time_graph(calls, repeats, warm_s=0.02))
    samples = []
    for _ in range(repeats):
        started = time.perf_counter()
        for call in calls:
            call()
        samples.append((time.perf_counter() - started) / len(calls))
    return np.array(samples)
