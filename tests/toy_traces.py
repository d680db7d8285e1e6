"""Small traces with known answers, as `nemolab.trace` holds them."""

import numpy as np

from nemolab.trace import GUESSES, Trace, TraceMeta

A, B, C, D = range(4)
KNOWN = (A, B, C, A, B, D, A, B, C)  # with 2 slots: LRU misses 9, the optimum 7, or 5 where a miss may pass by


def make_trace(experts, n_experts=None, *, phase=None, conversation=None, step=None, meta=None, **arrays):
    """A trace of ids (tokens, layers, top_k), or of (tokens,): one layer, top 1. All decode, one conversation."""
    experts = np.asarray(experts, np.int16)
    experts = experts.reshape(-1, 1, 1) if experts.ndim == 1 else experts
    tokens = np.arange(len(experts), dtype=np.int32)
    conversation = np.asarray(np.zeros_like(tokens) if conversation is None else conversation, np.int32)
    facts = {"model": "toy", "n_experts": int(n_experts or experts.max() + 1), "taken": {"kind": "imported"}}
    trace = Trace(
        TraceMeta(**facts | (meta or {})),
        experts,
        phase=np.asarray(np.ones(len(tokens)) if phase is None else phase, np.uint8),
        conversation=conversation,
        position=tokens,
        step=tokens if step is None else np.asarray(step, np.int32),
        **{name: None if array is None else np.asarray(array) for name, array in arrays.items()},
    )
    trace.check()
    return trace


def draw_trace(seed=0, *, n_tokens=60, n_layers=3, n_experts=12, top_k=2, n_guesses=4, prompt=5, talks=2, **settings):
    """Random routing of several conversations, each with a prompt, with guesses that are right half of the time."""
    rng = np.random.default_rng(seed)
    experts = np.argsort(rng.random((n_tokens, n_layers, n_experts)) ** 3, axis=2)[:, :, :top_k].astype(np.int16)
    guesses = np.argsort(rng.random((n_tokens, n_layers, n_experts)), axis=2)[:, :, :n_guesses].astype(np.int16)
    right = rng.random((n_tokens, n_layers)) < 0.5
    shared = min(top_k, n_guesses)
    guesses[:, :, :shared][right] = experts[:, :, :shared][right]
    later = {}
    for ahead, name in GUESSES.items():
        later[name] = guesses.copy()
        later[name][:, :ahead] = -1
    conversation = np.sort(np.arange(n_tokens) % talks)
    within = np.arange(n_tokens) - np.searchsorted(conversation, conversation)
    phase = (within >= prompt).astype(np.uint8)
    step = np.cumsum((phase == 1) | (within == 0)) - 1
    settings = {"meta": {"block_bytes": (4096,) * n_layers}} | settings
    return make_trace(experts, n_experts, phase=phase, conversation=conversation, step=step, **later | settings)
