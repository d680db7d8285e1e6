"""The model that a trace must be of: refuse another's, and learn the size of its blocks where the trace lacks it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from nemolab.errors import StoreError, TraceError
from nemolab.units import whole_pages

if TYPE_CHECKING:
    from nemolab.trace import Trace


@dataclass(frozen=True)
class ModelFacts:
    """What a trace can be held against. block_bytes by MoE layer; fingerprint is None where only a store knows it."""

    n_layers: int
    n_experts: int
    top_k: int
    block_bytes: tuple[int, ...]
    fingerprint: str | None


def join_model(trace: Trace, path: str | Path) -> tuple[Trace, list[str]]:
    """The trace with the block sizes of the model at `path`, a store, a checkpoint or a config, and notes about both.

    Raises TraceError for a trace of another model, CheckpointError or StoreError for a path that is none.
    """
    facts = read_model(path)
    trace.check_model(facts.fingerprint, facts.n_layers, facts.n_experts, facts.top_k)
    notes = []
    if None in (facts.fingerprint, trace.meta.fingerprint):
        which = "the trace names no fingerprint" if trace.meta.fingerprint is None else f"{path} is no store"
        notes.append(
            f"compared with {path} by its shape alone ({which}): a model retrained in the same shape would pass"
        )
    known = trace.meta.block_bytes
    if known is None:
        trace = replace(trace, meta=replace(trace.meta, block_bytes=facts.block_bytes))
    elif known != facts.block_bytes:
        notes.append(f"block sizes are those of the trace; {path} has others ({_range(facts.block_bytes)} bytes)")
    return trace, notes


def read_model(path: str | Path) -> ModelFacts:
    """Shape and block sizes of a store, or of what `nemolab plan` counts: a checkpoint or a bare config.json."""
    from nemolab.store import Store, files

    path = Path(path)
    if (path / files.MANIFEST).exists():
        return _of_store(Store.open(path))
    from nemolab.plan import plan

    counted = plan(path)
    blocks = {layer: whole_pages(group.expert_bytes) for group in counted.groups for layer in group.layers}
    if not blocks:
        raise TraceError(f"{path} has no MoE layers, so no trace can be of it")
    sizes = tuple(blocks[layer] for layer in sorted(blocks))
    return ModelFacts(len(sizes), counted.experts, counted.top_k, sizes, _cached_fingerprint(path))


def _of_store(store) -> ModelFacts:
    sizes = (store.block_bytes,) * store.n_layers
    return ModelFacts(store.n_layers, store.n_experts, store.config.top_k, sizes, store.fingerprint)


def _cached_fingerprint(path: Path) -> str | None:
    """Of a checkpoint from which a command has made a store on the way: that store's. Nothing is made here."""
    from nemolab.checkpoint import Checkpoint
    from nemolab.errors import CheckpointError
    from nemolab.store import Store
    from nemolab.store.cachefolder import store_folder

    try:
        return Store.open(store_folder(Checkpoint.open(path), "neuron")).fingerprint
    except (CheckpointError, StoreError):
        return None


def _range(sizes: tuple[int, ...]) -> str:
    return f"{min(sizes):,}" + ("" if min(sizes) == max(sizes) else f" to {max(sizes):,}")
