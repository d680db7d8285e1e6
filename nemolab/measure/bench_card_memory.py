"""What an engine's process takes of a card's memory, as the driver tells, beside what was allowed and what was planned.

A thread asks the driver's management library all the while: what is in use by everybody, less what was in use before
this process touched the card. So nothing of ours is left out, whoever allocated it: weights, states, what torch keeps,
kernels, graphs, the driver's own. Other programs that come meanwhile would be counted, too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from nemolab.errors import UsageError

ASK_EVERY_S = 0.002


def bench_card_memory(
    path: str | Path,
    *,
    device: str = "cuda",
    vram_gib: float = 8.0,
    prompt_tokens: int = 8192,
    tokens: int = 16,
    transfer: str = "pull",
    prefetch: int = 4,
    meter: Any = None,
) -> dict[str, Any]:
    """The most that is in use while a model is loaded, reads a long prompt and writes behind it.

    path      a checkpoint or a store; vram_gib  what the engine is allowed
    meter     something with used_bytes(), instead of the driver's library
    returns   load_gib, prompt_gib, decode_gib, peak_gib; budget_gib and within_budget; planned_gib and found_gib (the
              peak by the engine's own account); prompt_s, decode_ms (a token); asked (how often); rows
    Raises UsageError where the driver does not tell, and for settings that cannot be.
    """
    from nemolab.engine import Engine
    from nemolab.engine.arguments import find_store

    if prompt_tokens < 1 or tokens < 1:
        raise UsageError(f"a prompt of {prompt_tokens} tokens and {tokens} behind it; 1 of each is needed at least")
    watch, store = Watch(meter or _open_meter(device)), find_store(path, None, "neuron")
    ids = np.random.default_rng(0).integers(store.config.vocab_size, size=prompt_tokens + tokens).tolist()
    settings = {"device": device, "vram_gib": vram_gib, "transfer": transfer, "prefetch": prefetch}
    with watch.phase("load"):
        engine = Engine(None, store=store, **settings)
    with engine:
        state, started = engine.new_state(), time.perf_counter()
        with watch.phase("prompt"):
            engine.last_logits(ids[:prompt_tokens], state)
        between = time.perf_counter()
        with watch.phase("decode"):
            for token in ids[prompt_tokens:]:
                engine.step(token, state)
        ended, memory = time.perf_counter(), engine.memory()["card"]
    gib = {phase: most / 2**30 for phase, most in watch.most_bytes.items()}
    peak_gib, planned = max(gib.values()), memory["planned"]
    figures = {
        "budget_gib": vram_gib,
        "within_budget": peak_gib <= vram_gib,
        "planned_gib": planned["total_bytes"] / 2**30,
        "found_gib": memory["peak"].get("total_bytes", 0) / 2**30,
        "pass_tokens": planned["pass_tokens"],
        "prompt_s": between - started,
        "decode_ms": 1e3 * (ended - between) / tokens,
        "asked": watch.asked,
    }
    facts = {
        "model": Path(path).name,
        "device": memory["name"],
        "layers": store.config.num_hidden_layers,
        "moe_layers": store.n_layers,
        "experts": store.n_experts,
        "prompt_tokens": prompt_tokens,
        "tokens": tokens,
        "transfer": transfer,
        "prefetch": prefetch,
    }
    said = facts | figures | {"planned": planned, "found": memory["found"], "peak": memory["peak"]}
    rows = [
        {"name": f"card_memory.{phase}", "values": [most], "unit": "GiB", "settings": said}
        for phase, most in gib.items()
    ]
    return {f"{phase}_gib": most for phase, most in gib.items()} | {"peak_gib": peak_gib} | figures | {"rows": rows}


class Watch:
    """Asks how much is in use beyond what is in use when it is made. .most_bytes  by phase; .asked  how often"""

    def __init__(self, meter):
        self._meter, self._others_bytes = meter, meter.used_bytes()
        self.most_bytes: dict[str, int] = {}
        self.asked = 0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.most_bytes[name], done = 0, threading.Event()
        thread = threading.Thread(target=self._ask_until, args=(name, done), name="nemolab-watch")
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _ask_until(self, name: str, done: threading.Event) -> None:
        last = False
        while not last:  # once more behind the end: what is held then counts, too
            last = done.wait(ASK_EVERY_S)
            used_bytes = self._meter.used_bytes() - self._others_bytes
            self.most_bytes[name] = max(self.most_bytes[name], used_bytes)
            self.asked += 1


def _open_meter(device: str):
    from nemolab.system.nvml import CardMeter

    kind, _, index = device.partition(":")
    if kind != "cuda" or (index and not index.isdecimal()):
        raise UsageError(f"device {device!r} has no memory of its own; 'cuda', 'cuda:1' and so on have")
    try:
        return CardMeter(int(index or 0))
    except OSError as problem:
        raise UsageError(f"device {device!r}: the driver does not tell what is in use ({problem})") from None
