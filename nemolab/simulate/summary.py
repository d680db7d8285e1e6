"""All measures of one trace in one table: how concentrated, repetitive and predictable, with the controls beside it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from nemolab.simulate import measures
from nemolab.simulate.lookups import from_trace
from nemolab.trace import DECODE, GUESSES, PHASES, PREFILL

if TYPE_CHECKING:
    from nemolab.trace import Trace

RECORDED = (None, "chat", "text", "imported")  # how routing of a real model is taken


def is_synthetic(trace: Trace) -> bool:
    """Whether it was drawn by rules instead of routed by a model."""
    return trace.meta.taken.get("kind") not in RECORDED


def list_facts(trace: Trace) -> dict[str, Any]:
    """What the trace is of, as JSON."""
    meta = trace.meta
    return {
        "model": meta.model,
        "source": meta.source,
        "kind": meta.taken.get("kind"),
        "synthetic": is_synthetic(trace),
        "tokens": {name: int((trace.phase == number).sum()) for number, name in enumerate(PHASES)},
        "conversations": len(np.unique(trace.conversation)),
        "layers": trace.n_layers,
        "n_experts": meta.n_experts,
        "top_k": trace.top_k,
        "blocks": trace.n_layers * meta.n_experts,
        "block_bytes": _one_or_all(meta.block_bytes),
        "guesses": 0 if trace.guesses is None else trace.guesses.shape[2],
        "prefill_warms": meta.prefill_warms,
        "cache": meta.taken.get("cache"),
        "live_misses": trace.live_misses is not None,
    }


def measure_trace(trace: Trace, *, cold: bool = False) -> dict[str, Any]:
    """The measures of `nemolab.simulate.measures` over the tokens of decode, or of the prompts where nothing else is.

    Shares are of lookups, 0 to 1. `guesses` is by MoE layers ahead: right[j] is the share of the first j + 1 guesses
    that were chosen, covered[j] the share of the chosen that they name; `perfect` and `shuffled` are `right` of the
    controls that must give 1 and chance. Those of `repeat_rate` are named apart: the same tokens shuffled within their
    conversation, and across all of them. cold: first lookups and reuse are counted anew in each conversation.
    """
    phase = DECODE if (trace.phase == DECODE).any() else PREFILL
    chosen = trace.phase == phase
    experts, conversation = trace.experts[chosen], trace.conversation[chosen]
    runs = measures.number_runs(conversation, trace.position[chosen])
    within, across = (measures.shuffle_tokens(conversation, across=across) for across in (False, True))
    n_experts = trace.meta.n_experts
    counts = measures.count_usage(experts, n_experts)
    # Prompts pass all at once: what they reuse is counted as if each were read once, like any batch.
    histogram = measures.reuse_histogram(
        from_trace(trace, prefill_warms=phase == PREFILL or None), phase=phase, cold=cold
    )
    n_lookups = int(histogram.counts.sum()) + histogram.never
    return {
        "phase": PHASES[phase],
        "cold": cold,
        "tokens": int(chosen.sum()),
        "lookups": n_lookups,
        "distinct_experts": int(np.count_nonzero(counts)),
        "experts": counts.size,
        "hottest_quarter_share": measures.hottest_share(counts),
        "repeat_rate": measures.repeat_rate(experts, runs),
        "repeat_rate_shuffled_within_conversations": measures.repeat_rate(experts[within], runs),
        "repeat_rate_shuffled_across_conversations": measures.repeat_rate(experts[across], runs),
        "repeat_rate_by_chance": trace.top_k / n_experts,
        "compulsory_share": histogram.never / n_lookups if n_lookups else None,
        "entropy_bits": measures.entropy_bits(counts).tolist(),
        "entropy_bits_even": math.log2(n_experts),
        "reuse_distance": {
            "unit": "blocks",
            "edges": histogram.edges.tolist(),
            "counts": histogram.counts.tolist(),
            "never": histogram.never,
        },
        "guesses": {
            str(ahead): _rate_guesses(experts, getattr(trace, name)[chosen])
            for ahead, name in GUESSES.items()
            if getattr(trace, name) is not None
        },
    }


def _rate_guesses(experts: np.ndarray, guesses: np.ndarray) -> dict[str, Any]:
    found = measures.guess_accuracy(experts, guesses)
    known = found.n_guessed > 0
    controls = {
        "perfect": measures.perfect_guesses(experts, like=guesses),
        "shuffled": measures.shuffle_guesses(guesses),
    }
    return {
        "places": found.n_guessed,
        "right": found.right.tolist() if known else None,
        "covered": found.covered.tolist() if known else None,
        **{
            name: measures.guess_accuracy(experts, control).right.tolist() if known else None
            for name, control in controls.items()
        },
    }


def _one_or_all(sizes: tuple[int, ...] | None) -> int | list[int] | None:
    """The size of every block, or those of each layer where they differ."""
    return list(sizes) if sizes and len(set(sizes)) > 1 else sizes and sizes[0]
