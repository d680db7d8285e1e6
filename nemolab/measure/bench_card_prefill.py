"""A prompt's pass through all layers of a card, beside what its experts' way over the bus and its products must take.

Each expert that a layer's tokens need must cross the bus once, copied whole from page-locked memory: the bytes of those
needed over the bandwidth of a plain copy are one floor, torch's own BF16 products of the same shapes the other, both of
the same run. How many really crossed is told beside it, and raises no floor. The pass is timed with all experts in RAM,
and once more with none; then direct reads of as many blocks in order are something to compare it with. They are no
floor: the disk is measured between the passes, and another time may be quicker or slower.

All passes of an engine are those of one conversation that is rewound: a new one would have torch give back what it
keeps, and the pass would be timed with the allocations that follow.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from nemolab.errors import UsageError
from nemolab.measure.disk_floor import DiskFloor
from nemolab.measure.forced_routing import every_expert_once
from nemolab.measure.gpu_floors import open_bus
from nemolab.measure.torch_products import time_dense, time_experts
from nemolab.progress import say

# Passes with all experts on disk, whatever was asked for: each reads nearly all experts of the model, which takes a
# minute of many a disk, and direct reads spread little.
DISK_REPEATS = 3


def bench_card_prefill(
    path: str | Path,
    *,
    device: str = "cuda",
    tokens: int = 2048,
    repeats: int = 5,
    vram_gib: float | None = None,
    from_disk: bool = True,
) -> dict[str, Any]:
    """Milliseconds of a prompt's pass with all experts in RAM, and with all of them on disk.

    path       a checkpoint or a store; tokens  of the prompt, at random
    repeats    samples, with all experts on disk DISK_REPEATS
    from_disk  False: only with all experts in RAM
    returns    cached_ms and disk_ms (medians), copy_ms and torch_ms (the floors), cached_of_floor and disk_of_floor (of
               the longer), disk_read_ms (the needed blocks read in order) and disk_of_read (disk_ms over it), needed
               (experts, summed over layers), cached_crossed and disk_crossed (blocks queued for copying to the card, a
               pass), cached_crossed_once and disk_crossed_once (as many as are needed), rows
    Raises UsageError for settings that cannot be, EngineError without such a card.
    """
    from nemolab.engine.arguments import find_store
    from nemolab.engine.gpu.device import open_device

    if device == "cpu":
        raise UsageError("bench prefill measures a card's way of passing prompts; on the CPU there is no bus to cross")
    if tokens < 1 or repeats < 3:
        raise UsageError(f"{tokens} tokens, {repeats} samples; 1 and 3 at least are needed")
    card, store = open_device(device), find_store(path, None, "neuron")  # no store is made for a card that is not
    blocks, top_k = store.n_layers * store.n_experts, store.config.top_k
    ids = np.random.default_rng(0).integers(store.config.vocab_size, size=tokens).tolist()
    settings = {"store": store, "device": device, "vram_gib": vram_gib}
    samples: dict[str, list[float]] = {}
    with open_bus(card) as bus, DiskFloor(store, in_order=True) as floor:
        say("prefill, experts in RAM: opening and filling the cache")
        between = {"copy": bus.copy_gb_s}
        cached, counts = _measure(ids, repeats, samples, between, cached=True, ram_cache_slots=blocks, **settings)
        samples["cached"] = samples.pop("ms")
        pairs = counts.tolist()
        if from_disk:
            say("prefill, experts on disk")
            between |= {"disk_bandwidth": floor.gb_s}
            disk, _ = _measure(ids, DISK_REPEATS, samples, between, cached=False, ram_cache_slots=top_k, **settings)
            samples["disk"] = samples.pop("ms")
    there = card.torch_device
    dense, experts = time_dense(store, tokens, there, repeats), time_experts(store, pairs, there, repeats)
    samples["torch"] = [1e3 * sum(both) for both in zip(dense, experts, strict=True)]
    needed = int(np.count_nonzero(counts))
    facts = {
        "model": Path(path).name,
        "device": card.name,
        "layers": store.config.num_hidden_layers,
        "moe_layers": store.n_layers,
        "experts": store.n_experts,
        "top_k": top_k,
        "tokens": tokens,
        "vram_gib": vram_gib,
        "needed": needed,
        "torch_dense_ms": 1e3 * statistics.median(dense),
        "torch_experts_ms": 1e3 * statistics.median(experts),
        "reads_are": floor.mode,
    }
    found = {"cached": cached} | ({"disk": disk} if from_disk else {})
    return _answer("card_prefill" if card.total_bytes else "twin_prefill", store, samples, found, facts)


def _measure(
    ids: list[int],
    repeats: int,
    samples: dict[str, list[float]],
    between: dict[str, Callable[[], float]],
    cached: bool,
    **settings,
) -> tuple[dict[str, Any], np.ndarray | None]:
    """An engine of its own: what a pass counts, and (with all experts cached) tokens of each expert [layers, experts].

    samples   gets the passes' "ms", and what is measured `between` them
    """
    from nemolab.engine import Engine

    store = settings["store"]
    with Engine(None, **settings) as engine:
        counts = None
        if cached:
            walk, state = every_expert_once(store, 0), engine.new_state()
            for token in range(len(walk.experts)):
                walk.send(engine, token)
                engine.step(ids[0], state)
            engine.force_routing(None, None)
            with engine.record(cold=False, token_ids=False) as recorder:
                engine.last_logits(ids, engine.new_state())
            experts, width = recorder.trace().experts, store.n_experts
            counts = np.stack([np.bincount(experts[:, n].ravel(), minlength=width) for n in range(store.n_layers)])
        state = engine.new_state()
        engine.last_logits(ids, state)  # compiles what has to be compiled, takes what memory is needed
        before, samples["ms"] = _counts(engine), []
        for _ in range(repeats):
            rewind(state)
            started = time.perf_counter()
            engine.last_logits(ids, state)
            samples["ms"].append(1e3 * (time.perf_counter() - started))
            for name, measure in between.items():
                samples.setdefault(name, []).append(measure())
        after, memory = _counts(engine), engine.memory()["card"]
    found = {name: (after[name] - before[name]) / repeats for name in ("crossed", "lookups", "misses", "bytes_read")}
    found |= {
        "page_locked_bytes": memory["page_locked_bytes"],
        "pass_tokens": memory["planned"]["pass_tokens"],
    }
    return found | {"vram_planned": memory["planned"], "vram_peak": memory["peak"]}, counts


def _counts(engine) -> dict[str, int]:
    """What the cache's lookups count, and blocks that were really queued for copying: an engine could look up one and
    copy it twice."""
    return engine.stats()["prefill"] | {"crossed": engine.memory()["card"]["prompt_copies"]}


def rewind(state) -> None:
    """A conversation's state before its first token once more, in the memory that it has."""
    from nemolab.engine.state import MambaState

    for layer in state.layers:
        if isinstance(layer, MambaState):
            layer.conv.zero_()
            layer.ssm.zero_()
        elif layer is not None:
            layer.tokens = 0
    state.tokens = 0


def _answer(kind: str, store, samples: dict[str, list[float]], found: dict[str, dict], facts: dict) -> dict[str, Any]:
    """Medians, ratios, rows. kind: of the rows' names; twins' are no card's."""
    middle = {name: statistics.median(values) for name, values in samples.items()}
    floors = {"copy_ms": 1e-6 * facts["needed"] * store.payload_bytes / middle["copy"], "torch_ms": middle["torch"]}
    bound = max(floors, key=floors.get)
    shared = facts | floors | {"floor_ms": floors[bound], "floor_is": bound.removesuffix("_ms")}
    shared |= {"needed_bytes": facts["needed"] * store.payload_bytes}
    bandwidths = {"copy_gb_s": middle["copy"], "disk_gb_s": middle.get("disk_bandwidth")}
    answer: dict[str, Any] = dict(floors)
    rows = []
    for name, counted in found.items():
        settings = shared | counted | bandwidths | {"crossed_bytes": counted["crossed"] * store.payload_bytes}
        if counted["bytes_read"]:
            read_ms = 1e-6 * facts["needed"] * store.block_bytes / middle["disk_bandwidth"]
            settings |= {"disk_read_ms": read_ms, "disk_of_read": middle[name] / read_ms}
            answer |= {"disk_read_ms": read_ms, "disk_of_read": middle[name] / read_ms}
        answer |= {f"{name}_ms": middle[name], f"{name}_tok_s": 1e3 * facts["tokens"] / middle[name]}
        answer |= {f"{name}_of_floor": middle[name] / floors[bound], f"{name}_crossed": counted["crossed"]}
        answer[f"{name}_crossed_once"] = counted["crossed"] == facts["needed"]
        rows.append({"name": f"{kind}.{name}", "values": samples[name], "unit": "ms", "settings": settings})
    units = {"torch": ("torch", "ms"), "copy": ("copy_bandwidth", "GB/s"), "disk_bandwidth": ("disk_bandwidth", "GB/s")}
    for name in [name for name in units if name in samples]:
        told, unit = units[name]
        rows.append({"name": f"{kind}.{told}", "values": samples[name], "unit": unit, "settings": facts})
    return answer | bandwidths | {"needed": facts["needed"], "rows": rows}
