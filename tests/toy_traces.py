"""Small traces with known answers, as `nemolab.trace` holds them, and random ones; random routing, still bare."""

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


def draw_case(seed):
    """Bare routing with what real ones have: layers that saw no token, fewer experts, several tokens a step,
    conversations that come back, guesses that are right as often as not.

    returns  (arguments of `from_routing`, experts in a layer, bytes by layer, a budget in bytes, settings of `replay`)
    """
    rng = np.random.default_rng(seed)
    n_tokens, n_layers, n_experts = rng.integers(1, 40), rng.integers(1, 5), int(rng.integers(2, 9))
    top_k = min(int(rng.integers(1, 4)), n_experts)
    experts = np.argsort(rng.random((n_tokens, n_layers, n_experts)), axis=2)[:, :, :top_k]
    if rng.random() < 0.5:
        experts = np.where(rng.random(experts.shape) < 0.2, experts[0], experts)  # twice in one place, at times
    if rng.random() < 0.4:
        experts[rng.random((n_tokens, n_layers)) < 0.15] = -1
    if rng.random() < 0.3:
        experts[rng.random(experts.shape) < 0.15] = -1
    phase, conversation, step = [], [], []
    while len(phase) < n_tokens:
        prompt = rng.random() < 0.2
        length = int(rng.integers(1, 5)) if prompt else 1 + (rng.random() < 0.2)
        talk = int(rng.integers(0, 4)) if prompt or not phase else conversation[-1]
        phase += [0 if prompt else 1] * length
        conversation += [talk] * length
        step += [(step[-1] if step else 0) + int(rng.integers(1, 3))] * length
    n_guesses = int(rng.integers(1, 5))
    guesses = rng.integers(-1, n_experts, (n_tokens, n_layers, n_guesses))
    right = rng.random((n_tokens, n_layers)) < 0.5
    shared = min(n_guesses, top_k)
    guesses[:, :, :shared][right] = experts[:, :, :shared][right]
    guesses[:, 0] = -1
    routing = {
        "experts": experts,
        "phase": phase[:n_tokens],
        "conversation": conversation[:n_tokens],
        "step": step[:n_tokens],
        "guesses": guesses,
        "prefill_warms": bool(rng.random() < 0.3),
    }
    sizes = rng.integers(1, 5, n_layers).tolist()
    asked = {"prefetch": int(rng.integers(0, n_guesses + 1)), "cold": bool(rng.random() < 0.5)}
    return routing, n_experts, sizes, int(rng.integers(0, 60)), asked
