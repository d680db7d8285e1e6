"""The choice of experts for one token, in float32 from logits to weights.

score = sigmoid(logit); key = score + bias. The keys choose, the scores weigh. With several groups of experts only the
best groups (by the sum of their two best keys) take part. Rank order is key descending, ties to the lowest id.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from nemolab.errors import EngineError
from nemolab.jit import jit


def router_step_torch(logits, bias, top_k: int, groups: int, top_groups: int, normalise: bool, scaling: float):
    """The plain twin: logits [..., experts] -> experts int64 and weights float32, [..., top_k] each."""
    scores = torch.sigmoid(logits)
    key = scores + bias
    if groups > 1:
        grouped = key.unflatten(-1, (groups, -1))
        best_two = grouped.topk(min(2, grouped.shape[-1]), dim=-1)[0].sum(-1)
        # A stable sort, since torch.topk promises nothing about ties.
        ranked = best_two.sort(dim=-1, descending=True, stable=True)[1]
        barred = torch.ones_like(best_two, dtype=torch.bool).scatter_(-1, ranked[..., :top_groups], False)
        key = grouped.masked_fill(barred[..., None], -torch.inf).flatten(-2)
    experts = key.sort(dim=-1, descending=True, stable=True)[1][..., :top_k]
    weights = scores.gather(-1, experts)
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return experts, weights * scaling


@jit
def _largest(values, start, stop):
    """Place of the largest value, the lowest of equals."""
    best = start
    for i in range(start + 1, stop):
        if values[i] > values[best]:
            best = i
    return best


@jit
def choose_experts(logits, bias, groups, top_groups, normalise, scaling, key, experts, weights):
    """experts and weights [top_k] from logits [experts]; key [experts] is scratch."""
    count = logits.shape[0]
    for e in range(count):
        key[e] = np.float32(1) / (np.float32(1) + math.exp(-logits[e])) + bias[e]
    if groups > 1:
        size = count // groups
        best_two = np.empty(groups, np.float32)
        for g in range(groups):
            first = _largest(key, g * size, (g + 1) * size)
            best_two[g] = key[first]
            if size > 1:
                held = key[first]
                key[first] = -np.inf
                best_two[g] += key[_largest(key, g * size, (g + 1) * size)]
                key[first] = held
        chosen = np.zeros(groups, np.bool_)
        for _ in range(top_groups):
            best = _largest(best_two, np.int64(0), groups)
            chosen[best] = True
            best_two[best] = -np.inf
        for e in range(count):
            if not chosen[e // size]:
                key[e] = -np.inf
    # In order of ids, each moves ahead of those with smaller keys; most have no place among the best so far.
    held = 0
    for e in range(count):
        if held < experts.shape[0]:
            held += 1
        elif key[e] <= key[experts[held - 1]]:
            continue
        place = held - 1
        while place > 0 and key[experts[place - 1]] < key[e]:
            experts[place] = experts[place - 1]
            place -= 1
        experts[place] = e
    total = np.float32(0)
    for rank in range(experts.shape[0]):
        weights[rank] = np.float32(1) / (np.float32(1) + math.exp(-logits[experts[rank]]))
        total += weights[rank]
    divisor = total + np.float32(1e-20) if normalise else np.float32(1)
    for rank in range(experts.shape[0]):
        weights[rank] = weights[rank] / divisor * scaling


class RouterStep:
    """The choice for one model's routers, with its scratch memory.

    experts, top_k, groups, top_groups, normalise, scaling  as in the config
    """

    def __init__(self, experts: int, top_k: int, groups: int, top_groups: int, normalise: bool, scaling: float):
        reachable = experts // groups * top_groups
        if top_k > reachable:
            raise EngineError(
                f"top-{top_k} of {experts} experts, but {top_groups} of {groups} groups hold only {reachable}"
            )
        self._settings = (groups, top_groups, bool(normalise), np.float32(scaling))
        self._key = np.empty(experts, np.float32)
        self._top_k = top_k

    def run(self, logits: np.ndarray, bias: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """logits, bias float32 [experts] -> experts int64 in rank order, weights float32, [top_k] each, new."""
        experts, weights = np.empty(self._top_k, np.int64), np.empty(self._top_k, np.float32)
        choose_experts(logits, bias, *self._settings, self._key, experts, weights)
        return experts, weights
