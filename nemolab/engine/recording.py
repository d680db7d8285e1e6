"""A recorder for this model and this cache: the facts that a trace needs to be replayed."""

from __future__ import annotations

from typing import Any

from nemolab.checkpoint.formats import GROUP
from nemolab.store import ExpertCache, Store
from nemolab.trace import Recorder, Routers, Trace, TraceMeta


class EngineRecorder(Recorder):
    """A recorder that also writes down what makes a replay differ from what was live.

    That is a cache that had to stay smaller than it was asked to be (`slots_at_end`), and steps that failed half-way
    (`failed_steps`): what they looked up moved the cache and is not in the trace.
    """

    def __init__(self, cache: ExpertCache, *arguments: Any, **facts: Any):
        super().__init__(*arguments, **facts)
        self._cache, self._failed_steps, self._inside = cache, 0, False

    def begin_step(self, phase: int, state: Any, token_ids) -> None:
        self._failed_steps += self._inside
        self._inside = True
        super().begin_step(phase, state, token_ids)

    def end_step(self) -> None:
        super().end_step()
        self._inside = False

    def trace(self, **taken: Any) -> Trace:
        ended = {"slots_at_end": self._cache.slots, "failed_steps": self._failed_steps + self._inside}
        return super().trace(**{"cache": self.meta.taken["cache"] | ended} | taken)


def make_recorder(
    store: Store, cache: ExpertCache, model, prefetch: int, cold: bool, token_ids: bool, taken: dict
) -> EngineRecorder:
    """An empty recorder. taken: what else to write down about how the trace was taken."""
    config = store.config
    settings = {
        "policy": cache.policy.name,
        "slots": cache.slots,
        "budget_bytes": cache.slots * cache.block_bytes,
        "prefetch": prefetch,
        "start": "empty" if cold else "as it was",
    }
    meta = TraceMeta(
        model=store.manifest.source["name"],
        n_experts=store.n_experts,
        fingerprint=store.fingerprint,
        block_bytes=(store.block_bytes,) * store.n_layers,
        prefill_warms=cache.prompt_enters,
        taken={"kind": "chat", **taken, "cache": settings},
    )
    layers = model.moe_layers
    routers = Routers(
        model.team,
        [layer.gate.packed for layer in layers],
        [layer.gate_bias.numpy() for layer in layers],
        config.n_group,
        config.topk_group,
    )
    inter = store.expert_shape[0]
    return EngineRecorder(
        cache,
        meta,
        n_layers=store.n_layers,
        top_k=config.top_k,
        hidden=config.hidden_size,
        groups=inter // GROUP,
        routers=routers,
        guesses=prefetch,
        token_ids=token_ids,
    )
