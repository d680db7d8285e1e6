"""What one router would choose for many tokens: experts by rank, bit for bit those of the one-token step.

experts [T, n] = the n largest of sigmoid(W h) + bias within the limit of groups     W [E, X] float32, h [T, X]

Reads W once for all tokens of a thread, in stretches of rows that stay in its cache, and h once a stretch. Each logit
is the sum that `matvec` makes for one token, in the same order, and each choice that of `RouterStep`. So guesses that
were made in bulk, afterwards, are those that a prefetching engine makes on the way.
"""

from __future__ import annotations

import numpy as np
import torch

from nemolab.errors import EngineError
from nemolab.jit import jit
from nemolab.kernels.matvec import PLAIN, Packed, matvec_torch, multiply_rows
from nemolab.kernels.router_step import choose_experts, router_step_torch
from nemolab.kernels.team import Team

_STRETCH_BYTES = 2**17  # of W at a time: half of a small second-level cache


def router_many_torch(gate: Packed, bias: torch.Tensor, h: torch.Tensor, count: int, groups: int, top_groups: int):
    """The plain twin: h float32 [T, X] -> experts int64 [T, count]."""
    logits = torch.stack([matvec_torch(gate, row) for row in h])
    return router_step_torch(logits, bias, count, groups, top_groups, False, 1.0)[0]


@jit
def _many_kernel(part, parts, table, scale, bias, groups, top_groups, stretch, h, experts):
    tokens, rows, count = h.shape[0], table[1], experts.shape[1]
    begin, end = tokens * part // parts, tokens * (part + 1) // parts
    logits = np.empty((end - begin, rows), np.float32)
    for first in range(0, rows, stretch):
        last = min(first + stretch, rows)
        for t in range(begin, end):
            multiply_rows(first, last, table, scale, h[t], logits[t - begin], PLAIN)
    key, weights = np.empty(rows, np.float32), np.empty(count, np.float32)
    for t in range(begin, end):
        choose_experts(logits[t - begin], bias, groups, top_groups, False, np.float32(1), key, experts[t], weights)


def router_many(
    team: Team, gate: Packed, bias: np.ndarray, h: np.ndarray, count: int, groups: int = 1, top_groups: int = 1
) -> np.ndarray:
    """gate W [E, X], bias float32 [E], h float32 [T, X] contiguous -> experts int64 [T, count] by rank, new.

    groups, top_groups  as in the config. Raises EngineError for sizes that do not fit.
    """
    if h.ndim != 2 or h.shape[1] != gate.columns or not h.flags.c_contiguous or bias.shape != (gate.rows,):
        raise EngineError(f"a router [{gate.rows}, {gate.columns}] with bias {bias.shape} on inputs {h.shape}")
    reachable = gate.rows // groups * top_groups
    if not 0 < count <= reachable:
        raise EngineError(f"{count} of {gate.rows} experts, but {top_groups} of {groups} groups hold {reachable}")
    experts = np.empty((h.shape[0], count), np.int64)
    stretch = max(1, _STRETCH_BYTES // (4 * gate.columns))
    # As much arithmetic as a matrix of these bytes times one vector takes.
    work_bytes = gate.nbytes * h.shape[0]
    team.run(_many_kernel, work_bytes, gate.table, gate.scale, bias, groups, top_groups, stretch, h, experts)
    return experts
