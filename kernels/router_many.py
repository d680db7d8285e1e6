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
from nemolab.kernels import simd
from nemolab.kernels.matvec import F32, Packed, dot_f32, matvec_torch
from nemolab.kernels.router_step import choose_experts, router_step_torch
from nemolab.kernels.team import Team

_STRETCH_BYTES = 2**17  # of W at a time: half of a small second-level cache


def router_many_torch(gate: Packed, bias: torch.Tensor, h: torch.Tensor, count: int, groups: int, top_groups: int):
    """The plain twin: h float32 [T, X] -> experts int64 [T, count]."""
    logits = torch.stack([matvec_torch(gate, row) for row in h])
    return router_step_torch(logits, bias, count, groups, top_groups, False, 1.0)[0]


@jit
def _dot_two(address, x, y, columns):
    """dot_f32(address, x, columns) and dot_f32(address, y, columns), each in that order: one load serves both."""
    x_a, x_b, x_c, x_d = simd.zeros(), simd.zeros(), simd.zeros(), simd.zeros()
    y_a, y_b, y_c, y_d = simd.zeros(), simd.zeros(), simd.zeros(), simd.zeros()
    k = 0
    while k + 32 <= columns:
        at, x_at, y_at = address + 4 * k, x + 4 * k, y + 4 * k
        w = simd.load_f32(at)
        x_a, y_a = simd.fma(w, simd.load_f32(x_at), x_a), simd.fma(w, simd.load_f32(y_at), y_a)
        w = simd.load_f32(at + 32)
        x_b, y_b = simd.fma(w, simd.load_f32(x_at + 32), x_b), simd.fma(w, simd.load_f32(y_at + 32), y_b)
        w = simd.load_f32(at + 64)
        x_c, y_c = simd.fma(w, simd.load_f32(x_at + 64), x_c), simd.fma(w, simd.load_f32(y_at + 64), y_c)
        w = simd.load_f32(at + 96)
        x_d, y_d = simd.fma(w, simd.load_f32(x_at + 96), x_d), simd.fma(w, simd.load_f32(y_at + 96), y_d)
        k += 32
    while k + 8 <= columns:
        w = simd.load_f32(address + 4 * k)
        x_a, y_a = simd.fma(w, simd.load_f32(x + 4 * k), x_a), simd.fma(w, simd.load_f32(y + 4 * k), y_a)
        k += 8
    x_sum = simd.total(simd.add(simd.add(x_a, x_b), simd.add(x_c, x_d)))
    y_sum = simd.total(simd.add(simd.add(y_a, y_b), simd.add(y_c, y_d)))
    while k < columns:
        w = simd.load_one_f32(address + 4 * k)
        x_sum += w * simd.load_one_f32(x + 4 * k)
        y_sum += w * simd.load_one_f32(y + 4 * k)
        k += 1
    return x_sum, y_sum


@jit
def _many_kernel(part, parts, table, bias, groups, top_groups, stretch, h, experts):
    tokens, rows, columns, values = h.shape[0], table[1], table[2], table[3]
    begin, end = tokens * part // parts, tokens * (part + 1) // parts
    logits = np.empty((end - begin, rows), np.float32)
    row_bytes, h_at = 4 * columns, simd.address_of(h)
    for first in range(0, rows, stretch):
        last = min(first + stretch, rows)
        for t in range(begin, end - 1, 2):
            x = h_at + t * row_bytes
            for row in range(first, last):
                at = values + row * row_bytes
                logits[t - begin, row], logits[t - begin + 1, row] = _dot_two(at, x, x + row_bytes, columns)
        if (end - begin) % 2:
            for row in range(first, last):
                x = h_at + (end - 1) * row_bytes
                logits[end - 1 - begin, row] = dot_f32(values + row * row_bytes, x, columns)
    key, weights = np.empty(rows, np.float32), np.empty(experts.shape[1], np.float32)
    for t in range(begin, end):
        choose_experts(logits[t - begin], bias, groups, top_groups, False, np.float32(1), key, experts[t], weights)


def router_many(
    team: Team, gate: Packed, bias: np.ndarray, h: np.ndarray, count: int, groups: int = 1, top_groups: int = 1
) -> np.ndarray:
    """gate W [E, X] in float32, bias float32 [E], h float32 [T, X] contiguous -> experts int64 [T, count] by rank, new.

    groups, top_groups  as in the config. Raises EngineError for sizes that do not fit.
    """
    if gate.table[0] != F32 or gate.table[5]:
        raise EngineError("routers are float32 matrices without a bias of their own")
    if (
        h.ndim != 2
        or h.dtype != np.float32
        or h.shape[1] != gate.columns
        or not h.flags.c_contiguous
        or bias.shape != (gate.rows,)
    ):
        raise EngineError(f"a router [{gate.rows}, {gate.columns}] with bias {bias.shape} on inputs {h.shape}")
    reachable = gate.rows // groups * top_groups
    if not 0 < count <= reachable:
        raise EngineError(f"{count} of {gate.rows} experts, but {top_groups} of {groups} groups hold {reachable}")
    experts = np.empty((h.shape[0], count), np.int64)
    stretch = max(1, _STRETCH_BYTES // (4 * gate.columns))
    # What a team counts is read from memory once; here each byte is used for all tokens, out of a cache.
    work_bytes = gate.nbytes * h.shape[0] // 4
    team.run(_many_kernel, work_bytes, gate.table, bias, groups, top_groups, stretch, h, experts)
    return experts
