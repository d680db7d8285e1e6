"""Routing drawn by rules instead of routed by a model. `meta.taken` says so: a kind that no model has, and a note.

iid_trace     independent draws: no two policies can be told apart on them
sticky_trace  draws with a memory, set to the repetition and the hit rate published for one large model
"""

from __future__ import annotations

import math

import numpy as np

from nemolab.errors import UsageError
from nemolab.trace.trace import DECODE, Trace, TraceMeta, id_type


def iid_trace(
    n_tokens: int,
    n_layers: int,
    n_experts: int,
    top_k: int,
    *,
    zipf: float = 0.0,
    block_bytes: int | None = None,
    seed: int = 0,
) -> Trace:
    """Each token and layer draws its experts on its own, none twice; all decode, one conversation.

    zipf   an expert of popularity rank r is drawn in proportion to 1 / r^zipf, every layer with ranks of its own; 0:
           all alike, and then a cache of c of N blocks hits about c/N, whatever it evicts (but for Belady's, which
           knows the future, and for an LRU below its floor)
    Raises UsageError for sizes that cannot be.
    """
    _check_numbers(zipf=zipf)
    _check_sizes(n_tokens, n_layers, n_experts, top_k)
    ranks = np.arange(1, n_experts + 1)
    experts = _draw_tokens(n_tokens, n_layers, top_k, -zipf * np.log(ranks), 0.0, seed)
    if zipf:
        note = f"synthetic: independent draws, popularity falls as 1 / rank^{zipf:g}; no token remembers the one before"
    else:
        note = (
            "synthetic: independent draws; a cache of c of N blocks hits about c/N under every policy that does not "
            "know the future (an LRU nothing below one token's cycle)"
        )
    return _make_trace("iid", note, experts, n_experts, block_bytes, {"seed": seed, "zipf": zipf})


def sticky_trace(
    n_tokens: int,
    n_layers: int = 40,
    n_experts: int = 512,
    top_k: int = 22,
    *,
    spread: float = 0.113,
    again: float = 3.5,
    block_bytes: int | None = None,
    seed: int = 0,
) -> Trace:
    """Like `iid_trace`, but with popularity that falls exponentially and a memory of one token.

    spread   of all experts of a layer, the share after which popularity has fallen to 1/e
    again    how many times as likely an expert is if the token before chose it
    The defaults give what was published for 40 layers of 512 experts, top 22: 40 % of a token's experts chosen for the
    token before too, and 81 to 84 % hits of an LRU that holds 24 % of the blocks. Measured, from a cold cache:

        trace = sticky_trace(600)                                            # repeat_rate 0.40
        replay(from_trace(trace), "lru", slots=4915).row("decode")           # hit_rate 0.83

    Nothing else of it is set to a model: reuse over more than one token, say, is that of the popularity alone.
    Raises UsageError for sizes that cannot be.
    """
    _check_numbers(spread=spread, again=again)
    _check_sizes(n_tokens, n_layers, n_experts, top_k)
    ranks = np.arange(n_experts)
    if not spread or not again:
        raise UsageError(f"spread {spread:g} and again {again:g}; numbers above 0 are needed")
    experts = _draw_tokens(n_tokens, n_layers, top_k, -ranks / (spread * n_experts), math.log(again), seed)
    note = (
        f"synthetic: draws with a memory of one token (spread {spread:g}, again {again:g}); no model routed like this"
    )
    return _make_trace(
        "sticky", note, experts, n_experts, block_bytes, {"seed": seed, "spread": spread, "again": again}
    )


def _draw_tokens(n_tokens: int, n_layers: int, top_k: int, falling: np.ndarray, bonus: float, seed: int) -> np.ndarray:
    """Experts (tokens, layers, top_k), drawn in turn in proportion to weights, none twice.

    falling  logarithms of the weights by popularity rank, which each layer deals to its experts anew
    bonus    added for those that the token before chose
    """
    rng = np.random.default_rng(seed)
    n_experts = len(falling)
    weights = np.stack([rng.permutation(falling) for _ in range(n_layers)])
    experts = np.empty((n_tokens, n_layers, top_k), id_type(n_experts))
    for token in range(n_tokens):
        # The largest of log weight + Gumbel noise are a draw without putting back, the largest of all drawn first.
        keys = weights + rng.gumbel(size=weights.shape)
        if token and bonus:
            places = experts[token - 1].astype(np.int64)
            np.put_along_axis(keys, places, np.take_along_axis(keys, places, 1) + bonus, 1)
        first = np.argpartition(-keys, top_k - 1, axis=1)[:, :top_k]
        order = np.argsort(-np.take_along_axis(keys, first, 1), axis=1)
        experts[token] = np.take_along_axis(first, order, 1)
    return experts


def _make_trace(
    kind: str, note: str, experts: np.ndarray, n_experts: int, block_bytes: int | None, facts: dict
) -> Trace:
    n_tokens, n_layers, _ = experts.shape
    numbers = np.arange(n_tokens, dtype=np.int32)
    trace = Trace(
        meta=TraceMeta(
            model=f"{kind} draws",
            n_experts=n_experts,
            block_bytes=None if block_bytes is None else (block_bytes,) * n_layers,
            source="synthetic",
            taken={"kind": kind, "conversations": ["0"], "notes": [note], **facts},
        ),
        experts=experts,
        phase=np.full(n_tokens, DECODE, np.uint8),
        conversation=np.zeros(n_tokens, np.int32),
        position=numbers,
        step=numbers.copy(),
    )
    trace.check()
    return trace


def _check_sizes(n_tokens: int, n_layers: int, n_experts: int, top_k: int) -> None:
    if min(n_tokens, n_layers, n_experts, top_k) < 1 or top_k > n_experts:
        raise UsageError(
            f"{n_tokens} tokens, {n_layers} layers, top {top_k} of {n_experts} experts; each must be at least 1, and no"
            " more chosen than there are"
        )


def _check_numbers(**numbers: float) -> None:
    for name, value in numbers.items():
        if not (math.isfinite(value) and value >= 0):
            raise UsageError(f"{name} is {value}; a number from 0 up is needed")
