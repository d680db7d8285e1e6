"""The choice of experts for one token on the card, in float32 from logits to weights; the formulas of
`nemolab.kernels.router_step`.

    logits, bias float32 [experts] -> experts int32 [top_k] in rank order, weights float32 [top_k]

An expert's rank is the number of experts before it: those with a larger key, and those of an equal key and a lower id.
So all ranks are counted at once, ties included, without sorting: experts^2 comparisons, MINE experts against all a
program. A second launch weighs the chosen, in rank order; with several groups of experts a first one writes the keys,
those of barred groups as -inf. Bounded by its launches. A NaN logit comes first, as in the twin, and its weight is NaN:
ids stay in range.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nemolab.errors import EngineError
from nemolab.kernels.gpu.launch import check_tensor
from nemolab.kernels.router_step import router_step_torch

__all__ = ["RouterStep", "router_step_torch"]

_MINE = 8  # experts that a program ranks


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _key(logits, bias, expert, inside):
    """What chooses; -inf outside, +inf for NaN."""
    logit = tl.load(logits + expert, mask=inside, other=0.0)
    key = _sigmoid(logit) + tl.load(bias + expert, mask=inside, other=0.0)
    return tl.where(inside, tl.where(key != key, float("inf"), key), float("-inf"))


@triton.jit
def _group_keys_kernel(logits, bias, keys, best, size, groups, top_groups, GROUPS: tl.constexpr, SIZE: tl.constexpr):
    # grid: (1,); best float32 [groups] is scratch between the two halves
    group, place = tl.arange(0, GROUPS), tl.arange(0, SIZE)
    inside = (group < groups)[:, None] & (place < size)[None, :]
    expert = group[:, None] * size + place[None, :]
    key = _key(logits, bias, expert, inside)
    largest = tl.max(key, 1)
    first = tl.min(tl.where(key == largest[:, None], place[None, :], SIZE), 1)
    second = tl.max(tl.where(place[None, :] == first[:, None], float("-inf"), key), 1)
    total = tl.where(second == float("-inf"), largest, largest + second)
    tl.store(best + group, total, mask=group < groups)
    tl.debug_barrier()
    before = tl.zeros([GROUPS], tl.int32)
    for other in range(0, groups):
        theirs = tl.load(best + other)
        before += ((theirs > total) | ((theirs == total) & (other < group))).to(tl.int32)
    key = tl.where((before < top_groups)[:, None], key, float("-inf"))
    tl.store(keys + expert, key, mask=inside)


@triton.jit
def _rank_kernel(
    logits, bias, keys, experts, count, top_k, GROUPED: tl.constexpr, COUNT: tl.constexpr, MINE: tl.constexpr
):
    # grid: (cdiv(count, MINE),)
    mine, other = tl.program_id(0) * MINE + tl.arange(0, MINE), tl.arange(0, COUNT)
    if GROUPED:
        key = tl.load(keys + mine, mask=mine < count, other=float("-inf"))
        theirs = tl.load(keys + other, mask=other < count, other=float("-inf"))
    else:
        key = _key(logits, bias, mine, mine < count)
        theirs = _key(logits, bias, other, other < count)
    ahead = theirs[None, :] > key[:, None]
    tied = (theirs[None, :] == key[:, None]) & (other[None, :] < mine[:, None])
    rank = tl.sum((ahead | tied).to(tl.int32), 1)
    tl.store(experts + rank, mine, mask=(mine < count) & (rank < top_k))


@triton.jit
def _weigh_kernel(logits, experts, weights, top_k, scaling, NORMALISE: tl.constexpr, TOP_K: tl.constexpr):
    # grid: (1,)
    rank = tl.arange(0, TOP_K)
    inside = rank < top_k
    expert = tl.load(experts + rank, mask=inside, other=0)
    weight = tl.where(inside, _sigmoid(tl.load(logits + expert, mask=inside, other=0.0)), 0.0)
    if NORMALISE:
        weight = weight / (tl.sum(weight, 0) + 1e-20)
    tl.store(weights + rank, weight * scaling, mask=inside)


class RouterStep:
    """The choice for one model's routers, with its scratch memory on `device`.

    experts, top_k, groups, top_groups, normalise, scaling  as in the config
    """

    def __init__(self, experts: int, top_k: int, groups: int, top_groups: int, normalise: bool, scaling: float, device):
        reachable = experts // groups * top_groups
        if top_k > reachable:
            raise EngineError(
                f"top-{top_k} of {experts} experts, but {top_groups} of {groups} groups hold only {reachable}"
            )
        self._experts, self._top_k, self._groups, self._top_groups = experts, top_k, groups, top_groups
        self._normalise, self._scaling = bool(normalise), float(scaling)
        self._keys = torch.empty(experts, dtype=torch.float32, device=device)
        self._best = torch.empty(groups, dtype=torch.float32, device=device)

    def run(self, logits: torch.Tensor, bias: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> None:
        """logits, bias float32 [experts] -> experts int32 [top_k] in rank order, weights float32 [top_k].

        Raises EngineError where sizes, types or devices do not fit.
        """
        wanted = {
            "logits": (logits, torch.float32, (self._experts,)),
            "bias": (bias, torch.float32, (self._experts,)),
            "experts": (experts, torch.int32, (self._top_k,)),
            "weights": (weights, torch.float32, (self._top_k,)),
        }
        for name, expected in wanted.items():
            check_tensor("a router's", name, *expected, self._keys.device)
        if self._groups > 1:
            size = self._experts // self._groups
            _group_keys_kernel[(1,)](
                logits, bias, self._keys, self._best, size, self._groups, self._top_groups,
                GROUPS=triton.next_power_of_2(self._groups), SIZE=triton.next_power_of_2(size),
            )  # fmt: skip
        _rank_kernel[(triton.cdiv(self._experts, _MINE),)](
            logits, bias, self._keys, experts, self._experts, self._top_k,
            GROUPED=self._groups > 1, COUNT=triton.next_power_of_2(self._experts), MINE=_MINE, num_warps=4,
        )  # fmt: skip
        _weigh_kernel[(1,)](
            logits, experts, weights, self._top_k, self._scaling,
            NORMALISE=self._normalise, TOP_K=triton.next_power_of_2(self._top_k), num_warps=1,
        )  # fmt: skip
