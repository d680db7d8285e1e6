"""A recorder for this model and this cache: the facts that a trace needs to be replayed."""

from __future__ import annotations

from nemolab.checkpoint.formats import GROUP
from nemolab.store import ExpertCache, Store
from nemolab.trace import Recorder, Routers, TraceMeta


def make_recorder(
    store: Store, cache: ExpertCache, model, prefetch: int, cold: bool, token_ids: bool, taken: dict
) -> Recorder:
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
    return Recorder(
        meta,
        n_layers=store.n_layers,
        top_k=config.top_k,
        hidden=config.hidden_size,
        groups=inter // GROUP,
        routers=routers,
        guesses=prefetch,
        token_ids=token_ids,
    )
