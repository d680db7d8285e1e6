"""Where tokens are sent while decode is timed: by draws with published statistics, by a recorded trace, by the model.

A synthetic checkpoint's own routers route like no trained model's, and what a token costs depends on what it finds
cached. So benchmarks tell an engine on a card what to choose (`Engine.force_routing`); the weights stay its routers'.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from nemolab.errors import TraceError
from nemolab.measure.bench_bookkeeping import GUESSES_RIGHT, draw_guesses
from nemolab.trace import DECODE, open_trace
from nemolab.trace.synthetic import sticky_trace


@dataclass(frozen=True)
class Routing:
    """What tokens choose, one after another; behind the last the first comes again.

    name     for people: what it is and what it is made of
    experts  int32 (tokens, layers, top_k) by rank, or None: the model's own routers choose
    guesses  int32 (tokens, layers, n): made in each layer for the next one, by rank; the last layer's are for nobody
    """

    name: str
    experts: np.ndarray | None = None
    guesses: np.ndarray | None = None

    def send(self, engine, token: int) -> None:
        """Let the engine's next token go where this trace's token of that number went."""
        if self.experts is not None:
            token %= len(self.experts)
            engine.force_routing(self.experts[token], None if self.guesses is None else self.guesses[token])

    def with_guesses(self, count: int) -> Routing:
        """The same with only the first so many guesses of each layer: what an engine that makes no more is told."""
        return self if self.guesses is None else replace(self, guesses=self.guesses[:, :, :count] if count else None)


def own_routing() -> Routing:
    return Routing("the model's own")


def every_expert_once(store, prefetch: int) -> Routing:
    """The shortest way past every expert of every layer: behind it, all that fits is cached."""
    layers, n_experts, top_k = store.n_layers, store.n_experts, store.config.top_k
    count = -(-n_experts // top_k)
    ids = np.arange(count * top_k, dtype=np.int32).reshape(count, 1, top_k) % n_experts
    experts = np.broadcast_to(ids, (count, layers, top_k))
    return Routing("every expert once", experts, experts[:, :, :prefetch] if prefetch else None)


def sticky_routing(tokens: int, store, prefetch: int) -> Routing:
    """Draws with the published repetition and hit rate; guesses as often right as was published."""
    trace = sticky_trace(tokens, store.n_layers, store.n_experts, store.config.top_k)
    return Routing("synthetic: sticky", trace.experts.astype(np.int32), _guess(trace.experts, store, prefetch))


def recorded_routing(path: str | Path, store, prefetch: int) -> Routing:
    """The tokens of decode in a trace file of any known form; its own guesses, where it has as many.

    Raises TraceError for no trace, one of another shape than the model's, and one without whole tokens of decode.
    """
    trace = open_trace(path, n_experts=store.n_experts)
    experts, wanted = trace.experts[trace.phase == DECODE], (store.n_layers, store.config.top_k)
    if experts.shape[1:] != wanted or trace.meta.n_experts != store.n_experts:
        raise TraceError(
            f"{path}: {experts.shape[1]} MoE layers, top {experts.shape[2]} of {trace.meta.n_experts} experts; "
            f"this model has {wanted[0]} layers, top {wanted[1]} of {store.n_experts}"
        )
    if not len(experts) or experts.min() < 0:
        raise TraceError(f"{path}: no tokens of decode that went through all layers; a trace of an answer is needed")
    held, guesses = None if trace.guesses is None else trace.guesses[trace.phase == DECODE], None
    name = f"trace: {Path(path).name}"
    if prefetch and held is not None and held.shape[2] >= prefetch and held[:, 1:, :prefetch].min(initial=0) >= 0:
        guesses = _made_in(held[:, :, :prefetch])
    elif prefetch:
        guesses, name = _guess(experts, store, prefetch), f"{name}, guesses drawn ({GUESSES_RIGHT:.0%} right)"
    return Routing(name, experts.astype(np.int32), guesses)


def _guess(experts: np.ndarray, store, prefetch: int) -> np.ndarray | None:
    if not prefetch:
        return None
    guesses = draw_guesses(experts, store.n_experts, prefetch)
    for rank in range(1, guesses.shape[2]):  # an expert is guessed once: one drawn again gives way to its neighbour
        mine, before = guesses[:, :, rank], guesses[:, :, :rank]
        while (again := (before == mine[:, :, None]).any(-1)).any():
            mine[again] = (mine[again] + 1) % store.n_experts
    return _made_in(guesses)


def _made_in(made_for: np.ndarray) -> np.ndarray:
    """Guesses by the layer that makes them, instead of by the layer they are made for."""
    guesses = np.empty(made_for.shape, np.int32)
    guesses[:, :-1], guesses[:, -1] = made_for[:, 1:], np.arange(made_for.shape[2])
    return guesses
